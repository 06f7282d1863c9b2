#!/bin/sh
# The functions that include/kvpage.h declares, one a line, in its order.
# usage: header-symbols.sh [header]
tr '\n' ' ' < "${1:-include/kvpage.h}" |
    awk 'BEGIN { RS = ";" }
         { while (match($0, /KVP_API[^()]*kvp_[a-z0-9_]+ *\(/)) {
               s = substr($0, RSTART, RLENGTH)
               $0 = substr($0, RSTART + RLENGTH)
               sub(/ *\($/, "", s); sub(/.*[^a-z0-9_]/, "", s); print s } }'
