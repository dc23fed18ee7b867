"""What Ray Train has and Wingbeat does not: it is refused, and never ignored."""

from __future__ import annotations

# Names of `ray.train`, and what to do instead.
ABSENT = {
    "CheckpointConsistencyMode": "reported checkpoints are complete when `report` returns",
    "DataConfig": "each dataset is split into equal parts; load what every rank needs whole in the loop itself",
    "ReportedCheckpoint": "`Result.best_checkpoints` lists the checkpoints that were kept",
    "SyncConfig": "checkpoints are written straight to the storage",
    "UserCallback": "print or log in the loop, or read metrics.jsonl in `Result.path`",
    "ValidationConfig": "validate in the loop",
    "ValidationTaskConfig": "validate in the loop",
    "get_all_reported_checkpoints": "`Result.best_checkpoints` lists the checkpoints that were kept",
    "huggingface": "a Trainer of transformers runs as it is: `wingbeat torchrun`, or TorchDistributor",
    "lightning": "a Trainer(strategy=\"ddp\") of Lightning runs as it is: `wingbeat torchrun`, or TorchDistributor",
    "get_preemption_info": "ranks of a drained node get SIGTERM, and their grace to save",
}


def refuse(what: str, instead: str) -> NotImplementedError:
    """Makes the error for an option of Ray Train's that Wingbeat does not have.

    Args:
        what: The option.
        instead: What to do instead.

    Returns:
        The error, to be raised.
    """
    return NotImplementedError(f"{what} is not supported: {instead}")
