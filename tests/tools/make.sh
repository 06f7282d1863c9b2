#!/bin/sh
# make, as scripts call it: with the variables of the make above, but with jobs of its own, since
# a script cannot pass the job server on.
MAKEFLAGS=$(printf '%s' "${MAKEFLAGS:-}" | sed 's/-j[0-9]*//; s/--jobserver-[a-z]*=[^ ]*//')
export MAKEFLAGS
exec make "$@"
