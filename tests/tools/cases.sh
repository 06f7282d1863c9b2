#!/bin/sh
# Compares docs/cases.md with the tests: every `name` it gives must be a test function in the file
# before it, and every case_... function of the tests must be in the table.
# usage: cases.sh    (from the project's root)
set -eu
bad=0
names=$(grep -oE '[a-z_/]+\.c:( `[a-z0-9_]+`,?)+' docs/cases.md | tr -d '`,:' | awk '{for (i = 2; i <= NF; i++) print $1, $i}')
count=$(printf '%s\n' "$names" | wc -l)
[ "$count" -gt 60 ] || { echo "docs/cases.md: only $count tests are named"; bad=1; }
printf '%s\n' "$names" | while read -r file name; do
    grep -q "^static void $name(" "tests/$file" && grep -qE "[( ]$name[,)]" "tests/$file" ||
        echo "docs/cases.md: no test $name in tests/$file"
done >"${TMPDIR:-/tmp}/cases.$$"
grep -rhoE '^static void case_[a-z0-9_]+' tests --include='test_*.c' | awk '{print $3}' | sort -u |
    while read -r name; do
        grep -q "\`$name\`" docs/cases.md || echo "docs/cases.md: $name is not in the table"
    done >>"${TMPDIR:-/tmp}/cases.$$"
[ ! -s "${TMPDIR:-/tmp}/cases.$$" ] || bad=1
cat "${TMPDIR:-/tmp}/cases.$$"
rm -f "${TMPDIR:-/tmp}/cases.$$"
exit $bad
