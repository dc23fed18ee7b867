"""Prints 100 MB in lines."""

import sys

line = b"".join(b"%07d\n" % number for number in range(125_000))
for _ in range(100):
    sys.stdout.buffer.write(line)
