"""SIGTERM for a program that runs trials: they may save what they have before it ends, as after Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Terminated(BaseException):
    """This program was asked to end by SIGTERM."""


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Has SIGTERM raise `Terminated` for the time of a `with`, and kill this program after it, as it would have at once.

    It stays as it is in a program that handles the signal itself, and in other threads than the main one, which alone may.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: Any) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
