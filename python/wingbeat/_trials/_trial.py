"""A trial: what it is called, what became of it, and the thread in which it runs."""

from __future__ import annotations

import math
import queue
import threading
import time
from abc import ABC, abstractmethod

PENDING, RUNNING, TERMINATED, ERROR = "PENDING", "RUNNING", "TERMINATED", "ERROR"


class Trial(ABC):
    """Something that is tried. `wingbeat.tune` and `wingbeat.ml` have their own.

    Args:
        trial_id: Its name.

    Attributes:
        status: `PENDING`, `RUNNING`, `TERMINATED` or `ERROR`.
        reports: The metrics of each of its reports.
        enough: How many of them there were when it was found to have done enough; None if it was not. Later ones do not count.
        error: What it raised; None if it did not.
        is_stopped: Whether it was asked to end.
        launched: When it was started; 0.0 before.
        began: When its function was called; 0.0 before.
        ended: When it had ended; 0.0 before.
    """

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id
        self.status = PENDING
        self.reports: list[dict[str, float]] = []
        self.enough: int | None = None
        self.error: BaseException | None = None
        self.is_stopped = False
        self.launched = self.began = self.ended = 0.0
        self._thread: threading.Thread | None = None

    @property
    @abstractmethod
    def parameters(self) -> str:
        """Its parameters, on a line."""

    @property
    def counted(self) -> list[dict[str, float]]:
        """The reports that count. A trial may make some more before it is stopped, and how many is a matter of chance."""
        return self.reports[: self.enough]

    @property
    def last(self) -> dict[str, float]:
        """The metrics of the last report that counts; none if there is none."""
        counted = self.counted
        return counted[-1] if counted else {}

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return (self.ended or time.time()) - (self.began or self.launched) if self.launched else 0.0

    @property
    def waits(self) -> bool:
        """Whether it waits for room, where that is known."""
        return self.status == RUNNING and not self.began

    def launch(self) -> None:
        """Says that it is started."""
        self.status, self.launched = RUNNING, time.time()

    def start(self, done: queue.SimpleQueue[Trial], is_daemon: bool = True) -> None:
        """Starts it, in a thread of its own.

        Args:
            done: Where it is put when it has ended.
            is_daemon: Whether this program may end before the thread.
        """
        self.launch()

        def body() -> None:
            try:
                self._run()
            except BaseException as error:
                self.error = error
            done.put(self)

        self._thread = threading.Thread(target=body, name=f"wingbeat-trial-{self.trial_id}", daemon=is_daemon)
        self._thread.start()

    @abstractmethod
    def _run(self) -> None:
        """Runs it to its end."""

    def new_reports(self) -> list[dict[str, float]]:
        """What it has reported since this was asked last."""
        return []

    def finish(self) -> None:
        """Decides what came of it, once it has ended."""
        self.ended = time.time()
        self.status = TERMINATED if self.error is None else ERROR

    def join(self, timeout: float | None = None) -> bool:
        """Waits until it has ended.

        Args:
            timeout: For how many seconds at most; None for as long as it takes.

        Returns:
            Whether it has.
        """
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()


def is_number(value: float | None) -> bool:
    """Whether a metric can be compared.

    Args:
        value: The metric.
    """
    return value is not None and not math.isnan(value)
