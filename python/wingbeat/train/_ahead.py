"""What is made ahead of its use, in a thread."""

from __future__ import annotations

import atexit
import contextlib
import queue
import sys
import threading
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def ahead(source: Generator[T, None, None], depth: int) -> Generator[T, None, None]:
    """Runs a generator in a thread.

    The thread ends, and closes the generator, when this one ends or is closed.

    Args:
        source: The generator.
        depth: How many items it may be ahead; with 0 there is no thread.

    Yields:
        Its items.
    """
    if depth == 0:
        with contextlib.closing(source):
            yield from source
        return
    made: queue.SimpleQueue[tuple[bool, T | BaseException | None]] = queue.SimpleQueue()
    room = threading.Semaphore(depth)
    is_over = threading.Event()

    def make() -> None:
        try:
            with contextlib.closing(source):
                while room.acquire() and not is_over.is_set():
                    made.put((True, next(source)))
        except StopIteration:
            made.put((False, None))
        except BaseException as error:
            made.put((False, error))

    taker = threading.get_ident()
    thread = threading.Thread(target=make, name="wingbeat-dataset", daemon=True)

    def stop() -> None:
        is_over.set()
        room.release()
        thread.join()

    # A program may end in the middle. A thread that runs on while the interpreter is taken down is ended wherever it is, and
    # in the middle of pyarrow's code that ends the process with SIGABRT.
    thread.start()
    atexit.register(stop)
    try:
        while True:
            is_item, item = made.get()
            if not is_item:
                if isinstance(item, BaseException):
                    raise item
                return
            room.release()
            yield item  # type: ignore[misc]
    finally:
        if sys.is_finalizing():
            pass  # it was stopped
        elif threading.get_ident() == taker:
            stop()
            atexit.unregister(stop)
        else:
            # What was left early and refers to itself is collected in whatever thread allocates: that one may be waited for by
            # the thread that is to end.
            is_over.set()
            room.release()
