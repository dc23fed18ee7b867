"""Tries parameters in trials that run at the same time. Names and meanings are Ray Tune's.

    from wingbeat import tune

    def train(config):
        for epoch in range(10):
            ...
            tune.report({"loss": loss})

    results = tune.Tuner(
        train,
        param_space={"lr": tune.loguniform(1e-4, 1e-1)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=20, scheduler=tune.ASHAScheduler()),
    ).fit()
    print(results.get_best_result().config)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wingbeat import _lazy
from wingbeat.train import Checkpoint, get_checkpoint, get_context, report

if TYPE_CHECKING:
    from wingbeat.train._config import CheckpointConfig as CheckpointConfig
    from wingbeat.train._config import FailureConfig as FailureConfig
    from wingbeat.tune import schedulers as schedulers
    from wingbeat.tune import search as search
    from wingbeat.tune._cluster import ClusterLostError as ClusterLostError
    from wingbeat.tune._config import RunConfig as RunConfig
    from wingbeat.tune._config import TuneConfig as TuneConfig
    from wingbeat.tune._grid import Result as Result
    from wingbeat.tune._grid import ResultGrid as ResultGrid
    from wingbeat.tune._space import choice as choice
    from wingbeat.tune._space import grid_search as grid_search
    from wingbeat.tune._space import lograndint as lograndint
    from wingbeat.tune._space import loguniform as loguniform
    from wingbeat.tune._space import qloguniform as qloguniform
    from wingbeat.tune._space import qrandint as qrandint
    from wingbeat.tune._space import quniform as quniform
    from wingbeat.tune._space import randint as randint
    from wingbeat.tune._space import randn as randn
    from wingbeat.tune._space import sample_from as sample_from
    from wingbeat.tune._space import uniform as uniform
    from wingbeat.tune._trainable import with_parameters as with_parameters
    from wingbeat.tune._trainable import with_resources as with_resources
    from wingbeat.tune._trial import TrialError as TrialError
    from wingbeat.tune._tuner import TuneError as TuneError
    from wingbeat.tune._tuner import Tuner as Tuner
    from wingbeat.tune.schedulers import ASHAScheduler as ASHAScheduler

_SPACE = "choice grid_search lograndint loguniform qloguniform qrandint quniform randint randn sample_from uniform".split()
_HOMES = {
    "ASHAScheduler": "wingbeat.tune.schedulers",
    "CheckpointConfig": "wingbeat.train._config",
    "ClusterLostError": "wingbeat.tune._cluster",
    "FailureConfig": "wingbeat.train._config",
    "Result": "wingbeat.tune._grid",
    "ResultGrid": "wingbeat.tune._grid",
    "RunConfig": "wingbeat.tune._config",
    "TrialError": "wingbeat.tune._trial",
    "TuneConfig": "wingbeat.tune._config",
    "TuneError": "wingbeat.tune._tuner",
    "Tuner": "wingbeat.tune._tuner",
    "schedulers": "wingbeat.tune.schedulers",
    "search": "wingbeat.tune.search",
    "with_parameters": "wingbeat.tune._trainable",
    "with_resources": "wingbeat.tune._trainable",
    **dict.fromkeys(_SPACE, "wingbeat.tune._space"),
}
_ABSENT = {
    "CLIReporter": "a table is shown in terminals, and lines elsewhere",
    "Callback": "read what trials report in metrics.jsonl in their folders",
    "PlacementGroupFactory": 'use with_resources(…, {"cpu": …, "gpu": …}), or a TorchTrainer with a ScalingConfig',
    "ProgressReporter": "a table is shown in terminals, and lines elsewhere",
    "ResumeConfig": "Tuner.restore has resume_unfinished, resume_errored and restart_errored",
    "Stopper": 'use RunConfig(stop={"metric": value}), or return from the function',
    "Trainable": "give Tuner a function that calls tune.report",
    "qlograndint": "use lograndint, or qloguniform",
    "qrandn": "use sample_from with a function that draws and rounds",
    "run": "use Tuner(…).fit()",
    "run_experiments": "use Tuner(…).fit()",
}

__all__ = [
    "ASHAScheduler",
    "Checkpoint",
    "CheckpointConfig",
    "ClusterLostError",
    "FailureConfig",
    "Result",
    "ResultGrid",
    "RunConfig",
    "TrialError",
    "TuneConfig",
    "TuneError",
    "Tuner",
    "choice",
    "get_checkpoint",
    "get_context",
    "grid_search",
    "lograndint",
    "loguniform",
    "qloguniform",
    "qrandint",
    "quniform",
    "randint",
    "randn",
    "report",
    "sample_from",
    "schedulers",
    "search",
    "uniform",
    "with_parameters",
    "with_resources",
]

if not TYPE_CHECKING:
    __getattr__ = _lazy.names_of(__name__, _HOMES, _ABSENT)
