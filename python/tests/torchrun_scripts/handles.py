"""Saves on any signal, and says which."""

import signal
import sys
import time

from tell import begun, tell


def save(number, frame):
    tell(got=signal.Signals(number).name)
    time.sleep(0.5)
    tell(saved=True)
    sys.exit(0)


for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"):
    signal.signal(signal.Signals[name], save)
begun()
while True:
    time.sleep(0.01)
