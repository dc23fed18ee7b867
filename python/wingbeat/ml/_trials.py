"""Runs trials at the same time. A trial is a function of this process, which may start ranks of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

from wingbeat import _interrupts

# How long a wait for trials takes at most. polars sets a handler of SIGINT with SA_RESTART: then a signal does not end a
# wait, and Python looks for it once that has ended.
_LOOK_S = 0.5


@dataclass(frozen=True)
class Trial:
    """Something to try.

    Attributes:
        name: What errors and progress call it.
        run: Runs it.
    """

    name: str
    run: Callable[[], Any]


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        value: What it returned; None if it failed.
        error: What it raised; None if it did not.
    """

    value: Any
    error: Exception | None


class Engine(Protocol):
    """Runs trials. `CrossValidator` calls it; `ThreadEngine` implements it."""

    def run(self, trials: Sequence[Trial], parallelism: int, *, stops_at_failure: bool) -> list[Outcome | None]:
        """Runs trials to their end.

        Args:
            trials: The trials.
            parallelism: How many run at the same time at most.
            stops_at_failure: Whether no further trial is started once one has failed.

        Returns:
            The outcome of each trial; None for one that was not started.
        """


class ThreadEngine:
    """Runs each trial in a thread. Ctrl-C interrupts them: `_interrupts` says where they end."""

    def run(self, trials: Sequence[Trial], parallelism: int, *, stops_at_failure: bool) -> list[Outcome | None]:
        if parallelism == 1:  # here, where Ctrl-C stops what runs
            return _one_by_one(trials, stops_at_failure)
        pool = ThreadPoolExecutor(parallelism, thread_name_prefix="trial")
        interrupt = _interrupts.Interrupt()
        # A trial may run trials of its own, which end with it.
        interrupts = (*_interrupts.current(), interrupt)
        try:
            futures = [pool.submit(_run, trial, interrupts) for trial in trials]
            until = FIRST_EXCEPTION if stops_at_failure else ALL_COMPLETED
            while True:
                done, waiting = wait(futures, _LOOK_S, until)
                if not waiting or (stops_at_failure and any(future.exception() is not None for future in done)):
                    break
            # Those that run go on to their end.
            pool.shutdown(wait=True, cancel_futures=True)
            return [None if future.cancelled() else _outcome(future) for future in futures]
        except KeyboardInterrupt:
            interrupt.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run(trial: Trial, interrupts: Sequence[_interrupts.Interrupt]) -> Any:
    with _interrupts.under(interrupts):
        _interrupts.check()
        return trial.run()


def _one_by_one(trials: Sequence[Trial], stops_at_failure: bool) -> list[Outcome | None]:
    outcomes: list[Outcome | None] = []
    for trial in trials:
        _interrupts.check()
        try:
            outcomes.append(Outcome(trial.run(), None))
        except Exception as error:
            outcomes.append(Outcome(None, error))
            if stops_at_failure:
                break
    return outcomes + [None] * (len(trials) - len(outcomes))


def _outcome(future: Future[Any]) -> Outcome:
    error = future.exception()
    if error is None:
        return Outcome(future.result(), None)
    if not isinstance(error, Exception):
        raise error
    return Outcome(None, error)
