"""Forks a child, and waits for it."""

import os

from tell import tell

print("parent", flush=True)
child = os.fork()
if child == 0:
    print("child", flush=True)
    os._exit(4)
tell(status=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
