"""Prints a last line without its end."""

import sys

sys.stdout.write("one\ntwo, without its end")
sys.stderr.write("stderr, without its end")
