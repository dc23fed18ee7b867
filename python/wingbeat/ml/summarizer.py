"""Statistics of a column of arrays, in one pass: pyspark's `pyspark.ml.connect.summarizer`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wingbeat.ml import _columns, _shards
from wingbeat.ml._errors import EmptyDataset, InvalidFeatures, InvalidParameter, TooFewRows
from wingbeat.ml._source import Batch, Source, open_source
from wingbeat.ml.param import one_of

if TYPE_CHECKING:
    import numpy

__all__ = ["SummarizerAggState", "summarize_dataframe"]

METRICS = ("min", "max", "sum", "mean", "std", "count")


class SummarizerAggState:
    """Statistics of the rows that were seen.

    The variance is updated as in Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances" (1979): two sets of rows with the means a and b, the sums of squared deviations A and B, and m and n rows
    have together A + B + (b - a)^2 m n / (m + n). Spark subtracts the square of the mean from the mean square, which
    loses all digits where the mean is large. Means are kept as their distance from the first row, which is exact where
    values are close to each other: as numbers of their own, they would be rounded to the digits of a large mean.

    Args:
        column: The column of arrays.
    """

    def __init__(self, column: str) -> None:
        self.column = column
        self.count = 0
        self._size: int | None = None
        self.min: Any = None
        self.max: Any = None
        self.sum: Any = None
        self._origin: Any = None  # the first row
        self._offset: Any = None  # of the mean from the first row
        self.deviations: Any = None  # the sum of squared deviations from the mean

    def update(self, batch: Batch) -> None:
        """Takes more rows in.

        Args:
            batch: The rows.

        Raises:
            InvalidFeatures: A value is null, NaN or infinite, or arrays differ in length.
        """
        import numpy

        rows = _columns.features(batch, self.column, self._size)
        if not len(rows):
            return
        other = SummarizerAggState(self.column)
        other.count, other._size = rows.shape
        other.min, other.max = rows.min(axis=0), rows.max(axis=0)
        other._origin = rows[0].copy()
        with numpy.errstate(over="ignore", invalid="ignore"):  # an error in `to_result`, if it is asked for
            other.sum = rows.sum(axis=0)
            deviations = rows - other._origin
            other._offset = deviations.mean(axis=0)
            deviations -= other._offset
            # The second term is 0 but for rounding in the mean: the corrected two-pass algorithm of the same paper.
            other.deviations = (deviations**2).sum(axis=0) - deviations.sum(axis=0) ** 2 / len(rows)
            self.merge(other)

    def merge(self, other: SummarizerAggState) -> None:
        """Takes in what another state has seen.

        Args:
            other: The other state.

        Raises:
            InvalidFeatures: Its arrays have another length.
        """
        import numpy

        if not other.count:
            return
        if not self.count:
            self.__dict__.update(other.__dict__)
            return
        if self._size != other._size:
            message = f"column {self.column!r}: some arrays have {self._size} elements, and others {other._size}"
            raise InvalidFeatures(message, column=self.column, row=None)
        both = self.count + other.count
        apart = (other._origin - self._origin) + (other._offset - self._offset)
        self._offset = self._offset + apart * (other.count / both)
        self.deviations = self.deviations + other.deviations + apart**2 * (self.count * (other.count / both))
        self.min, self.max = numpy.minimum(self.min, other.min), numpy.maximum(self.max, other.max)
        self.sum = self.sum + other.sum
        self.count = both

    @property
    def mean(self) -> Any:
        """The mean of each feature."""
        return self._origin + self._offset

    def to_result(self, metrics: Sequence[str]) -> dict[str, Any]:
        """The statistics.

        Args:
            metrics: Any of "min", "max", "sum", "mean", "std" (with n - 1) and "count".

        Returns:
            Each statistic by its name: an array with an element for each feature, and a number for "count".

        Raises:
            EmptyDataset: No row was seen.
            TooFewRows: "std" needs two rows.
            InvalidParameter: There is no such statistic.
            InvalidFeatures: A statistic is too large for float64.
        """
        import numpy

        for metric in metrics:
            try:
                one_of(*METRICS)(metric)
            except ValueError as error:
                raise InvalidParameter(f"cannot summarize the column {self.column!r}: {error}") from None
        if not self.count:
            raise EmptyDataset(f"cannot summarize the column {self.column!r}: the data set has no rows", rows=0, needed=1)
        if "std" in metrics and self.count < 2:
            raise TooFewRows(f"the standard deviation of the column {self.column!r} needs two rows", rows=self.count, needed=2)
        results = {metric: self._result(metric) for metric in metrics}
        for metric, result in results.items():
            bad = ~numpy.isfinite(result)
            if bad.any():
                what = f"the {metric} of feature {int(bad.argmax())} is beyond the range of float64"
                raise InvalidFeatures(f"column {self.column!r}: {what}: divide it first", column=self.column, row=None)
        return results

    def _result(self, metric: str) -> Any:
        import numpy

        if metric == "count":
            return self.count
        if metric == "std":
            return numpy.sqrt(self._variance())
        return getattr(self, metric).copy()

    def _variance(self) -> numpy.ndarray[Any, Any]:
        import numpy

        # Exactly 0 for a constant feature, whatever was rounded.
        return numpy.where(self.min == self.max, 0.0, numpy.maximum(self.deviations, 0.0) / (self.count - 1))


def summarize_dataframe(
    dataframe: Any, column: str, metrics: Sequence[str], *, localBytes: int = _shards.LOCAL_BYTES, numWorkers: int = 1
) -> dict[str, Any]:
    """Summarizes a column of arrays of the same length.

    Args:
        dataframe: A pyarrow Table, a pandas or polars DataFrame, or the path or URL of Parquet files.
        column: The column.
        metrics: Any of "min", "max", "sum", "mean", "std" (with n - 1) and "count".
        localBytes: Files that are larger than this, uncompressed, are read by ranks.
        numWorkers: How many ranks.

    Returns:
        Each statistic by its name: an array with an element for each feature, and a number for "count".

    Raises:
        MissingColumn: There is no such column.
        InvalidFeatures: A value is null, NaN or infinite, or arrays differ in length.
        EmptyDataset: There are no rows.
    """
    return summarize(open_source(dataframe), column, localBytes, numWorkers).to_result(metrics)


def summarize(source: Source, column: str, local_bytes: int, workers: int | None) -> SummarizerAggState:
    """Passes once over a column of arrays.

    Args:
        source: The data set.
        column: The column.
        local_bytes: Files that are larger than this, uncompressed, are read by ranks.
        workers: How many ranks; None for as many as is usual.

    Returns:
        The statistics.
    """
    return _shards.reduce(functools.partial(SummarizerAggState, column), source, [column], local_bytes, workers)
