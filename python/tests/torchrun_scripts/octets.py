"""Prints bytes that are no text."""

import sys

sys.stdout.buffer.write(b"\xff\xfe\x00 \x80\n" + bytes(range(256)) + b"\r\n\n\x1b[31mred\x1b[0m\n")
sys.stderr.buffer.write(b"\xc3\x28 \xf0\x9f\n")
