"""Draws a bar over itself, on both streams; or all of it at once."""

import os
import sys
import time

if sys.argv[1:] == ["at-once"]:
    for descriptor in (1, 2):
        os.write(descriptor, b"\r  0%|  |\r 50%|# |\r100%|##|\n")
    sys.exit()
for stream in (sys.stdout, sys.stderr):
    for done in range(0, 101, 20):
        stream.write(f"\r{done:3}%|{'#' * (done // 20):5}|")
        stream.flush()
        time.sleep(0.02)
    stream.write("\n")
    stream.flush()
