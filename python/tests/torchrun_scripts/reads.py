"""Reads its standard input to the end."""

import sys

from tell import tell

tell(read=sys.stdin.read() if sys.stdin else "sys.stdin is None")
