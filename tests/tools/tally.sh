#!/bin/sh
# The sum of a RESULTS file as the last line, "N passed, N failed, N skipped"; exit 1 on a failure.
awk '$2 > 0 { print "FAILED: " $4 }
     { p += $1; f += $2; s += $3 }
     END { printf "%d passed, %d failed, %d skipped\n", p, f, s; exit f > 0 || !p }' "$1"
