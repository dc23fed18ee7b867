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
    """Has torch compute in one thread meanwhile, if there is little to compute. Several threads may be inside.

    Args:
        multiplications: Those of a batch.
    """
    global _inside, _before
    import torch

    if multiplications > _FEW:
        yield
        return
    with _lock:
        if _inside == 0:
            _before = torch.get_num_threads()
        _inside += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                torch.set_num_threads(_before)
