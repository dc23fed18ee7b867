"""How a `Tuner` runs, with Ray Tune's names."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wingbeat.train._config import RunConfig as _RunConfig
from wingbeat.train._unsupported import refuse
from wingbeat.tune import schedulers
from wingbeat.tune.search import BasicVariantGenerator, Searcher


@dataclass
class TuneConfig:
    """What is tried, and how many trials run at a time.

    Attributes:
        metric: The metric to improve.
        mode: "max" if more is better, or "min".
        num_samples: How many samples of the space are tried. With a `grid_search`, each is tried with all combinations of it. -1
            goes on until `time_budget_s` is over.
        max_concurrent_trials: How many trials run at a time; None for as many as the cluster has room for.
        search_alg: What chooses parameters, as `OptunaSearch`; None for the grid and random values.
        scheduler: What ends trials early, as `ASHAScheduler`; None for nothing.
        time_budget_s: After how many seconds no trial is started, and those that run are stopped.
        reuse_actors: Ray's; refused.
        trial_name_creator: Ray's; refused.
        trial_dirname_creator: Ray's; refused.
        raise_on_failed_trial: Whether `fit` raises, when all trials have ended, if one has failed. Wingbeat's own.

    Raises:
        ValueError: A value makes no sense.
        TypeError: The search algorithm or the scheduler is none.
        NotImplementedError: A value is refused.
    """

    metric: str | None = None
    mode: str | None = None
    num_samples: int = 1
    max_concurrent_trials: int | None = None
    search_alg: Searcher | None = None
    scheduler: schedulers.TrialScheduler | None = None
    time_budget_s: float | None = None
    reuse_actors: bool = False
    trial_name_creator: Any = None
    trial_dirname_creator: Any = None
    raise_on_failed_trial: bool = False

    def __post_init__(self) -> None:
        if self.mode not in (None, "max", "min"):
            raise ValueError(f'mode must be "max" or "min", not {self.mode!r}')
        samples = self.num_samples
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < -1 or samples == 0:
            raise ValueError(f"num_samples must be a positive integer, or -1, not {self.num_samples!r}")
        if self.num_samples == -1 and self.time_budget_s is None:
            raise ValueError("num_samples=-1 needs a time_budget_s to end")
        most = self.max_concurrent_trials
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ValueError(f"max_concurrent_trials must be a positive integer or None, not {most!r}")
        if self.reuse_actors:
            raise refuse("TuneConfig(reuse_actors=True)", "trials are forked from a Python that has torch imported")
        for name in ("trial_name_creator", "trial_dirname_creator"):
            if getattr(self, name) is not None:
                raise refuse(f"TuneConfig({name}=…)", "trials are named by their number; their parameters are in params.json")
        if self.search_alg is not None and not isinstance(self.search_alg, Searcher):
            raise TypeError(f"search_alg must be a Searcher, as OptunaSearch, not a {type(self.search_alg).__name__}")
        schedulers.of(self.scheduler)

    def searcher(self) -> Searcher:
        """What chooses parameters."""
        return self.search_alg or BasicVariantGenerator()


@dataclass
class RunConfig(_RunConfig):
    """`wingbeat.train.RunConfig`, and when a trial is ended.

    `name` and `storage_path` are those of the whole; each trial has a folder in it. The rest is for each trial.

    Attributes:
        stop: A trial that reports at least so much of any of these metrics is ended. `training_iteration` counts reports, and
            `time_total_s` is the time since its start.
    """

    stop: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop is not None and not isinstance(self.stop, Mapping):
            raise refuse(f"RunConfig(stop={self.stop!r:.50})", 'give {"metric": value}, or return from the function')
        for name, value in (self.stop or {}).items():
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise ValueError(f"RunConfig(stop={{{name!r}: {value!r}}}): a metric is compared with a number")
