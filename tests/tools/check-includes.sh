#!/bin/sh
# Compares every #include of ours with the table of arrows that may be drawn between the rooms.
# Nothing points up: a room that needs something from above asks for it by a callback.
set -eu

# room: rooms whose headers it may include, besides its own, base and the public header. A room is a
# folder of lib, and cuda. One file is named by itself: what kernels are written in
# (cuda/kernels/device.h), which a plain compiler finds in the emulator.
table='
base:
plan:
pool: plan
prefix: pool plan
seq: prefix pool plan
sched: seq prefix pool plan
model: plan
device: model plan
cpu: device model plan
cuda: device model plan
cuda/device.h: tests
engine: sched seq prefix pool plan model device
api: engine sched seq prefix pool plan model device
'

find lib cuda src examples -name '*.[ch]' | sort | xargs awk -v table="$table" '
    BEGIN {
        n = split(table, lines, "\n")
        for (i = 1; i <= n; i++) {
            if (split(lines[i], part, ":") < 2) continue
            if (part[1] !~ /\//) room[part[1]] = 1
            m = split(part[2], to, " ")
            for (j = 1; j <= m; j++) allowed[part[1], to[j]] = 1
            allowed[part[1], part[1]] = allowed[part[1], "base"] = 1
        }
    }
    function complain(what) { printf "%s:%d: %s: %s\n", FILENAME, FNR, what, $0; bad = 1 }
    FNR == 1 {
        split(FILENAME, path, "/")
        ours = path[1] == "lib" || path[1] == "cuda"
        me = path[1] == "lib" ? path[2] : path[1]
        if (ours && !(me in room)) complain("a room that the table does not know")
    }
    /^[ \t]*#[ \t]*include/ {
        count++
        if (match($0, /"[^"]+"/)) {
            file = substr($0, RSTART + 1, RLENGTH - 2)
            if (!ours) {
                if (file ~ /\//) complain("only kvpage.h and files beside it may be included")
                next
            }
            if (file !~ /\//) next
            split(file, part, "/")
            if (!((me, part[1]) in allowed) && !((me "/" path[3], part[1]) in allowed))
                complain(me " may not include from " part[1])
        } else if (ours && match($0, /<(assert|locale|setjmp|wchar|wctype|ctype)\.h>/)) {
            complain("not for the library")
        }
    }
    END { printf "check-includes: %d includes\n", count; exit bad }
'
