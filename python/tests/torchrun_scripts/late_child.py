"""Leaves a child that prints after the rank's end."""

import os
import time

rank = os.getpid()
print("rank", flush=True)
if os.fork() == 0:
    while os.getppid() == rank:
        time.sleep(0.01)
    time.sleep(3)  # who ends it has that long
    print("child, after the rank's end", flush=True)
    os._exit(0)
