"""Prints on both streams."""

import os
import sys
import warnings

rank = os.environ["RANK"]
print("rank", rank, "on stdout")
print("rank", rank, "on stderr", file=sys.stderr)
warnings.warn("a warning")
os.write(1, b"by a system call\n")
print("ümlaut", "日本", rank)
