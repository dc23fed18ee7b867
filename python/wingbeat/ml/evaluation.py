"""Metrics of predictions, in one pass: pyspark's `pyspark.ml.connect.evaluation`."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from wingbeat.ml import _columns, _shards
from wingbeat.ml._curves import Scores
from wingbeat.ml._errors import EmptyDataset, InvalidFeatures, InvalidLabels, OneClass, TooFewRows
from wingbeat.ml._shared import HasLabelCol, HasLocalBytes, HasNumWorkers, HasPredictionCol, HasProbabilityCol
from wingbeat.ml._source import Batch, Source
from wingbeat.ml.base import Evaluator
from wingbeat.ml.param import Param, TypeConverters, keyword_only, one_of

if TYPE_CHECKING:
    import numpy

__all__ = ["BinaryClassificationEvaluator", "Evaluator", "MulticlassClassificationEvaluator", "RegressionEvaluator"]


class _Evaluator(Evaluator, HasLabelCol, HasLocalBytes, HasNumWorkers):
    metricName: Param[str] = Param("undefined", "metricName", "the metric", TypeConverters.toString)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(localBytes=_shards.LOCAL_BYTES)

    def getMetricName(self) -> str:
        """Gets `metricName`."""
        return str(self.getOrDefault(self.metricName))

    def setMetricName(self, value: str) -> Any:
        """Sets `metricName`."""
        return self._set(metricName=value)

    def _reduce(self, make: Any, source: Source, column: str) -> Any:
        """Passes once over the labels and another column."""
        state = _shards.reduce(make, source, [column, self.getLabelCol()], self.getLocalBytes(), self._workers())
        if not state.count:
            raise EmptyDataset("the data set has no rows to evaluate", rows=0, needed=1)
        return state


class RegressionEvaluator(_Evaluator, HasPredictionCol):
    """Compares predicted numbers with labels.

    Args:
        metricName: "rmse" for the root of the mean squared error, "mse" for that error, or "r2" for the coefficient of
            determination.
        labelCol: The column of labels.
        predictionCol: The column of predictions.
        localBytes: Files that are larger than this, uncompressed, are read by ranks.
        numWorkers: How many ranks; if it is not given, as many as this machine or the cluster has CPUs, and 8 at most.
    """

    metricName = Param("undefined", "metricName", "'rmse', 'mse' or 'r2'", one_of("rmse", "mse", "r2"))

    @keyword_only
    def __init__(
        self,
        *,
        metricName: str = "rmse",
        labelCol: str = "label",
        predictionCol: str = "prediction",
        localBytes: int = _shards.LOCAL_BYTES,
        numWorkers: int | None = None,
    ) -> None:
        super().__init__()
        self._set(metricName="rmse")
        self._set(**self._input_kwargs)

    def _evaluate(self, source: Source) -> float:
        make = functools.partial(_Errors, self.getPredictionCol(), self.getLabelCol())
        state: _Errors = self._reduce(make, source, self.getPredictionCol())
        metric = self.getMetricName()
        if metric != "r2":
            mean = state.squares / state.count
            return math.sqrt(mean) if metric == "rmse" else mean
        if state.count < 2:
            raise TooFewRows("r2 needs two rows", rows=state.count, needed=2)
        if not state.deviations:  # all labels are equal
            return 0.0 if state.squares else 1.0
        return 1 - state.squares / state.deviations

    def isLargerBetter(self) -> bool:
        return self.getMetricName() == "r2"


class BinaryClassificationEvaluator(_Evaluator, HasProbabilityCol):
    """Measures how well scores separate the labels 0 and 1.

    Args:
        metricName: "areaUnderROC", or "areaUnderPR" for the average precision.
        labelCol: The column of labels.
        probabilityCol: The column of scores, or of arrays of the probabilities of both classes.
        localBytes: Files that are larger than this, uncompressed, are read by ranks.
        numWorkers: How many ranks; if it is not given, as many as this machine or the cluster has CPUs, and 8 at most.
    """

    metricName = Param(
        "undefined", "metricName", "'areaUnderROC' or 'areaUnderPR'", one_of("areaUnderROC", "areaUnderPR")
    )

    @keyword_only
    def __init__(
        self,
        *,
        metricName: str = "areaUnderROC",
        labelCol: str = "label",
        probabilityCol: str = "probability",
        localBytes: int = _shards.LOCAL_BYTES,
        numWorkers: int | None = None,
    ) -> None:
        super().__init__()
        self._set(metricName="areaUnderROC")
        self._set(**self._input_kwargs)

    def _evaluate(self, source: Source) -> float:
        column, label = self.getProbabilityCol(), self.getLabelCol()
        state: _Binary = self._reduce(functools.partial(_Binary, column, label), source, column)
        negative, positive = map(int, state.scores.distinct()[1].sum(axis=0))
        if not (negative and positive):
            only = 0 if negative else 1
            message = f"all rows have the label {only} in column {label!r}: an area needs both classes"
            raise OneClass(message, column=label, row=None, labels=[only])
        scores = state.scores
        return scores.area_under_roc() if self.getMetricName() == "areaUnderROC" else scores.area_under_pr()

    def isLargerBetter(self) -> bool:
        return True


class MulticlassClassificationEvaluator(_Evaluator, HasPredictionCol):
    """Compares predicted classes with labels.

    Args:
        metricName: "accuracy", the share of rows whose prediction is their label.
        labelCol: The column of labels.
        predictionCol: The column of predictions.
        localBytes: Files that are larger than this, uncompressed, are read by ranks.
        numWorkers: How many ranks; if it is not given, as many as this machine or the cluster has CPUs, and 8 at most.
    """

    metricName = Param("undefined", "metricName", "'accuracy'", one_of("accuracy"))

    @keyword_only
    def __init__(
        self,
        *,
        metricName: str = "accuracy",
        labelCol: str = "label",
        predictionCol: str = "prediction",
        localBytes: int = _shards.LOCAL_BYTES,
        numWorkers: int | None = None,
    ) -> None:
        super().__init__()
        self._set(metricName="accuracy")
        self._set(**self._input_kwargs)

    def _evaluate(self, source: Source) -> float:
        make = functools.partial(_Hits, self.getPredictionCol(), self.getLabelCol())
        state: _Hits = self._reduce(make, source, self.getPredictionCol())
        return state.hits / state.count

    def isLargerBetter(self) -> bool:
        return True


class _Errors:
    """Errors of predicted numbers, and the deviations of labels from their mean, updated as in `SummarizerAggState`."""

    def __init__(self, prediction: str, label: str) -> None:
        self._prediction, self._label = prediction, label
        self.count = 0
        self.squares = 0.0
        self._origin = self._offset = 0.0
        self.deviations = 0.0

    def update(self, batch: Batch) -> None:
        labels = _columns.labels(batch, self._label)
        if not len(labels):
            return
        other = _Errors(self._prediction, self._label)
        errors = _numbers(batch, self._prediction) - labels
        other.count, other.squares = len(labels), float((errors**2).sum())
        other._origin = float(labels[0])
        apart = labels - other._origin
        other._offset = float(apart.mean())
        apart -= other._offset
        other.deviations = 0.0 if labels.min() == labels.max() else float((apart**2).sum() - apart.sum() ** 2 / len(labels))
        self.merge(other)

    def merge(self, other: _Errors) -> None:
        both = self.count + other.count
        if not other.count:
            return
        apart = (other._origin - self._origin) + (other._offset - self._offset)
        if self.count:
            self.deviations += other.deviations + apart**2 * (self.count * (other.count / both))
            self._offset += apart * (other.count / both)
        else:
            self.deviations, self._origin, self._offset = other.deviations, other._origin, other._offset
        self.squares += other.squares
        self.count = both


class _Hits:
    """How many predictions are right."""

    def __init__(self, prediction: str, label: str) -> None:
        self._prediction, self._label = prediction, label
        self.count = self.hits = 0

    def update(self, batch: Batch) -> None:
        labels = _columns.labels(batch, self._label)
        self.count += len(labels)
        self.hits += int((_numbers(batch, self._prediction) == labels).sum())

    def merge(self, other: _Hits) -> None:
        self.count += other.count
        self.hits += other.hits


class _Binary:
    """Scores of rows whose labels are 0 and 1."""

    def __init__(self, column: str, label: str) -> None:
        self._column, self._label = column, label
        self.count = 0
        self.scores = Scores()

    def update(self, batch: Batch) -> None:
        labels = _columns.labels(batch, self._label)
        wrong = (labels != 0) & (labels != 1)
        if wrong.any():
            place = int(wrong.argmax())
            row = int(batch.rows[place])
            message = f"column {self._label!r}, row {row}: the label is {labels[place]:g}, and has to be 0 or 1"
            raise InvalidLabels(message, column=self._label, row=row, labels=[float(labels[place])])
        self.count += len(labels)
        self.scores.add(self._positive(batch), labels == 1)

    def _positive(self, batch: Batch) -> numpy.ndarray[Any, Any]:
        """The scores of class 1."""
        if not _columns.is_array(batch, self._column):
            return _numbers(batch, self._column)
        both = _columns.features(batch, self._column)
        if len(both) and both.shape[1] != 2:
            message = f"column {self._column!r} holds arrays of {both.shape[1]} probabilities: this evaluator is for two classes"
            raise InvalidFeatures(message, column=self._column, row=None)
        positive: numpy.ndarray[Any, Any] = both[:, 1] if len(both) else both.ravel()
        return positive

    def merge(self, other: _Binary) -> None:
        self.count += other.count
        self.scores.merge(other.scores)


def _numbers(batch: Batch, column: str) -> numpy.ndarray[Any, Any]:
    return _columns.scalars(batch, column, nan=False)
