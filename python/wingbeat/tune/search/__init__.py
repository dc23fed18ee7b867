"""What chooses the parameters of trials, with Ray Tune's names."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wingbeat import _lazy
from wingbeat.tune import _space

if TYPE_CHECKING:
    from wingbeat.tune.search import optuna as optuna

__all__ = ["BasicVariantGenerator", "Searcher", "optuna"]


class Searcher:
    """Chooses the parameters of trials. Subclasses override `suggest`, and learn from the other methods."""

    def begin(self, space: Mapping[str, Any], samples: int, metric: str | None, mode: str | None) -> None:
        """Learns what is searched.

        Args:
            space: `param_space`.
            samples: `TuneConfig.num_samples`.
            metric: The metric to improve.
            mode: "max" or "min".
        """

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Chooses the parameters of a trial.

        Args:
            trial_id: The trial.

        Returns:
            The parameters; None if there are to be no more trials.
        """
        raise NotImplementedError

    def on_trial_result(self, trial_id: str, result: Mapping[str, float]) -> None:
        """Learns what a trial has reported.

        Args:
            trial_id: The trial.
            result: Its metrics.
        """

    def on_trial_complete(self, trial_id: str, result: Mapping[str, float] | None = None, error: bool = False) -> None:
        """Learns that a trial has ended.

        Args:
            trial_id: The trial.
            result: Its last metrics, if there are any.
            error: Whether it has failed.
        """


class BasicVariantGenerator(Searcher):
    """All combinations of the grid, with random values for the rest.

    Args:
        random_state: The seed of the random values; None for others each time.
    """

    def __init__(self, random_state: int | None = None) -> None:
        self._random_state = random_state
        self._configurations = _space.Configurations({}, 0, random.Random(0))

    def begin(self, space: Mapping[str, Any], samples: int, metric: str | None, mode: str | None) -> None:
        """Learns what is searched."""
        self._configurations = _space.Configurations(space, samples, random.Random(self._random_state))

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Chooses the parameters of a trial."""
        return next(self._configurations, None)


_ABSENT = {
    "ConcurrencyLimiter": "use TuneConfig(max_concurrent_trials=…)",
    "Repeater": "use TuneConfig(num_samples=…), or a grid_search of seeds",
    "create_searcher": "use BasicVariantGenerator, or OptunaSearch of wingbeat.tune.search.optuna",
}

if not TYPE_CHECKING:
    __getattr__ = _lazy.names_of(__name__, {"optuna": "wingbeat.tune.search.optuna"}, _ABSENT)
