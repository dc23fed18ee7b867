"""How far a training is, on standard error: of one that takes long, and not more often than a person reads."""

from __future__ import annotations

import sys
import time

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
        print(f"LogisticRegression: {place}{loss}", file=sys.stderr, flush=True)
