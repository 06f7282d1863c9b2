#!/bin/sh
# The sum of a RESULTS file as the last line, "N passed, N failed, N skipped"; exit 1 on a failure.
# What failed comes before it, with what it said last: who reads the end of a long log sees why.
dir=$(dirname "$1")
awk '$2 > 0 { print $4 }' "$1" | while read -r name; do
    echo "FAILED: $name"
    log=$dir/$(printf '%s' "$name" | tr -c 'A-Za-z0-9._-' '-').log
    [ -f "$log" ] && grep -v '^ok ' "$log" | tail -n 12 | sed 's/^/    | /'
done
awk '{ p += $1; f += $2; s += $3 }
     END { printf "%d passed, %d failed, %d skipped\n", p, f, s; exit f > 0 || !p }' "$1"
