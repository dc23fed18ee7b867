"""A linear layer with a softmax as a pickled module of torch: the file that Spark writes and reads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from wingbeat.ml._errors import MlError

if TYPE_CHECKING:
    import numpy
    import torch

# torch's list of what may be loaded is one for all threads, and each that leaves takes its own away.
_loading = threading.Lock()


def layer(weight: numpy.ndarray[Any, Any], bias: numpy.ndarray[Any, Any] | None) -> torch.nn.Linear:
    """Makes a linear layer.

    Args:
        weight: A row for each output.
        bias: An element for each output; None for a layer without.

    Returns:
        The layer, of float32.
    """
    import torch

    outputs, inputs = weight.shape
    # Without values at first: a layer draws them from the random numbers of the program.
    made = torch.nn.Linear(inputs, outputs, bias=bias is not None, device="meta", dtype=torch.float32)
    state = {"weight": torch.tensor(weight)} | ({} if bias is None else {"bias": torch.tensor(bias)})
    made.load_state_dict(state, assign=True)
    return made.requires_grad_()


def write(path: str, linear: torch.nn.Linear) -> None:
    """Writes what `LogisticRegressionModel` of pyspark reads.

    Args:
        path: The file.
        linear: The layer.
    """
    import torch

    torch.save(torch.nn.Sequential(linear, torch.nn.Softmax(dim=1)), path)


def read(path: str) -> dict[str, numpy.ndarray[Any, Any]]:
    """Reads what `LogisticRegressionModel` of pyspark has written. Nothing but torch's own modules is made of the file.

    Args:
        path: The file.

    Returns:
        The layer's parameters by name.

    Raises:
        MlError: The file holds something else.
    """
    import pickle

    import torch

    nn = torch.nn
    try:
        with _loading, torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Softmax]):
            model = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise MlError(f"it holds no logistic regression of Spark: {error}") from error
    if not isinstance(model, nn.Sequential) or not len(model) or not isinstance(model[0], nn.Linear):
        raise MlError(f"it holds no logistic regression of Spark, but a {type(model).__name__}")
    state = model[0].state_dict()
    return {name: state[name].numpy() for name in state}
