"""What trials run."""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from wingbeat.train._config import ScalingConfig
from wingbeat.train._trainer import TorchTrainer
from wingbeat.train._unsupported import refuse


class WithResources:
    """A function and what each of its trials holds. `with_resources` makes one.

    Args:
        trainable: The function.
        scaling: What its one rank holds.
    """

    def __init__(self, trainable: Callable[..., Any], scaling: ScalingConfig) -> None:
        self.trainable, self.scaling = trainable, scaling


def with_resources(trainable: Callable[..., Any], resources: Mapping[str, float] | ScalingConfig) -> WithResources:
    """Says what each trial of a function holds. A trial holds one CPU otherwise.

    Args:
        trainable: The function.
        resources: `{"cpu": 2, "gpu": 0.5}`, and other resources of nodes by their names.

    Returns:
        What `Tuner` takes for the function.

    Raises:
        ValueError: An amount makes no sense.
        NotImplementedError: There are several ranks.
    """
    if isinstance(resources, ScalingConfig):
        scaling = resources
    else:
        if not isinstance(resources, Mapping):
            raise refuse(f"with_resources(…, {resources!r:.50})", 'give {"cpu": …, "gpu": …}')
        held = {{"cpu": "CPU", "gpu": "GPU"}.get(name, name): amount for name, amount in resources.items()}
        scaling = ScalingConfig(use_gpu=held.get("GPU", 0) > 0, resources_per_worker=held)
    if scaling.workers != (1, 1):
        raise refuse("a function with several ranks", "give Tuner a TorchTrainer with this ScalingConfig")
    if isinstance(trainable, TorchTrainer):
        raise TypeError("a TorchTrainer has its resources in its ScalingConfig")
    return WithResources(trainable, scaling)


def with_parameters(trainable: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """Gives a function further arguments, which are the same in all trials and travel to each.

    Args:
        trainable: The function.
        **kwargs: Its further arguments.

    Returns:
        What `Tuner` takes for the function.

    Raises:
        TypeError: It is not a function.
    """
    if not callable(trainable):
        raise TypeError(f"with_parameters takes a function, not {trainable!r:.100}")
    return functools.partial(trainable, **kwargs)


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
