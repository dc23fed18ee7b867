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
    from wingbeat.train._dataset_errors import DatasetError as DatasetError
    from wingbeat.train._dataset_errors import MissingColumnError as MissingColumnError
    from wingbeat.train._dataset_errors import SchemaMismatchError as SchemaMismatchError
    from wingbeat.train._dataset_errors import TooFewRowsError as TooFewRowsError
    from wingbeat.train._dataset_errors import UnreadableFileError as UnreadableFileError
    from wingbeat.train._result import Result as Result
    from wingbeat.train._result import TrainingFailedError as TrainingFailedError
    from wingbeat.train._result import WorkerTrainingFailedError as WorkerTrainingFailedError
    from wingbeat.train._source import FileDataset as FileDataset
    from wingbeat.train._source import read_files as read_files
    from wingbeat.train._streaming import StreamingShard as StreamingShard
    from wingbeat.train._trainer import TorchTrainer as TorchTrainer

TrainContext = Context

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointUploadMode",
    "Context",
    "DatasetError",
    "DatasetShard",
    "FailureConfig",
    "FileDataset",
    "MissingColumnError",
    "ReportError",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "SchemaMismatchError",
    "StreamingShard",
    "TooFewRowsError",
    "TorchConfig",
    "TorchTrainer",
    "TrainContext",
    "TrainingFailedError",
    "UnreadableFileError",
    "WorkerTrainingFailedError",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "read_files",
    "report",
]

_HOMES = {
    "CheckpointConfig": "wingbeat.train._config",
    "DatasetError": "wingbeat.train._dataset_errors",
    "FailureConfig": "wingbeat.train._config",
    "FileDataset": "wingbeat.train._source",
    "MissingColumnError": "wingbeat.train._dataset_errors",
    "Result": "wingbeat.train._result",
    "RunConfig": "wingbeat.train._config",
    "ScalingConfig": "wingbeat.train._config",
    "SchemaMismatchError": "wingbeat.train._dataset_errors",
    "StreamingShard": "wingbeat.train._streaming",
    "TooFewRowsError": "wingbeat.train._dataset_errors",
    "TorchConfig": "wingbeat.train._config",
    "TorchTrainer": "wingbeat.train._trainer",
    "TrainingFailedError": "wingbeat.train._result",
    "UnreadableFileError": "wingbeat.train._dataset_errors",
    "WorkerTrainingFailedError": "wingbeat.train._result",
    "read_files": "wingbeat.train._source",
    "torch": "wingbeat.train.torch",
}

if not TYPE_CHECKING:
    __getattr__ = _lazy.names_of(__name__, _HOMES, ABSENT)
