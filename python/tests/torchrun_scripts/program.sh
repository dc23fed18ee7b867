#!/bin/sh
# No Python: its arguments and where it runs.
echo "rank $RANK of $WORLD_SIZE: $# arguments: $*"
echo "in $(pwd)"
echo "this is stderr" >&2
