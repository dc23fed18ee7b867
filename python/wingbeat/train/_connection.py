"""The connection to this rank's actor: a line of JSON and perhaps bytes, and a line of JSON in answer.

A rank that waits for the others waits in this file: `wingbeat train` looks for it in the stacks of ranks that hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from typing import Any

SOCKET = "WINGBEAT_RANK_SOCKET"
LONGEST = 16 << 20


class ReportError(RuntimeError):
    """A report was refused. The text says why."""

    __module__ = "wingbeat.train"


class Connection:
    """A connection to the actor with this socket."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect("\0" + name)
        self.answers = self.socket.makefile("rb")
        self.name = name
        self.lock = threading.RLock()  # a signal's handler may ask in the middle of a question of its own thread
        self.is_asking = False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # a child may have it, too
        self.answers.close()
        self.socket.close()

    def ask(self, message: dict[str, Any], payload: bytes | memoryview | None = None) -> Any:
        """Sends a message, and waits for its answer.

        Raises:
            ReportError: The run has refused it, or has ended.
        """
        with self.lock:
            if self.is_asking:
                other = Connection(self.name)
                try:
                    return other.ask({**message, "nested": True}, payload)
                finally:
                    other.close()
            if payload is not None:
                message = {**message, "bytes": len(payload)}
            asked = json.dumps(message).encode() + b"\n"
            if len(asked) > LONGEST:
                raise ReportError(f"a report takes {len(asked):,} bytes, and may take {LONGEST:,}: report fewer metrics")
            self.is_asking = True
            try:
                self.socket.sendall(asked)
                if payload is not None:
                    self.socket.sendall(payload)
                line = self.answers.readline()
            except OSError as error:
                _connected.clear()
                self.close()
                if error.errno is None:  # no socket's: a signal's handler has raised it, as TimeoutError
                    raise
                raise ReportError(f"the run does not answer: {error}") from error
            except BaseException:  # a signal's handler has raised: the answer would be taken for that of the next message
                _connected.clear()
                self.close()  # which withdraws it
                raise
            finally:
                self.is_asking = False
        if not line:
            _connected.clear()  # the next one asks anew
            self.close()
            raise ReportError("the run has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise ReportError(answer["error"])
        return answer["ok"]


_connected: dict[int, Connection] = {}


def is_in_a_run() -> bool:
    """Whether this process is a rank, or was started by one."""
    return SOCKET in os.environ


def connection() -> Connection:
    """This process's own connection: a fork must not share its parent's."""
    pid = os.getpid()
    if pid not in _connected:
        _connected.clear()
        try:
            _connected[pid] = Connection(os.environ[SOCKET])
        except OSError as error:
            raise ReportError(f"the run does not answer: {error}") from error
    return _connected[pid]
