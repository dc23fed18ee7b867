"""Prints for longer than anybody reads."""

import sys

from tell import tell

try:
    for number in range(20_000):
        print(number, flush=True)
    tell(printed="everything")
except BrokenPipeError:
    tell(printed="until nobody read")
    sys.exit(9)
