"""Optuna's samplers. They need the extra `optuna`: `pip install wingbeat[optuna]`."""

from __future__ import annotations

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
        seed: The seed of that.

    Raises:
        ImportError: Optuna is not installed.
        ValueError: There are a sampler and a seed.
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
            import optuna
        except ImportError as error:
            raise ImportError("OptunaSearch needs Optuna: pip install wingbeat[optuna]") from error
        if sampler is not None and seed is not None:
            raise ValueError("give the seed to the sampler itself")
        self.metric, self.mode = metric, mode
        self._sampler = sampler or optuna.samplers.TPESampler(seed=seed)
        self._first = list(points_to_evaluate or [])
        self._trials: dict[str, Any] = {}
        self._left = 0
        self._values: list[tuple[tuple[str, ...], Any]] = []

    def begin(self, space: Mapping[str, Any], samples: int, metric: str | None, mode: str | None) -> None:
        """Learns what is searched."""
        import optuna

        self.metric, self.mode = self.metric or metric, self.mode or mode
        if self.metric is None or self.mode is None:
            raise ValueError("OptunaSearch improves a metric: give TuneConfig(metric=…, mode=…)")
        self._values, self._left = list(_space.leaves(space)), samples
        for path, value in self._values:
            if _space.is_grid(value):
                raise ValueError(f"param_space[{'/'.join(path)!r}]: OptunaSearch takes no grid_search; use choice")
            if isinstance(value, (_space.Function, _space.Normal)):
                raise ValueError(f"param_space[{'/'.join(path)!r}]: OptunaSearch takes no sample_from and no randn")
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        directions = optuna.study.StudyDirection
        direction = directions.MAXIMIZE if self.mode == "max" else directions.MINIMIZE
        self._study = optuna.create_study(sampler=self._sampler, direction=direction)
        optuna.logging.set_verbosity(before)
        for point in self._first:
            self._study.enqueue_trial({name: self._encoded(name, value) for name, value in _space.flat(point).items()})

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Chooses the parameters of a trial."""
        if self._left == 0:
            return None
        self._left -= 1
        trial = self._trials[trial_id] = self._study.ask()
        config: dict[str, Any] = {}
        for path, value in self._values:
            _space.put(config, path, self._suggested(trial, "/".join(path), value))
        return config

    def on_trial_result(self, trial_id: str, result: Mapping[str, float]) -> None:
        """Learns what a trial has reported."""
        value = result.get(self.metric or "")
        if value is not None and value == value:
            self._trials[trial_id].report(value, int(result["training_iteration"]))

    def on_trial_complete(self, trial_id: str, result: Mapping[str, float] | None = None, error: bool = False) -> None:
        """Learns that a trial has ended."""
        import optuna

        trial, value = self._trials.pop(trial_id), (result or {}).get(self.metric or "")
        if error or value is None or value != value:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, value)

    def _suggested(self, trial: Any, name: str, value: Any) -> Any:
        if isinstance(value, _space.Float):
            return trial.suggest_float(name, value.low, value.high, log=value.is_log and value.step is None, step=value.step)
        if isinstance(value, _space.Integer):
            is_log = value.is_log and value.step is None
            return trial.suggest_int(name, value.low, value.most, log=is_log, step=value.step or 1)
        if isinstance(value, _space.Categorical):
            # By their numbers: Optuna takes plain values only.
            return value.categories[trial.suggest_categorical(name, list(range(len(value.categories))))]
        return value

    def _encoded(self, name: str, value: Any) -> Any:
        for path, domain in self._values:
            if "/".join(path) == name and isinstance(domain, _space.Categorical):
                return domain.categories.index(value)
        return value
