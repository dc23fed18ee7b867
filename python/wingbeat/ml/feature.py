"""Scalers and the assembler of features: pyspark's `pyspark.ml.connect.feature`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wingbeat.ml import _columns, _shards, _sklearn
from wingbeat.ml._errors import InvalidFeatures, InvalidParameter
from wingbeat.ml._saving import CoreModel, of_width
from wingbeat.ml._shared import (
    HasFeatureSizes,
    HasInputCol,
    HasInputCols,
    HasLocalBytes,
    HasNumWorkers,
    HasOutputCol,
)
from wingbeat.ml._source import Batch, Source
from wingbeat.ml.base import Estimator, Model, Transformer
from wingbeat.ml.param import Param, keyword_only, one_of
from wingbeat.ml.summarizer import summarize

if TYPE_CHECKING:
    import numpy
    import pyarrow

__all__ = ["ArrayAssembler", "MaxAbsScaler", "MaxAbsScalerModel", "StandardScaler", "StandardScalerModel"]


class _Scaler(HasInputCol, HasOutputCol, HasLocalBytes, HasNumWorkers):
    def __init__(self) -> None:
        super().__init__()
        self._setDefault(localBytes=_shards.LOCAL_BYTES)


class _ScalerModel(Model, HasInputCol, HasOutputCol, CoreModel):
    _suffix = ".sklearn.pkl"

    def _input_columns(self) -> list[str]:
        return [self.getInputCol()]

    def _output_columns(self) -> list[tuple[str, str]]:
        return [(self.getOutputCol(), "array<double>")]


class MaxAbsScaler(Estimator["MaxAbsScalerModel"], _Scaler):
    """Divides each feature by its largest absolute value.

        scaler = MaxAbsScaler(inputCol="features", outputCol="scaled")
        scaled = scaler.fit(table).transform(table)

    Args:
        inputCol: The column of arrays.
        outputCol: The column that the model writes.
        localBytes: Files that are larger than this, uncompressed, are read by ranks.
        numWorkers: How many ranks; if it is not given, as many as this machine or the cluster has CPUs, and 8 at most.
    """

    @keyword_only
    def __init__(
        self,
        *,
        inputCol: str | None = None,
        outputCol: str | None = None,
        localBytes: int = _shards.LOCAL_BYTES,
        numWorkers: int | None = None,
    ) -> None:
        super().__init__()
        self._set(**self._input_kwargs)

    def _fit(self, source: Source) -> MaxAbsScalerModel:
        import numpy

        found = summarize(source, self.getInputCol(), self.getLocalBytes(), self._workers())
        result = found.to_result(["min", "max", "count"])
        largest = numpy.maximum(numpy.abs(result["min"]), numpy.abs(result["max"]))
        return self._copyValues(MaxAbsScalerModel(largest, result["count"])._resetUid(self.uid))


class MaxAbsScalerModel(_ScalerModel):
    """Divides each feature by its largest absolute value.

    Args:
        max_abs_values: The largest absolute value of each feature.
        n_samples_seen: The number of rows.

    Attributes:
        max_abs_values: The largest absolute value of each feature.
        scale_values: What each feature is divided by: the same, and 1 where that is 0.
        n_samples_seen: The number of rows.
    """

    def __init__(self, max_abs_values: numpy.ndarray[Any, Any] | None = None, n_samples_seen: int | None = None) -> None:
        super().__init__()
        self.max_abs_values: Any = max_abs_values
        self.n_samples_seen = n_samples_seen
        if max_abs_values is not None:
            self.scale_values: Any = _nonzero(max_abs_values)

    def _compute(self, batch: Batch) -> dict[str, pyarrow.Array]:
        rows = _columns.arrays(batch, self.getInputCol(), len(self.scale_values))
        return {self.getOutputCol(): _columns.array_column(rows / self.scale_values)}

    def _weights(self) -> dict[str, numpy.ndarray[Any, Any]]:
        return {"max_abs": self.max_abs_values, "scale": self.scale_values, "count": _sklearn.count(self.n_samples_seen)}

    def _take(self, weights: dict[str, numpy.ndarray[Any, Any]], extra: dict[str, Any]) -> None:
        self.max_abs_values, self.scale_values = of_width(weights, "max_abs", "scale")
        self.n_samples_seen = int(weights["count"][0])

    def _write_spark(self, path: str) -> None:
        _sklearn.write_max_abs(path, self._weights())

    def _read_spark(self, path: str) -> dict[str, numpy.ndarray[Any, Any]]:
        return _sklearn.read_max_abs(path)


class StandardScaler(Estimator["StandardScalerModel"], _Scaler):
    """Subtracts the mean of each feature, and divides by its standard deviation (of a sample, with n - 1, as Spark does).

        scaler = StandardScaler(inputCol="features", outputCol="scaled")
        scaled = scaler.fit(table).transform(table)

    Args:
        inputCol: The column of arrays.
        outputCol: The column that the model writes.
        localBytes: Files that are larger than this, uncompressed, are read by ranks.
        numWorkers: How many ranks; if it is not given, as many as this machine or the cluster has CPUs, and 8 at most.
    """

    @keyword_only
    def __init__(
        self,
        *,
        inputCol: str | None = None,
        outputCol: str | None = None,
        localBytes: int = _shards.LOCAL_BYTES,
        numWorkers: int | None = None,
    ) -> None:
        super().__init__()
        self._set(**self._input_kwargs)

    def _fit(self, source: Source) -> StandardScalerModel:
        found = summarize(source, self.getInputCol(), self.getLocalBytes(), self._workers())
        result = found.to_result(["mean", "std", "count"])
        return self._copyValues(StandardScalerModel(result["mean"], result["std"], result["count"])._resetUid(self.uid))


class StandardScalerModel(_ScalerModel):
    """Subtracts the mean of each feature, and divides by its standard deviation.

    Args:
        mean_values: The mean of each feature.
        std_values: The standard deviation of each feature.
        n_samples_seen: The number of rows.

    Attributes:
        mean_values: The mean of each feature.
        std_values: The standard deviation of each feature.
        scale_values: What each feature is divided by: the same, and 1 where that is 0.
        n_samples_seen: The number of rows.
    """

    def __init__(
        self,
        mean_values: numpy.ndarray[Any, Any] | None = None,
        std_values: numpy.ndarray[Any, Any] | None = None,
        n_samples_seen: int | None = None,
    ) -> None:
        super().__init__()
        self.mean_values: Any = mean_values
        self.std_values: Any = std_values
        self.n_samples_seen = n_samples_seen
        if std_values is not None:
            self.scale_values: Any = _nonzero(std_values)

    def _compute(self, batch: Batch) -> dict[str, pyarrow.Array]:
        rows = _columns.arrays(batch, self.getInputCol(), len(self.scale_values))
        return {self.getOutputCol(): _columns.array_column((rows - self.mean_values) / self.scale_values)}

    def _weights(self) -> dict[str, numpy.ndarray[Any, Any]]:
        count = _sklearn.count(self.n_samples_seen)
        return {"mean": self.mean_values, "std": self.std_values, "scale": self.scale_values, "count": count}

    def _take(self, weights: dict[str, numpy.ndarray[Any, Any]], extra: dict[str, Any]) -> None:
        self.mean_values, self.std_values, self.scale_values = of_width(weights, "mean", "std", "scale")
        self.n_samples_seen = int(weights["count"][0])

    def _write_spark(self, path: str) -> None:
        _sklearn.write_standard(path, self._weights())

    def _read_spark(self, path: str) -> dict[str, numpy.ndarray[Any, Any]]:
        return _sklearn.read_standard(path)


class ArrayAssembler(Transformer, HasInputCols, HasOutputCol, HasFeatureSizes):
    """Joins columns of numbers and of arrays into one column of arrays of doubles.

        assembler = ArrayAssembler(inputCols=["pixels", "age"], outputCol="features", featureSizes=[64, 1])

    Args:
        inputCols: The columns.
        outputCol: The column to write.
        featureSizes: How many features each input column has: 1 for a column of numbers.
        handleInvalid: "error" for an error where a feature is null or NaN; "keep" for NaN in its place.
    """

    handleInvalid: Param[str] = Param(
        "undefined", "handleInvalid", "'error' raises an error at a null or NaN, 'keep' writes NaN", one_of("error", "keep")
    )

    @keyword_only
    def __init__(
        self,
        *,
        inputCols: list[str] | None = None,
        outputCol: str | None = None,
        featureSizes: list[int] | None = None,
        handleInvalid: str = "error",
    ) -> None:
        super().__init__()
        self._setDefault(handleInvalid="error")
        self._set(**self._input_kwargs)

    def getHandleInvalid(self) -> str:
        """Gets `handleInvalid`."""
        return str(self.getOrDefault(self.handleInvalid))

    def setHandleInvalid(self, value: str) -> ArrayAssembler:
        """Sets `handleInvalid`."""
        return self._set(handleInvalid=value)

    def _input_columns(self) -> list[str]:
        return self.getInputCols()

    def _output_columns(self) -> list[tuple[str, str]]:
        self._sizes()
        return [(self.getOutputCol(), "array<double>")]

    def _sizes(self) -> list[int]:
        columns, sizes = self.getInputCols(), self.getFeatureSizes()
        if not sizes or len(sizes) != len(columns):
            counts = f"{len(columns)} inputCols, and {len(sizes or [])} featureSizes"
            raise InvalidParameter(f"ArrayAssembler has {counts}: give one for each")
        for column, size in zip(columns, sizes):
            if size < 1:
                raise InvalidParameter(f"ArrayAssembler: the featureSize of {column!r} is {size}, and has to be at least 1")
        return sizes

    def _compute(self, batch: Batch) -> dict[str, pyarrow.Array]:
        import numpy

        parts = [self._part(batch, column, size) for column, size in zip(self.getInputCols(), self._sizes())]
        return {self.getOutputCol(): _columns.array_column(numpy.concatenate(parts, axis=1))}

    def _part(self, batch: Batch, column: str, size: int) -> numpy.ndarray[Any, Any]:
        import numpy

        keeps = self.getHandleInvalid() == "keep"
        if _columns.is_array(batch, column):
            return _columns.arrays(batch, column, size, null_rows=keeps, nan=keeps)
        if size != 1:
            message = f"column {column!r} holds numbers, and its featureSize is {size}: it has to be 1"
            raise InvalidFeatures(message, column=column, row=None)
        return numpy.asarray(_columns.scalars(batch, column, nan=keeps)).reshape(-1, 1)


def _nonzero(scale: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    import numpy

    return numpy.where(scale == 0, 1.0, scale)
