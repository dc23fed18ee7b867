"""torch's threads, while arrays are so small that waking them takes longer than the work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

# Multiplications of a batch below which one thread is as fast as several, and much faster where cores are busy.
_FEW = 4_000_000

_lock = threading.Lock()
_inside = 0
_before = 0


@contextlib.contextmanager
def few(multiplications: int) -> Iterator[None]:
    """Has torch compute in one thread meanwhile, if there is little to compute.

    Several threads of this program may be inside. Each has its own number of torch's threads, as OpenMP does it, and has
    it again afterwards. One that uses torch for the first time has the number that was set last in any thread.

    Args:
        multiplications: Those of a batch.
    """
    global _inside, _before
    import torch

    if multiplications > _FEW:
        yield
        return
    with _lock:
        own = torch.get_num_threads()
        if _inside == 0:
            _before = own
        elif own == 1:  # set by another thread that is inside
            own = _before
        _inside += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            torch.set_num_threads(own)
