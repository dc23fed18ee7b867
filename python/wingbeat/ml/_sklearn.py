"""Scalers as pickled objects of scikit-learn: the files that Spark writes and reads."""

from __future__ import annotations

import pickle
from typing import IO, TYPE_CHECKING, Any

from wingbeat.ml._errors import MlError

if TYPE_CHECKING:
    import numpy

    Weights = dict[str, numpy.ndarray[Any, Any]]

# All that a pickled scaler names. Whatever else a file names is not imported: a model's file runs no code.
_ALLOWED = frozenset(
    {
        ("sklearn.preprocessing._data", "StandardScaler"),
        ("sklearn.preprocessing._data", "MaxAbsScaler"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy._core.multiarray", "scalar"),
        ("numpy.core.numeric", "_frombuffer"),
        ("numpy._core.numeric", "_frombuffer"),
        ("_codecs", "encode"),
    }
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise MlError(f"the file of a scaler names {module}.{name}, which no scaler does; it is not loaded")
        return super().find_class(module, name)


def count(number: int | None) -> numpy.ndarray[Any, Any]:
    """A number of rows, as an array that safetensors can hold."""
    import numpy

    return numpy.array([0 if number is None else number], dtype=numpy.int64)


def write_standard(path: str, weights: Weights) -> None:
    """Writes what `StandardScalerModel` of pyspark reads.

    Args:
        path: The file.
        weights: The model's weights.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    preprocessing = _preprocessing()
    scaler = preprocessing.StandardScaler(with_mean=True, with_std=True)
    scaler.mean_, scaler.var_ = weights["mean"], weights["std"] ** 2
    _write(path, scaler, weights)


def write_max_abs(path: str, weights: Weights) -> None:
    """Writes what `MaxAbsScalerModel` of pyspark reads.

    Args:
        path: The file.
        weights: The model's weights.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    scaler = _preprocessing().MaxAbsScaler()
    scaler.max_abs_ = weights["max_abs"]
    _write(path, scaler, weights)


def read_standard(path: str) -> Weights:
    """Reads what `StandardScalerModel` of pyspark has written.

    Args:
        path: The file.

    Returns:
        The model's weights.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
        MlError: The file holds something else.
    """
    scaler = _read(path)
    std = scaler.var_**0.5
    return {"mean": scaler.mean_, "std": std, "scale": scaler.scale_, "count": count(scaler.n_samples_seen_)}


def read_max_abs(path: str) -> Weights:
    """Reads what `MaxAbsScalerModel` of pyspark has written.

    Args:
        path: The file.

    Returns:
        The model's weights.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
        MlError: The file holds something else.
    """
    scaler = _read(path)
    return {"max_abs": scaler.max_abs_, "scale": scaler.scale_, "count": count(scaler.n_samples_seen_)}


def _write(path: str, scaler: Any, weights: Weights) -> None:
    scaler.scale_ = weights["scale"]
    scaler.n_features_in_ = len(weights["scale"])
    scaler.n_samples_seen_ = int(weights["count"][0])
    with open(path, "wb") as out:
        pickle.dump(scaler, out)


def _read(path: str) -> Any:
    _preprocessing()
    with open(path, "rb") as file:
        return _unpickle(file)


def _unpickle(file: IO[bytes]) -> Any:
    return _Unpickler(file).load()


def _preprocessing() -> Any:
    try:
        from sklearn import preprocessing  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        message = "Spark's file of a scaler is an object of scikit-learn, which is not installed: pip install scikit-learn"
        raise ModuleNotFoundError(message) from error
    return preprocessing
