"""What trials run, as a user gives it."""

from __future__ import annotations

import functools
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
