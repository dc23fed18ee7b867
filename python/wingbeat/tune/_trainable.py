"""What trials run."""

from __future__ import annotations

import contextlib
import functools
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
        resources: `{"cpu": 2, "gpu": 0.5}`.

    Returns:
        What `Tuner` takes for the function.

    Raises:
        ValueError: An amount makes no sense.
        NotImplementedError: There are other resources, or several ranks.
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
# What the function raised before it was asked to end: the command of a trial that is stopped says only that.
RAISED = "raised.pickle"


def run(function: Callable[..., Any], config: dict[str, Any], folder: str) -> None:
    """What the rank of a trial calls.

    A trial that is stopped gets SIGTERM, which is raised as SystemExit here, so that its `finally` blocks run.

    Args:
        function: The user's function. What it returns, if that is a dict, is reported.
        config: Its parameters.
        folder: The trial's folder, where it leaves when it has started: before, it waited for room.
    """
    from wingbeat._function import pickle_error
    from wingbeat.train._report import report

    is_asked = has_ended = False

    def stop(number: int, frame: Any) -> None:
        nonlocal is_asked
        is_asked = True
        if not has_ended:  # else Python is ending, where others would show it as an error of theirs
            raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}/{RAISED}")  # of an earlier attempt
    _leave(folder, STARTED, repr(time.time()).encode())
    try:
        returned = function(config)
    except Exception as error:
        if not is_asked:
            with contextlib.suppress(Exception):  # what cannot be pickled
                _leave(folder, RAISED, bytes(pickle_error(error)))
        raise
    if isinstance(returned, Mapping):
        report(returned)
    has_ended = True


def _leave(folder: str, name: str, data: bytes) -> None:
    """Leaves a file in the trial's folder, whole or not at all."""
    with contextlib.suppress(OSError):
        made = f"{folder}/{name}-{os.getpid()}"
        with open(made, "wb") as file:
            file.write(data)
        os.rename(made, f"{folder}/{name}")
