#!/bin/sh
# Runs one check that is no CMocka program and counts it as one test: step.sh RESULTS NAME cmd...
# Exit status of the command: 0 passed, 77 skipped (its last line says why), else failed.
set -u
results=$1 name=$2
shift 2
log=$(dirname "$results")/$name.log
start=$(date +%s)
timeout "${TEST_TIMEOUT:-900}" "$@" >"$log" 2>&1 </dev/null
rc=$?
case $rc in
0) counts="1 0 0" said=passed ;;
77) counts="0 0 1" said="skipped: $(tail -n 1 "$log")" ;;
*) counts="0 1 0" said="FAILED ($rc)" ;;
esac
echo "$counts $name" >>"$results"
printf '  %-44s %s, %d s\n' "$name" "$said" $(($(date +%s) - start))
[ "$said" = "FAILED ($rc)" ] && tail -n 40 "$log" | sed 's/^/    | /'
exit 0
