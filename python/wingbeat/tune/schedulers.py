"""What ends trials early, with Ray Tune's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wingbeat import _lazy

CONTINUE, STOP = "CONTINUE", "STOP"


class TrialScheduler:
    """Decides after each report of a trial whether it goes on. Subclasses override `on_trial_result`."""

    CONTINUE, STOP = CONTINUE, STOP

    def set_search_properties(self, metric: str | None, mode: str | None) -> None:
        """Learns what `TuneConfig` says, unless it was told otherwise.

        Args:
            metric: The metric to compare.
            mode: "max" or "min".
        """

    def on_trial_result(self, trial_id: str, result: Mapping[str, float]) -> str:
        """Decides whether a trial goes on.

        Args:
            trial_id: The trial.
            result: What it has reported, with `training_iteration`.

        Returns:
            `CONTINUE` or `STOP`.
        """
        return CONTINUE

    def on_trial_complete(self, trial_id: str) -> None:
        """Learns that a trial has ended.

        Args:
            trial_id: The trial.
        """


class FIFOScheduler(TrialScheduler):
    """Lets all trials run to their end."""


class ASHAScheduler(TrialScheduler):
    """Ends trials that are not among the best at some milestone: Asynchronous Successive Halving.

    Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020, arXiv:1810.05934), in the variant that stops
    trials and never pauses them, as Ray's. The milestones are `grace_period * reduction_factor**k`, below `max_t`. A trial that
    reaches one goes on if it is at least as good as the best 1 / `reduction_factor` of those that had reached it before. One
    whose metric is NaN or infinite there is ended, and counts as the worst.

    Args:
        time_attr: The metric that grows with time.
        metric: The metric to compare; None for that of `TuneConfig`.
        mode: "max" or "min"; None for that of `TuneConfig`.
        max_t: At which time each trial is ended.
        grace_period: Before which time none is.
        reduction_factor: How many trials reach a milestone for each that goes on.
        brackets: Ray's; only 1.

    Raises:
        ValueError: A value makes no sense.
        NotImplementedError: There are several brackets.
    """

    def __init__(
        self,
        time_attr: str = "training_iteration",
        metric: str | None = None,
        mode: str | None = None,
        max_t: float = 100,
        grace_period: float = 1,
        reduction_factor: float = 4,
        brackets: int = 1,
    ) -> None:
        if not max_t > 0 or not 0 < grace_period <= max_t:
            raise ValueError(f"max_t={max_t!r} and grace_period={grace_period!r}: the grace must be positive, and at most max_t")
        if not reduction_factor > 1:
            raise ValueError(f"reduction_factor must be more than 1, not {reduction_factor!r}")
        if mode not in (None, "max", "min"):
            raise ValueError(f'mode must be "max" or "min", not {mode!r}')
        if brackets != 1:
            from wingbeat.train._unsupported import refuse

            raise refuse("ASHAScheduler(brackets=…)", "use one bracket, which the authors recommend")
        self.time_attr, self.metric, self.mode, self.max_t = time_attr, metric, mode, max_t
        self._grace, self._factor = grace_period, reduction_factor
        self._begin(metric, mode)

    def _begin(self, metric: str | None, mode: str | None) -> None:
        self._metric, self._mode = metric, mode
        self._is_reported = False
        # What trials had at each milestone, the largest milestone first.
        self._rungs: list[tuple[float, dict[str, float]]] = []
        milestone = self._grace
        while milestone < self.max_t:
            self._rungs.insert(0, (milestone, {}))
            milestone *= self._factor

    def set_search_properties(self, metric: str | None, mode: str | None) -> None:
        """Learns what `TuneConfig` says, unless it was told otherwise. Forgets the trials of an earlier `fit`."""
        self._begin(self.metric or metric, self.mode or mode)
        if self._metric is None or self._mode is None:
            raise ValueError("ASHAScheduler compares trials: give TuneConfig(metric=…, mode=…)")

    def on_trial_result(self, trial_id: str, result: Mapping[str, float]) -> str:
        """Decides whether a trial goes on."""
        time, value = result.get(self.time_attr), result.get(self._metric or "")
        if time is None:
            raise ValueError(f"ASHAScheduler(time_attr={self.time_attr!r}): trial {trial_id} does not report it")
        self._is_reported = self._is_reported or value is not None
        if time >= self.max_t:
            if not self._is_reported:
                raise ValueError(
                    f"ASHAScheduler compares {self._metric!r}, and trial {trial_id} has come to max_t={self.max_t!r} without it; "
                    f"reported were {', '.join(map(repr, sorted(result)))}"
                )
            return STOP
        if value is None:
            return CONTINUE
        is_finite = math.isfinite(value)
        value = float("-inf") if not is_finite else value if self._mode == "max" else -value
        for milestone, recorded in self._rungs:
            if time < milestone:
                continue
            if trial_id in recorded:  # and those below it are passed
                return CONTINUE
            cutoff = _quantile(list(recorded.values()), 1 - 1 / self._factor)
            recorded[trial_id] = value
            return CONTINUE if is_finite and (cutoff is None or value >= cutoff) else STOP
        return CONTINUE


AsyncHyperBandScheduler = ASHAScheduler


def _quantile(values: list[float], part: float) -> float | None:
    """As `numpy.percentile`: linear between the two nearest."""
    if not values:
        return None
    values.sort()
    at = part * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    if math.isinf(values[low]):  # of the worst, which are -inf: there is nothing between that and a number
        return values[low]
    return values[low] + (values[high] - values[low]) * (at - low)


def of(given: Any) -> TrialScheduler:
    """The scheduler of a `TuneConfig`.

    Args:
        given: A scheduler, or None.

    Returns:
        The scheduler; one that lets all trials run to their end for None.

    Raises:
        TypeError: It is neither.
    """
    if given is None:
        return FIFOScheduler()
    if not isinstance(given, TrialScheduler):
        raise TypeError(f"scheduler must be a TrialScheduler, as ASHAScheduler, not a {type(given).__name__}")
    return given


_OTHERS = "ASHAScheduler ends trials early; a subclass of TrialScheduler decides in another way"
_ABSENT = dict.fromkeys(
    "HyperBandForBOHB HyperBandScheduler MedianStoppingRule PB2 PopulationBasedTraining PopulationBasedTrainingReplay"
    " ResourceChangingScheduler create_scheduler".split(),
    _OTHERS,
)

if not TYPE_CHECKING:
    __getattr__ = _lazy.names_of(__name__, {}, _ABSENT)
