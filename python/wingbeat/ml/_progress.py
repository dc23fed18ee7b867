"""How far a training is, on standard error: of one that takes long, and not more often than a person reads."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar

# A training that is shorter says nothing.
_EVERY_S = 5.0


# The trial that this thread runs; "" for none.
_trial: ContextVar[str] = ContextVar("_trial", default="")


@contextlib.contextmanager
def of_trial(name: str) -> Iterator[None]:
    """Has trainings say of which trial they are.

    Args:
        name: The trial.
    """
    token = _trial.set(name)
    try:
        yield
    finally:
        _trial.reset(token)


def name_of(what: str) -> str:
    """What a training is called here.

    Args:
        what: What is trained.
    """
    trial = _trial.get()
    return f"{what} ({trial})" if trial else what


class Progress:
    """Says how far a training is.

    Args:
        name: What lines begin with.
        epochs: The largest number of epochs.
        rows: The rows of each.
        is_shown: Whether this process is the one that says it.

    Attributes:
        loss: The mean loss of the last epoch; None before its end.
    """

    def __init__(self, name: str, epochs: int, rows: int, is_shown: bool) -> None:
        self._name, self._epochs, self._rows, self._is_shown = name, epochs, rows, is_shown
        self._next = time.monotonic() + _EVERY_S
        self.loss: float | None = None

    def rows_done(self, epoch: int, done: int) -> None:
        """Says so if it is time.

        Args:
            epoch: The epoch, counted from 0.
            done: How many of its rows are done.
        """
        if not self._is_shown or sys.stderr is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY_S
        loss = "" if self.loss is None else f", loss {self.loss:.6g}"
        place = f"epoch {epoch + 1} of {self._epochs}, {100 * done // self._rows} % of its rows"
        # At once: other threads write lines, too.
        sys.stderr.write(f"{self._name}: {place}{loss}\n")
        sys.stderr.flush()
