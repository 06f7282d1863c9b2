#!/bin/sh
# Runs CMocka programs and counts: run-tests.sh RESULTS LABEL program...
# Adds a line "passed failed skipped name" per program to the file RESULTS, and keeps each
# program's output beside it. A program that dies, hangs or leaves tests out counts as failed for
# what is missing. WRAP runs the programs (an emulator), TEST_TIMEOUT is in seconds.
#
# With CI=true a skipped test whose name or program speaks of models or tokenizers is a failure:
# there the files can be fetched, so a skip means that nobody looked.
set -u
results=$1 label=$2
shift 2
must='token|model|chat|golden|accuracy|smollm|gemma'
CMOCKA_MESSAGE_OUTPUT=TAP
export CMOCKA_MESSAGE_OUTPUT
for program in "$@"; do
    name=$label${program#*/*/tests/}
    log=$(dirname "$results")/$(printf '%s' "$name" | tr -c 'A-Za-z0-9._-' '-').log
    start=$(date +%s)
    timeout "${TEST_TIMEOUT:-600}" ${WRAP:-} "$program" >"$log" 2>&1 </dev/null
    rc=$?
    counts=$(awk -v rc=$rc -v must="$must" -v name="$name" -v ci="${CI:-}" '
        function strict(line) { return ci == "true" && (name " " line) ~ must }
        /^1\.\.[0-9]+/ { plan += substr($1, 4); next }
        /^(not )?ok [0-9]+.*# SKIP/ { if (strict($0)) failed++; else skipped++; next }
        /^ok [0-9]+/ { passed++; next }
        /^not ok [0-9]+/ { failed++; next }
        END {
            seen = passed + failed + skipped
            if (seen < plan) failed += plan - seen
            if (!failed && (rc || !seen)) failed++
            print passed + 0, failed + 0, skipped + 0
        }' "$log")
    echo "$counts $name" >>"$results"
    set -- $counts
    printf '  %-44s %4d passed %4d failed %4d skipped %5d s\n' "$name" "$1" "$2" "$3" \
        $(($(date +%s) - start))
    if [ "$2" -gt 0 ]; then
        [ $rc = 124 ] && echo "    timed out"
        echo "    exit status $rc; the end of $log:"
        grep -v '^ok ' "$log" | tail -n 40 | sed 's/^/    | /'
    fi
done
