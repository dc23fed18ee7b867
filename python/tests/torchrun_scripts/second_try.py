"""Rank 1 fails the first time, when rank 0 has begun."""

import os
import sys
import time

from tell import tell

names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "RANK", "WORLD_SIZE")
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, flush=True)
tell(**{name: os.environ[name] for name in names})
if attempt == "0":
    other = os.path.join(os.environ["TELL"], "told-0")
    # Rank 0 is ended here. Its file is there before its line is.
    while os.environ["RANK"] == "0" or not (os.path.exists(other) and os.path.getsize(other)):
        time.sleep(0.01)
    sys.exit(5)
