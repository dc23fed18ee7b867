"""Rank 0 is done while rank 1 works on."""

import os
import sys
import time

from tell import tell

if os.environ["RANK"] == "0":
    tell(done=True)
    sys.exit(0)
while not os.path.exists(os.path.join(os.environ["TELL"], "told-0")):
    time.sleep(0.01)
time.sleep(0.5)
tell(done=True)
