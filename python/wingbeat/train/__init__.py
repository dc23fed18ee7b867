"""What a training script says to the run that it is a rank of, and the trainer that runs functions as ranks.

A script needs none of it: it runs as under torchrun. With it, a run has metrics, and checkpoints to go on from:

    from wingbeat import train

    start = 0
    if checkpoint := train.get_checkpoint():
        start = load(checkpoint.path)
    for epoch in range(start, 10):
        loss = step(model)
        if train.get_context().get_world_rank() == 0:
            save(model, "here")
            train.report({"loss": loss}, checkpoint=train.Checkpoint.from_directory("here"))
        else:
            train.report({"loss": loss})

Outside of a run all of it works, as for the only rank of a run that stores nothing.

A program runs a function as ranks with a trainer. Names and meanings are Ray Train's:

    from wingbeat.train import RunConfig, ScalingConfig
    from wingbeat.train.torch import TorchTrainer

    trainer = TorchTrainer(train_loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(name="digits"))
    result = trainer.fit()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wingbeat import _lazy
from wingbeat.train._checkpoint import Checkpoint
from wingbeat.train._connection import ReportError
from wingbeat.train._context import Context, get_context
from wingbeat.train._dataset import DatasetShard, get_dataset_shard
from wingbeat.train._report import CheckpointUploadMode, get_checkpoint, report
from wingbeat.train._unsupported import ABSENT

if TYPE_CHECKING:
    from wingbeat.train import torch as torch
    from wingbeat.train._config import CheckpointConfig as CheckpointConfig
    from wingbeat.train._config import FailureConfig as FailureConfig
    from wingbeat.train._config import RunConfig as RunConfig
    from wingbeat.train._config import ScalingConfig as ScalingConfig
    from wingbeat.train._config import TorchConfig as TorchConfig
    from wingbeat.train._result import Result as Result
    from wingbeat.train._result import TrainingFailedError as TrainingFailedError
    from wingbeat.train._result import WorkerTrainingFailedError as WorkerTrainingFailedError
    from wingbeat.train._trainer import TorchTrainer as TorchTrainer

TrainContext = Context

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointUploadMode",
    "Context",
    "DatasetShard",
    "FailureConfig",
    "ReportError",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TorchConfig",
    "TorchTrainer",
    "TrainContext",
    "TrainingFailedError",
    "WorkerTrainingFailedError",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "report",
]

_HOMES = {
    "CheckpointConfig": "wingbeat.train._config",
    "FailureConfig": "wingbeat.train._config",
    "Result": "wingbeat.train._result",
    "RunConfig": "wingbeat.train._config",
    "ScalingConfig": "wingbeat.train._config",
    "TorchConfig": "wingbeat.train._config",
    "TorchTrainer": "wingbeat.train._trainer",
    "TrainingFailedError": "wingbeat.train._result",
    "WorkerTrainingFailedError": "wingbeat.train._result",
    "torch": "wingbeat.train.torch",
}

if not TYPE_CHECKING:
    __getattr__ = _lazy.names_of(__name__, _HOMES, ABSENT)
