"""Ends as its argument says."""

import os
import signal
import sys

print("ends", flush=True)
match sys.argv[1:]:
    case ["_exit", code]:
        os._exit(int(code))
    case ["signal", name]:
        os.kill(os.getpid(), signal.Signals[name])
    case ["interrupt"]:
        raise KeyboardInterrupt
    case ["text"]:
        sys.exit("the reason")
    case [code]:
        sys.exit(int(code))
