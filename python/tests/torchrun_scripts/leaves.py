"""Leaves a process behind: in its own session, or in the rank's."""

import subprocess
import sys

from tell import tell

left = subprocess.Popen(
    ["sleep", "60"],
    start_new_session=sys.argv[1] == "daemon",
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)
tell(pid=left.pid)
