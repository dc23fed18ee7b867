"""How far a training is, on standard error: of one that takes long, and not more often than a person reads."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

# A training that is shorter says nothing.
_EVERY_S = 5.0


class Progress:
    """Says how far a training is.

    Args:
        epochs: The largest number of epochs.
        rows: The rows of each.
        is_shown: Whether this process is the one that says it.

    Attributes:
        loss: The mean loss of the last epoch; None before its end.
    """

    def __init__(self, epochs: int, rows: int, is_shown: bool) -> None:
        self._epochs, self._rows, self._is_shown = epochs, rows, is_shown
        self._next = time.monotonic() + _EVERY_S
        self.loss: float | None = None

    def rows_done(self, epoch: int, done: int) -> None:
        """Says so if it is time.

        Args:
            epoch: The epoch, counted from 0.
            done: How many of its rows are done.
        """
        if not self._is_shown or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY_S
        loss = "" if self.loss is None else f", loss {self.loss:.6g}"
        place = f"epoch {epoch + 1} of {self._epochs}, {100 * done // self._rows} % of its rows"
        of = "" if _own.trial is None else f" ({_own.trial})"
        if sys.stderr is not None:
            sys.stderr.write(f"LogisticRegression{of}: {place}{loss}\n")  # in one piece: other trials write, too
            sys.stderr.flush()


class _Own(threading.local):
    trial: str | None = None


_own = _Own()


@contextlib.contextmanager
def of_trial(name: str) -> Iterator[None]:
    """Has the lines of this thread say of which trial they are.

    Args:
        name: The name of the trial.
    """
    before, _own.trial = _own.trial, name
    try:
        yield
    finally:
        _own.trial = before
