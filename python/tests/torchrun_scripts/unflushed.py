"""Ends at once, without a flush of what it has written."""

import os
import sys

sys.stdout.write("text without an end, ")
sys.stdout.buffer.write(b"bytes, ")
sys.stderr.write("on stderr, too")
os._exit(7)
