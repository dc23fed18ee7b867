"""Runs a command that ends with the program that started it: `python _tied.py PARENT COMMAND…`.

Linux sends SIGTERM to the command when the thread that started it ends, also if that was killed (`prctl(2)`). This holds across
`execve(2)`.
"""

import os
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
SIGTERM = 15


def main() -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGTERM, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(sys.argv[1]):  # it ended before prctl, which will then never fire
        sys.exit("the program that started this has ended")
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
