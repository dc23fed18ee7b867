"""The `wingbeat` command, as a process of this program."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TextIO

from wingbeat import _interrupts

# Of two signals within a second the command may take the second for the first, which has come twice. It counts from when it has
# heard the first, which on a loaded machine is later than it was sent.
_APART_S = 1.5

# The exit code of a command that has ended well, of whose output some could not be written, as on a full disk.
OUTPUT_IS_MISSING = 74

# What only a rank's environment has: a run that a rank starts would take it for its own.
_OF_A_RANK = (
    "WINGBEAT_CHECKPOINT", "WINGBEAT_EXPERIMENT", "WINGBEAT_RANK_SOCKET", "WINGBEAT_TRIAL", "WINGBEAT_TRIAL_DIR"
)
_SHARD = "WINGBEAT_SHARD_"

# How long what the command has written is waited for once it has ended.
_REST_S = 5


def binary() -> str:
    """Where the `wingbeat` command is: `$WINGBEAT_BIN`, the one that was installed with this package, or one on the PATH.

    Returns:
        Its path.

    Raises:
        RuntimeError: There is none.
    """
    given = os.environ.get("WINGBEAT_BIN")
    beside = Path(sysconfig.get_path("scripts"), "wingbeat")
    found = given or (str(beside) if beside.exists() else shutil.which("wingbeat"))
    if found is None:
        raise RuntimeError("the `wingbeat` command is not installed; `pip install wingbeat` brings it")
    if given and shutil.which(given) is None:
        raise RuntimeError(f"WINGBEAT_BIN is {given!r}, and there is no such command; leave it out if the package is installed")
    return found


def environment() -> dict[str, str]:
    """This process's environment for a command of `wingbeat`.

    Returns:
        The variables, without those that a run gives to its ranks: what a rank starts is a run of its own.
    """
    return {name: value for name, value in os.environ.items() if name not in _OF_A_RANK and not name.startswith(_SHARD)}


def local_gpus() -> int:
    """How many GPUs this machine has, of those that this process may use.

    Returns:
        The number.
    """
    told = subprocess.run([binary(), "devices", "--json"], stdout=subprocess.PIPE, check=True).stdout
    return len(json.loads(told))


def run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Runs a command, and shows its output where this program's goes.

    Ctrl-C is passed on, so that ranks have their time to save what they have. A second Ctrl-C kills them.

    Args:
        command: The command and its arguments.
        env: Its whole environment.

    Returns:
        Its exit code. If some of its output could not be shown, and it has ended well, `OUTPUT_IS_MISSING`.
    """
    streams = [_target(sys.stdout, 1), _target(sys.stderr, 2)]
    # In a session of its own, so that Ctrl-C comes once: from here.
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=streams[0], stderr=streams[1], start_new_session=True
    )
    interrupts = _interrupts.current()
    for interrupt in interrupts:
        interrupt.add(process)
    pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    shown = [_Shown(source, target) for source, target in pairs if source is not None]
    for thread in shown:
        thread.start()
    if threading.current_thread() is threading.main_thread():
        # polars has a wait go on after the signal, and Python would hear of it when the command ends.
        signal.siginterrupt(signal.SIGINT, True)
    try:
        code = process.wait()
    except BaseException as error:
        _end(process, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        raise
    finally:
        for interrupt in interrupts:
            interrupt.discard(process)
    for thread in shown:
        thread.rest()
    return OUTPUT_IS_MISSING if code == 0 and any(thread.is_missing for thread in shown) else code


def _end(process: subprocess.Popen[bytes], first: signal.Signals) -> None:
    """Has a command end: in order, at once if that is asked for again, and with SIGKILL after that."""
    begun = time.monotonic()
    process.send_signal(first)
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            process.wait()
            return
        except BaseException:  # asked again
            with contextlib.suppress(BaseException):
                time.sleep(max(0, begun + _APART_S - time.monotonic()))
        process.send_signal(number)
    process.wait()


class _Shown(threading.Thread):
    """Shows what a command writes, line by line. What the target does not take is left out, and the rest is read all the same:
    the command would end otherwise.

    Attributes:
        is_missing: Whether some of it was left out.
    """

    def __init__(self, source: IO[bytes], target: TextIO) -> None:
        super().__init__(daemon=True)
        self._source, self._target = source, target
        self._lines = 0
        self._is_reading = True
        self.is_missing = False

    def run(self) -> None:
        # Lines end as the command ends them: also with a carriage return, of a bar.
        for line in io.TextIOWrapper(self._source, encoding="utf-8", errors="replace", newline=""):
            self._is_reading = False
            try:
                self._show(line)
            except Exception:  # a full disk, a stream that was closed, or whatever a notebook's raises
                self.is_missing = True
            self._lines += 1
            self._is_reading = True

    def _show(self, line: str) -> None:
        try:
            self._target.write(line)
        except UnicodeEncodeError:
            encoding = self._target.encoding or "ascii"
            self._target.write(line.encode(encoding, "backslashreplace").decode(encoding))
        self._target.flush()

    def rest(self) -> None:
        """Waits until all is shown, also for a slow reader; not for what the command has left behind: that may have its output
        open for as long as a GPU's driver takes, and says nothing more."""
        while self.is_alive():
            before = self._lines
            self.join(_REST_S)
            if self._is_reading and self._lines == before:
                return


def _target(stream: TextIO | None, number: int) -> int | None:
    """Where the command writes: to where this program does, or where that is no file, as in a notebook, into a pipe."""
    try:
        is_own = stream is not None and stream.fileno() == number
        if stream is not None:
            stream.flush()
    except (OSError, ValueError, AttributeError):
        is_own = False
    return None if is_own else subprocess.PIPE
