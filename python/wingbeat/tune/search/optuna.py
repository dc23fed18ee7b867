"""Optuna's samplers. They need the extra `optuna`: `pip install wingbeat[optuna]`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from wingbeat.tune import _space
from wingbeat.tune.search import Searcher


class OptunaSearch(Searcher):
    """Lets one of Optuna's samplers choose parameters, by what earlier trials have reported.

    It chooses better with few trials at a time: `TuneConfig(max_concurrent_trials=4)`.

    Args:
        metric: The metric to improve; None for that of `TuneConfig`.
        mode: "max" or "min"; None for that of `TuneConfig`.
        points_to_evaluate: Parameters of the first trials.
        sampler: An Optuna sampler; None for its `TPESampler`.
        seed: The seed of that: each search draws the same.

    Raises:
        ImportError: Optuna is not installed.
        ValueError: There are a sampler and a seed. `Tuner.fit` raises it for a point outside of the space.
    """

    def __init__(
        self,
        metric: str | None = None,
        mode: str | None = None,
        points_to_evaluate: list[dict[str, Any]] | None = None,
        sampler: Any = None,
        seed: int | None = None,
    ) -> None:
        try:
            import optuna  # noqa: F401
        except ImportError as error:
            raise ImportError("OptunaSearch needs Optuna: pip install wingbeat[optuna]") from error
        if sampler is not None and seed is not None:
            raise ValueError("give the seed to the sampler itself")
        self.metric, self.mode = metric, mode
        self._sampler, self._seed = sampler, seed
        self._first = list(points_to_evaluate or [])
        self._metric, self._mode = metric, mode
        self._trials: dict[str, Any] = {}
        self._left = 0
        self._space: Mapping[str, Any] = {}
        self._values: list[tuple[tuple[Any, ...], Any]] = []

    def begin(self, space: Mapping[str, Any], samples: int, metric: str | None, mode: str | None) -> None:
        """Learns what is searched."""
        import optuna

        self._metric, self._mode = self.metric or metric, self.mode or mode
        if self._metric is None or self._mode is None:
            raise ValueError("OptunaSearch improves a metric: give TuneConfig(metric=…, mode=…)")
        self._space, self._values, self._left = space, list(_space.leaves(space)), samples
        self._trials.clear()
        for path, value in self._values:
            if _space.is_grid(value):
                raise ValueError(f"param_space[{_space.name_of(path)!r}]: OptunaSearch takes no grid_search; use choice")
            if isinstance(value, (_space.Function, _space.Normal)):
                raise ValueError(f"param_space[{_space.name_of(path)!r}]: OptunaSearch takes no sample_from and no randn")
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        directions = optuna.study.StudyDirection
        direction = directions.MAXIMIZE if self._mode == "max" else directions.MINIMIZE
        # A new one for each search, so that a seed draws the same again.
        sampler = self._sampler or optuna.samplers.TPESampler(seed=self._seed)
        self._study = optuna.create_study(sampler=sampler, direction=direction)
        optuna.logging.set_verbosity(before)
        for point in self._first:
            self._study.enqueue_trial(self._encoded(point))

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Chooses the parameters of a trial."""
        if self._left == 0:
            return None
        self._left -= 1
        trial = self._trials[trial_id] = self._study.ask()
        config: dict[str, Any] = {}
        for path, value in self._values:
            _space.put(config, path, self._suggested(trial, _space.name_of(path), value))
        shaped: dict[str, Any] = _space.shaped(self._space, config)
        return shaped

    def on_trial_result(self, trial_id: str, result: Mapping[str, float]) -> None:
        """Learns what a trial has reported."""
        value, step = result.get(self._metric or ""), result["training_iteration"]
        trial = self._trials.get(trial_id)  # one that has ended before may be tried again
        if trial is not None and value is not None and value == value and math.isfinite(step) and step >= 0:
            trial.report(value, int(step))

    def on_trial_complete(self, trial_id: str, result: Mapping[str, float] | None = None, error: bool = False) -> None:
        """Learns that a trial has ended."""
        import optuna

        trial, value = self._trials.pop(trial_id, None), (result or {}).get(self._metric or "")
        if trial is None:
            return
        if error or value is None or value != value:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, value)

    def _suggested(self, trial: Any, name: str, value: Any) -> Any:
        if isinstance(value, _space.Float):
            # Optuna's steps begin at the lowest value, and have no logarithm.
            return value.rounded(trial.suggest_float(name, value.low, value.high, log=value.is_log))
        if isinstance(value, _space.Integer):
            return value.rounded(trial.suggest_int(name, value.low, value.most, log=value.is_log))
        if isinstance(value, _space.Categorical):
            # By their numbers: Optuna takes plain values only.
            return value.categories[trial.suggest_categorical(name, list(range(len(value.categories))))]
        return value

    def _encoded(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters as Optuna has them."""
        made = {}
        for path, domain in self._values:
            value: Any = point
            try:
                for key in path:
                    value = value[key]
            except (LookupError, TypeError):  # which Optuna then chooses
                continue
            name = _space.name_of(path)
            wrong = f"points_to_evaluate: {name!r} is {value!r:.50}, and has to be"
            if isinstance(domain, _space.Categorical):
                if value not in domain.categories:
                    raise ValueError(f"{wrong} one of {domain.categories!r:.200}")
                value = domain.categories.index(value)
            elif isinstance(domain, (_space.Float, _space.Integer)):
                most = domain.high if isinstance(domain, _space.Float) else domain.most
                kind = numbers.Real if isinstance(domain, _space.Float) else numbers.Integral
                if isinstance(value, bool) or not isinstance(value, kind) or not domain.low <= float(value) <= most:
                    raise ValueError(f"{wrong} from {domain.low!r} to {most!r}")
            made[name] = value
        return made
