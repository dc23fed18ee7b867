"""Scalers as pickled objects of scikit-learn: the files that Spark writes and reads."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wingbeat.ml._errors import MlError

if TYPE_CHECKING:
    import numpy

    Weights = dict[str, numpy.ndarray[Any, Any]]

class _Scaler:
    """What a file says of a scaler."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def __new__(cls, *_: Any) -> _Scaler:
        made = super().__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = dict(state)


class _Dtype:
    """The type of numbers. NumPy's own would take whatever state a file gives it, and then read memory where the file says."""

    def __init__(self, code: Any, *_: Any) -> None:
        import numpy

        self.dtype = numpy.dtype(str(code))
        if self.dtype.kind not in "fiu" or self.dtype.itemsize > 8:
            raise MlError(f"the file of a scaler has an array of {self.dtype}, and no numbers; it is not loaded")

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if order in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """An array, as `numpy.ndarray` pickles it."""

    def __init__(self, *_: Any) -> None:
        self.values: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, data = state
        self.values = _values(data, kind, shape, "F" if is_fortran else "C")


class _Made:
    """What a name in a file stands for: a function of this module, to which the file can do nothing but call it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise MlError("the file of a scaler changes what it names, which no scaler does; it is not loaded")


def _values(data: Any, kind: Any, shape: Any, order: Any) -> Any:
    import numpy

    if not isinstance(kind, _Dtype) or not isinstance(data, (bytes, bytearray)) or order not in ("C", "F"):
        raise MlError("the file of a scaler has an array that holds no numbers; it is not loaded")
    return numpy.frombuffer(bytes(data), kind.dtype).reshape(tuple(shape), order=order).copy()


def _array_of(data: Any, kind: Any, shape: Any, order: Any) -> _Array:
    made = _Array()
    made.values = _values(data, kind, shape, order)
    return made


def _encoded(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise MlError(f"the file of a scaler has bytes as {encoding!r}; it is not loaded")
    return text.encode("latin1")


# All that a pickled scaler names, and what is made of it. Nothing else is imported: a model's file runs no code.
_MADE: dict[tuple[str, str], Any] = {
    ("sklearn.preprocessing._data", "StandardScaler"): _Scaler,
    ("sklearn.preprocessing._data", "MaxAbsScaler"): _Scaler,
    ("numpy", "ndarray"): _Made(_Array),
    ("numpy", "dtype"): _Made(_Dtype),
    ("_codecs", "encode"): _Made(_encoded),
}
for _core in ("numpy.core", "numpy._core"):
    _MADE[f"{_core}.multiarray", "_reconstruct"] = _Made(_Array)
    _MADE[f"{_core}.multiarray", "scalar"] = _Made(lambda kind, data: _values(data, kind, (), "C")[()])
    _MADE[f"{_core}.numeric", "_frombuffer"] = _Made(_array_of)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _MADE:
            raise MlError(f"the file of a scaler names {module}.{name}, which no scaler does; it is not loaded")
        return _MADE[module, name]


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
        MlError: The file holds something else.
    """
    read = _read(path, "mean_", "var_", "scale_")
    return {"mean": read["mean_"], "std": read["var_"] ** 0.5, "scale": read["scale_"], "count": read["count"]}


def read_max_abs(path: str) -> Weights:
    """Reads what `MaxAbsScalerModel` of pyspark has written.

    Args:
        path: The file.

    Returns:
        The model's weights.

    Raises:
        MlError: The file holds something else.
    """
    read = _read(path, "max_abs_", "scale_")
    return {"max_abs": read["max_abs_"], "scale": read["scale_"], "count": read["count"]}


def _write(path: str, scaler: Any, weights: Weights) -> None:
    scaler.scale_ = weights["scale"]
    scaler.n_features_in_ = len(weights["scale"])
    scaler.n_samples_seen_ = int(weights["count"][0])
    with open(path, "wb") as out:
        pickle.dump(scaler, out)


def _read(path: str, *names: str) -> Weights:
    """Some attributes of a scaler that are arrays, and its number of rows as `count`."""
    try:
        with open(path, "rb") as file:
            scaler = _Unpickler(file).load()
        state = scaler.state
        seen = state.get("n_samples_seen_")
        return {**{name: state[name].values for name in names}, "count": count(None if seen is None else int(seen))}
    except (MlError, OSError):
        raise
    except Exception as error:  # a pickle may raise anything
        raise MlError(f"{path} holds no scaler of scikit-learn: {type(error).__name__}: {error}") from error


def _preprocessing() -> Any:
    try:
        from sklearn import preprocessing  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        message = "Spark's file of a scaler is an object of scikit-learn, which is not installed: pip install scikit-learn"
        raise ModuleNotFoundError(message) from error
    return preprocessing
