"""The trials of a `CrossValidator`: functions of this process, which may run on ranks."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wingbeat import _interrupts
from wingbeat._trials import _engine, _trial
from wingbeat._trials._display import Display


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        value: What it returned; None if it failed.
        error: What it raised; None if it did not.
    """

    value: Any
    error: Exception | None


class Trial(_trial.Trial):
    """A function to try.

    Args:
        name: What errors and progress call it.
        function: The function.
        parameters: Its parameters, on a line.
        metrics: Which metrics there are in what it returns, for progress; None for none.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[], Any],
        parameters: str = "",
        metrics: Callable[[Any], Mapping[str, float]] | None = None,
    ) -> None:
        super().__init__(name)
        self.value: Any = None
        self.interrupts: Sequence[_interrupts.Interrupt] = ()
        self._function, self._parameters, self._metrics = function, parameters, metrics

    @property
    def parameters(self) -> str:
        return self._parameters

    @property
    def waits(self) -> bool:  # for room on the cluster, if it does: that is not known
        return False

    def _run(self) -> None:
        with _interrupts.under(self.interrupts):
            self.run_here()

    def run_here(self) -> None:
        """Runs it in this thread."""
        _interrupts.check()
        self.value = self._function()

    def finish(self) -> None:
        super().finish()
        if self.error is None and self._metrics is not None:
            self.reports.append(dict(self._metrics(self.value)))

    def outcome(self) -> Outcome | None:
        """What came of it; None if it was not started."""
        if self.error is not None and not isinstance(self.error, Exception):
            raise self.error
        return Outcome(self.value, self.error) if self.ended else None


def run(
    trials: Sequence[Trial], parallelism: int, *, stops_at_failure: bool, metric: str | None = None, mode: str | None = None
) -> list[Outcome | None]:
    """Runs trials to their end. Ctrl-C interrupts them: `_interrupts` says where they end.

    Args:
        trials: The trials.
        parallelism: How many run at the same time at most. One alone runs in this thread, where Ctrl-C stops what runs.
        stops_at_failure: Whether no further trial is started once one has failed.
        metric: The metric to improve, for progress.
        mode: "max" or "min".

    Returns:
        The outcome of each trial; None for one that was not started.
    """
    _Fitting(trials, parallelism, stops_at_failure, Display(metric, mode, title="CrossValidator", is_quiet=True)).run()
    return [trial.outcome() for trial in trials]


class _Fitting(_engine.Engine[Trial]):
    def __init__(self, trials: Sequence[Trial], parallelism: int, stops_at_failure: bool, display: Display) -> None:
        super().__init__(display)
        self.most = parallelism
        self._waiting, self._stops_at_failure = iter(trials), stops_at_failure
        self._interrupt = _interrupts.Interrupt()

    def next_trial(self) -> Trial | None:
        return next(self._waiting, None)

    def start(self, trial: Trial, done: queue.SimpleQueue[_trial.Trial]) -> None:
        # A trial may run trials of its own, which end with it.
        trial.interrupts = (*_interrupts.current(), self._interrupt)
        if self.most > 1:
            trial.start(done, is_daemon=False)
            return
        trial.launch()
        try:
            trial.run_here()
        except Exception as error:
            trial.error = error
        done.put(trial)

    def on_end(self, trial: Trial) -> None:
        if self._stops_at_failure and trial.error is not None:
            self.has_more = False  # those that run go on to their end
        if trial.error is not None and not isinstance(trial.error, Exception):
            raise trial.error

    def end_all(self, error: BaseException) -> None:
        self._interrupt.set()
