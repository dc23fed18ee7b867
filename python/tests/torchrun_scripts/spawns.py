"""Has children of multiprocessing, forked and spawned, which find the script again."""

import multiprocessing
import os
import sys

from tell import tell


def child(number):
    print("child", number, flush=True)
    return [number * 2, os.environ["RANK"], os.getcwd() == sys.argv[1], __name__, sys.argv[1:] == [os.getcwd()]]


if __name__ == "__main__":
    sys.argv.append(os.getcwd())
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            tell(**{method: pool.map(child, [21])})
