"""What a rank reports, and the checkpoint that it goes on from."""

from __future__ import annotations

import contextlib
import enum
import math
import os
from collections.abc import Mapping
from typing import Any, SupportsFloat

from wingbeat.train._checkpoint import Checkpoint, metrics_of
from wingbeat.train._connection import connection, is_in_a_run
from wingbeat.train._context import TRIAL
from wingbeat.train._unsupported import refuse

_CHECKPOINT = "WINGBEAT_CHECKPOINT"
# What was reported outside of a run. It is in no variable of the environment: runs of this program would go on from it.
_reported_here: str | None = None
# How many reports a trial has made, or what it said itself.
ITERATION = "training_iteration"
# What the run adds to each report in `metrics.jsonl`.
_RECORDED = ("time", "attempt", "launch")


class CheckpointUploadMode(enum.Enum):
    """Whether `report` waits until the checkpoint is stored. `NO_UPLOAD` is refused."""

    ASYNC = "ASYNC"
    SYNC = "SYNC"
    NO_UPLOAD = "NO_UPLOAD"


def report(
    metrics: Mapping[str, SupportsFloat],
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    wait: bool = True,
    *,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: Any = None,
    validation: Any = False,
) -> None:
    """Reports metrics, and perhaps a checkpoint.

    Every rank of the run calls it, equally often. It returns when all ranks have called it and the checkpoint is
    stored. Several ranks may give files for the same checkpoint; of files with equal names, the lowest rank's is
    taken. If a rank does not call it, the run names that rank after a while. Rank 0's metrics are the run's.

    A signal's handler may report in the middle of a report: its own comes first, and the other goes on when it returns.

    Args:
        metrics: Numbers by name. A number is what `float()` takes, as a tensor with one element.
        checkpoint: A local directory (or file) that becomes part of the checkpoint, or a `Checkpoint` of one.
        wait: With False, it returns when all have called it, while the checkpoint is still being stored. Leave the
            files as they are until the run ends. If they cannot be stored, the run fails.
        checkpoint_dir_name: Ray Train's; refused. Checkpoints are numbered.
        checkpoint_upload_mode: Ray Train's. ASYNC is `wait=False` if the local directory is not to be deleted.
        delete_local_checkpoint_after_upload: Whether the local directory is deleted when the checkpoint is stored. None
            means yes with ASYNC, and no with SYNC. It has to wait for the upload, also with ASYNC.
        checkpoint_upload_fn: Ray Train's; refused.
        validation: Ray Train's; refused.

    Raises:
        TypeError: A metric is not a number.
        ValueError: A metric of a trial of `wingbeat.tune` is called "time", "attempt" or "launch".
        FileNotFoundError: The checkpoint does not exist on this machine.
        ReportError: The checkpoint cannot be stored, a rank ended without this report, or the run has ended.
        NotImplementedError: An option is refused.
    """
    if checkpoint_dir_name is not None:
        raise refuse("report(checkpoint_dir_name=…)", "checkpoints are named checkpoint_000001 and so on")
    if checkpoint_upload_fn is not None:
        raise refuse("report(checkpoint_upload_fn=…)", "the run itself stores what is reported")
    if validation:
        raise refuse("report(validation=…)", "validate in the loop, and report the metrics")
    if checkpoint_upload_mode is CheckpointUploadMode.NO_UPLOAD:
        raise refuse("CheckpointUploadMode.NO_UPLOAD", "report a local directory, which the run stores")
    is_async = checkpoint_upload_mode is CheckpointUploadMode.ASYNC
    deletes = is_async if delete_local_checkpoint_after_upload is None else delete_local_checkpoint_after_upload
    waits = deletes or (wait and not is_async)

    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics are numbers by name, as {{\"loss\": 0.5}}, and not a {type(metrics).__qualname__}")
    numbers = {str(name): repr(_number(name, value)) for name, value in metrics.items()}
    global _reported_here
    path = None if checkpoint is None else _local(checkpoint)
    if TRIAL in os.environ and is_in_a_run():
        _count(numbers)
    if is_in_a_run():
        connection().ask({"kind": "report", "metrics": numbers, "checkpoint": path, "waits": waits})
    elif path is not None:
        _reported_here = path
        return
    if deletes and path is not None:
        import shutil

        # Ranks may share it: another has deleted it then, or deletes it now.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def get_checkpoint() -> Checkpoint | None:
    """The newest complete checkpoint, to go on from.

    After a report, it may be another than before. Older ones are removed as the run was told (`--keep`,
    `CheckpointConfig.num_to_keep`).

    Returns:
        The checkpoint, in a local directory; None if there is none.
    """
    path = _reported_here or os.environ.get(_CHECKPOINT)
    if is_in_a_run():
        # Also in a process that has reported nothing itself: the rank that started it may have.
        path = connection().ask({"kind": "newest"}) or path
    return Checkpoint(path) if path else None


_reports: int | None = None


def _count(numbers: dict[str, str]) -> None:
    """Numbers the report of a trial, from that of the checkpoint on from which this attempt goes on."""
    global _reports
    for name in _RECORDED:
        if name in numbers:
            raise ValueError(f"the metric {name!r} has the name of what is recorded with each report; call it otherwise")
    if _reports is None:
        _reports = _reports_until(os.environ.get(_CHECKPOINT))
    _reports += 1
    numbers.setdefault(ITERATION, repr(float(_reports)))


def _reports_until(checkpoint: str | None) -> int:
    if not checkpoint:
        return 0
    metrics = metrics_of(checkpoint) or {}
    there = metrics.get(ITERATION, 0.0)
    return int(there) if math.isfinite(there) else 0


def _local(checkpoint: Checkpoint | str | os.PathLike[str]) -> str:
    path = os.fspath(checkpoint)
    if "://" in path or getattr(checkpoint, "filesystem", None) is not None:
        raise refuse(f"reporting {path}, which is not on this machine,", "report a local directory, which the run stores")
    path = os.path.abspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"the checkpoint {path} does not exist")
    return path


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise TypeError(
        f"the metric {name!r} is a {type(value).__qualname__}, not a number: {value!r:.100}. "
        "Store what is not a number in the checkpoint, or print it"
    )
