"""Runs trials at the same time."""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from wingbeat._trials._display import Display
from wingbeat._trials._trial import RUNNING, Trial

T = TypeVar("T", bound=Trial)

# How often reports are read, and a wait for trials ends at the latest. polars sets a handler of SIGINT with SA_RESTART: then a
# signal does not end a wait, and Python looks for it once that has ended.
_LOOK_S = 0.1


class Engine(ABC, Generic[T]):
    """Runs trials until there are no more. Subclasses choose them and learn what becomes of them.

    Args:
        display: Shows how far they are.

    Attributes:
        trials: Those that were started, in order.
        most: How many run at a time.
        has_more: Whether there may be more to start.
        is_over: Whether the time for all of them is over.
    """

    def __init__(self, display: Display) -> None:
        self.display = display
        self.trials: list[T] = []
        self.most = 1
        self.has_more = True
        self.is_over = False
        self._done: queue.SimpleQueue[Trial] = queue.SimpleQueue()

    def run(self, until: float | None = None) -> None:
        """Runs all trials to their end.

        Args:
            until: When those that still run are stopped, in the time of `time.monotonic`; None for never.
        """
        with self.display.drawn():
            try:
                while True:
                    if until is not None and time.monotonic() > until:
                        self.has_more, self.is_over = False, True
                        for trial in self.running():
                            self.stop_early(trial)
                    while self.has_more and self.has_room():
                        self._start_next()
                    if not self.running():
                        break
                    self._look()
            except BaseException as error:
                self.end_all(error)
                raise
            self.display.update(self.trials, is_last=True)

    def running(self) -> list[T]:
        """Those that run."""
        return [trial for trial in self.trials if trial.status == RUNNING]

    def has_room(self) -> bool:
        """Whether another one is to be started now, if there are more."""
        return len(self.running()) < self.most

    @abstractmethod
    def next_trial(self) -> T | None:
        """The trial to start next; None if there are to be no more."""

    def start(self, trial: T, done: queue.SimpleQueue[Trial]) -> None:
        """Starts a trial, which is put into `done` when it has ended."""
        trial.start(done)

    def is_enough(self, trial: T, metrics: Mapping[str, float]) -> bool:
        """Learns what a trial has reported, and decides whether it is stopped."""
        return False

    def stop_early(self, trial: T) -> None:
        """Has a trial end, unless it was asked to already."""

    def on_end(self, trial: T) -> None:
        """Learns that a trial has ended. One that is to be started again is put back, and then is the next one."""

    def check(self) -> None:
        """Raises what ends all trials."""

    def end_all(self, error: BaseException) -> None:
        """Ends those that run, since an error ends all of them."""

    def _start_next(self) -> None:
        trial = self.next_trial()
        if trial is None:
            self.has_more = False
            return
        if trial not in self.trials:  # one that is started again is there
            self.trials.append(trial)
        self.start(trial, self._done)

    def _look(self) -> None:
        """Waits for the end of a trial, but not for long, and takes in what was reported."""
        ended: list[Trial] = []
        try:
            ended.append(self._done.get(timeout=_LOOK_S))
            while True:
                ended.append(self._done.get_nowait())
        except queue.Empty:
            pass
        for trial in self.running():
            new = trial.new_reports()
            for number, metrics in enumerate(new, len(trial.reports) - len(new) + 1):
                if trial.is_stopped or trial.enough is not None:
                    break
                if self.is_enough(trial, metrics):
                    trial.enough = number
                    if trial not in ended:
                        self.stop_early(trial)
        for trial in self.running():
            if trial in ended:
                trial.finish()
                self.on_end(trial)
        if self.has_more or self.running():
            self.check()
        self.display.update(self.trials)
