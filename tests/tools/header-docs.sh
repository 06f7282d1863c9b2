#!/bin/sh
# Every function of the public header, but for kvp_..._init, has a comment before it (or before the
# group of declarations it stands in) that says Thread, Blocking and Since.
set -u
awk '
    /^$/ { comment = "" }
    /^\/\*/ { comment = "" }
    /^\/\*/, /\*\// { comment = comment $0 }
    /^KVP_API/ && match($0, /kvp_[a-z0-9_]+\(/) {
        name = substr($0, RSTART, RLENGTH - 1)
        if (name ~ /_init$/) next
        n++
        for (i = split("Thread Blocking Since", want, " "); i > 0; i--)
            if (index(comment, want[i] ":") == 0) {
                print "kvpage.h: " name ": its comment does not say " want[i]
                bad = 1
            }
    }
    END { print "header-docs: " n " functions"; exit bad || n < 50 }' include/kvpage.h
