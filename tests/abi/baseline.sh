#!/bin/sh
# Records today's ABI as the one to compare with: baseline.sh BUILD. By hand, and rarely: the
# difference is looked at first, and what is released may only be added to.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
abidw --headers-dir include --no-corpus-path --no-comp-dir-path --out-file "$here/baseline.abi" "$1/libkvpage.so"
