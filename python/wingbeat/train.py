"""What a training script can say to the run that it is a rank of.

A script needs none of it: it runs as under torchrun. With it, a run has metrics, and checkpoints to go on from:

    from wingbeat import train

    start = 0
    if checkpoint := train.get_checkpoint():
        start = load(checkpoint.path)
    for epoch in range(start, 10):
        loss = step(model)
        if train.get_context().world_rank == 0:
            save(model, "here")
            train.report({"loss": loss}, checkpoint="here")
        else:
            train.report({"loss": loss})

Outside of a run all of it works, as for the only rank of a run that stores nothing.
"""

import contextlib
import json
import os
import socket
import threading
from dataclasses import dataclass

__all__ = ["Checkpoint", "Context", "ReportError", "get_checkpoint", "get_context", "get_dataset_shard", "report"]

_SOCKET = "WINGBEAT_RANK_SOCKET"
_CHECKPOINT = "WINGBEAT_CHECKPOINT"
_SHARDS = "WINGBEAT_SHARD_"


class ReportError(RuntimeError):
    """A report was refused; the text says why."""


@dataclass(frozen=True)
class Context:
    """Which rank this is, of how many. The numbers are torchrun's."""

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    run_id: str
    restart_count: int


@dataclass(frozen=True)
class Checkpoint:
    """A directory with what was reported as a checkpoint. Read it, and leave it as it is."""

    path: str

    def __fspath__(self):
        return self.path


def get_context():
    """This rank's place in the run."""

    def number(name, default):
        return int(os.environ.get(name, default))

    return Context(
        world_rank=number("RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_rank=number("LOCAL_RANK", 0),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        node_rank=number("GROUP_RANK", 0),
        run_id=os.environ.get("TORCHELASTIC_RUN_ID", ""),
        restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
    )


def report(metrics, checkpoint=None, wait=True):
    """Reports metrics, and with `checkpoint`, a directory (or file) that becomes part of a checkpoint.

    Every rank of the run calls it, equally often: it returns when all have, and then the checkpoint is complete and
    kept. Ranks may give files for the same checkpoint; equal names are of the lowest rank. A rank that does not come is
    named by the run after a while. Rank 0's metrics are the run's.

    With wait=False it returns when all have called it, while the checkpoint is still being stored: leave its files as they
    are. That it could not be stored then ends the run.

    A signal's handler may report in the middle of a report: its own comes first, and the other goes on when it returns.

    Raises TypeError for a metric that is not a number, and ReportError if the checkpoint cannot be stored.
    """
    numbers = {str(name): repr(_number(name, value)) for name, value in dict(metrics).items()}
    path = None
    if checkpoint is not None:
        path = os.path.abspath(os.fspath(checkpoint))
        if not os.path.exists(path):
            raise FileNotFoundError(f"the checkpoint {path} does not exist")
    if _SOCKET in os.environ:
        _connection().ask({"kind": "report", "metrics": numbers, "checkpoint": path, "waits": bool(wait)})
    elif path is not None:
        os.environ[_CHECKPOINT] = path


def get_checkpoint():
    """The newest complete checkpoint, to go on from; None if there is none.

    After a report, that may be another than before. Older ones are removed as the run's `--keep` says.
    """
    path = os.environ.get(_CHECKPOINT)
    if _SOCKET in os.environ:
        # Also in a process that has reported nothing itself: the rank that started it may have.
        path = _connection().ask({"kind": "newest"}) or path
    return Checkpoint(path) if path else None


def get_dataset_shard(name="train"):
    """This rank's rows of a table that was given to the run, as a pyarrow Table over shared memory.

    Raises KeyError if the run was given none of that name.
    """
    path = os.environ.get(_SHARDS + name)
    if path is None:
        raise KeyError(f"the run was given no dataset {name!r}")
    import pyarrow

    with pyarrow.memory_map(path) as source:
        return pyarrow.ipc.open_file(source).read_all()


def _number(name, value):
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise TypeError(f"the metric {name!r} is a {type(value).__qualname__}, not a number: {value!r:.100}")


class _Connection:
    """The way to the rank's actor: a line of JSON, bytes, and a line of JSON in answer."""

    def __init__(self, name):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect("\0" + name)
        self.answers = self.socket.makefile("rb")
        self.name = name
        self.lock = threading.RLock()  # a signal's handler may ask in the middle of a question of its own thread
        self.is_asking = False

    def close(self):
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # a child may have it, too
        self.answers.close()
        self.socket.close()

    def ask(self, message, payload=None):
        with self.lock:
            if self.is_asking:
                other = _Connection(self.name)
                try:
                    return other.ask({**message, "nested": True}, payload)
                finally:
                    other.close()
            self.is_asking = True
            try:
                if payload is not None:
                    message = {**message, "bytes": len(payload)}
                self.socket.sendall(json.dumps(message).encode() + b"\n")
                if payload is not None:
                    self.socket.sendall(payload)
                line = self.answers.readline()
            except BaseException:  # a signal's handler has raised: the answer would be taken for that of the next message
                _connected.clear()
                self.close()  # which withdraws it
                raise
            finally:
                self.is_asking = False
        if not line:
            raise ReportError("the run has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise ReportError(answer["error"])
        return answer["ok"]


_connected = {}


def _connection():
    """This process's own connection: a fork must not share its parent's."""
    pid = os.getpid()
    if pid not in _connected:
        _connected.clear()
        _connected[pid] = _Connection(os.environ[_SOCKET])
    return _connected[pid]
