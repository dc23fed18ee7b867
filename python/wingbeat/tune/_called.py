"""What the rank of a trial calls. It imports little, since every trial pays for it."""

from __future__ import annotations

import contextlib
import inspect
import numbers
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

STARTED = "started"
# Ray's variable with the working directory that a trial had at first.
_ORIGINAL = "TUNE_ORIG_WORKING_DIR"
# What the function raised before it was asked to end: the command of a trial that is stopped says only that.
RAISED = "raised.pickle"


def run(function: Callable[..., Any], config: dict[str, Any], folder: str, *, changes_folder: bool = True) -> None:
    """What the rank of a trial calls.

    A trial that is stopped gets SIGTERM, which is raised as SystemExit here, so that its `finally` blocks run.

    Args:
        function: The user's function. What it returns is reported: a dict of metrics, or a number as "_metric", as Ray has it. So
            is each that a generator yields.
        config: Its parameters.
        folder: The trial's folder, where it leaves when it has started: before, it waited for room.
        changes_folder: Whether that is its working directory, as in Ray Tune: files of trials that run at a time stay apart.
    """
    from wingbeat._function import pickle_error

    is_asked = is_over = False

    def stop(number: int, frame: Any) -> None:
        nonlocal is_asked
        if is_over:  # Python is ending: what is raised there is a traceback of something else
            return
        is_asked = True
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}/{RAISED}")  # of an earlier attempt
    if not os.path.exists(f"{folder}/{STARTED}"):  # the first attempt began the trial
        _leave(folder, STARTED, repr(time.time()).encode())
    if changes_folder:
        os.environ[_ORIGINAL] = os.getcwd()
        os.chdir(folder)
    try:
        returned = function(config)
        for one in returned if inspect.isgenerator(returned) else [returned]:
            _report_returned(one)
    except Exception as error:
        if not is_asked:
            with contextlib.suppress(Exception):  # what cannot be pickled
                _leave(folder, RAISED, bytes(pickle_error(error)))
        raise
    finally:
        is_over = True


def _report_returned(returned: Any) -> None:
    from wingbeat.train._report import report

    if isinstance(returned, Mapping):
        report(returned)
    elif isinstance(returned, numbers.Real) and not isinstance(returned, bool):
        report({"_metric": float(returned)})
    elif returned is not None:
        kind = type(returned).__qualname__
        raise TypeError(f"the function returned a {kind}: return a dict of metrics, a number, or nothing")


def _leave(folder: str, name: str, data: bytes) -> None:
    """Leaves a file in the trial's folder, whole or not at all."""
    with contextlib.suppress(OSError):
        made = f"{folder}/{name}-{os.getpid()}"
        with open(made, "wb") as file:
            file.write(data)
        os.rename(made, f"{folder}/{name}")
