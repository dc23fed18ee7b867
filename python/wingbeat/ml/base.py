"""Estimators, transformers, models and evaluators: pyspark's `pyspark.ml.connect.base`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from wingbeat.ml._derived import Derived
from wingbeat.ml._saving import Savable
from wingbeat.ml._shared import HasFeaturesCol, HasLabelCol, HasPredictionCol
from wingbeat.ml._source import Batch, Source, open_source
from wingbeat.ml.param import ParamMap, Params

if TYPE_CHECKING:
    import pyarrow

__all__ = ["Estimator", "Evaluator", "Model", "PredictionModel", "Predictor", "Transformer"]

M = TypeVar("M", bound="Transformer")


class Estimator(Savable, ABC, Generic[M]):
    """Fits a model to a data set."""

    def fit(self, dataset: Any, params: ParamMap | None = None) -> M:
        """Fits a model.

        Args:
            dataset: A pyarrow Table, a pandas or polars DataFrame, or the path or URL of Parquet files: a file, a folder,
                or a list of these.
            params: Values of parameters that replace those of this estimator.

        Returns:
            The model.

        Raises:
            MlError: The data set cannot be used; its class says why.
            TypeError: `params` is no param map.
        """
        source = open_source(dataset)
        return self._with(params)._fit(source)

    @abstractmethod
    def _fit(self, source: Source) -> M: ...

    def _with(self: E, params: ParamMap | None) -> E:
        return _with(self, params)


class Transformer(Savable, ABC):
    """Adds columns to a data set."""

    def transform(self, dataset: Any, params: ParamMap | None = None, *, output: str | os.PathLike[str] | None = None) -> Any:
        """Adds columns.

        Args:
            dataset: As for `Estimator.fit`.
            params: Values of parameters that replace those of this transformer.
            output: The path or URL of a Parquet file to write, batch by batch: for a result larger than memory. An
                existing file is replaced once all is written.

        Returns:
            A new object of the kind that was given: a pyarrow Table, a pandas or polars DataFrame; a pyarrow Table for
            files. With `output`, that path.

        Raises:
            MlError: The data set cannot be used; its class says why.
            TypeError: `params` is no param map.
        """
        source = open_source(dataset)
        derived = Derived(source, _with(self, params)._elements())
        if output is not None:
            from wingbeat.ml._parquet import write_file

            write_file(derived, os.fspath(output))
            return output
        return derived if isinstance(dataset, Source) else derived.result()

    def _elements(self) -> Sequence[Transformer]:
        """The transformers that this one consists of."""
        return [self]

    def _input_columns(self) -> list[str]:
        raise NotImplementedError

    def _output_columns(self) -> list[tuple[str, str]]:
        raise NotImplementedError

    def _compute(self, batch: Batch) -> dict[str, pyarrow.Array]:
        raise NotImplementedError


class Model(Transformer, ABC):
    """A transformer that an estimator has fitted."""


class Evaluator(Savable, ABC):
    """Computes a metric of predictions."""

    def evaluate(self, dataset: Any, params: ParamMap | None = None) -> float:
        """Computes the metric.

        Args:
            dataset: Labels and predictions; as for `Estimator.fit`.
            params: Values of parameters that replace those of this evaluator.

        Returns:
            The metric.

        Raises:
            MlError: The data set cannot be used; its class says why.
            TypeError: `params` is no param map.
        """
        return _with(self, params)._evaluate(open_source(dataset))

    @abstractmethod
    def _evaluate(self, source: Source) -> float: ...

    @abstractmethod
    def isLargerBetter(self) -> bool:
        """Whether a larger metric is better."""


class Predictor(Estimator[M], HasLabelCol, HasFeaturesCol, HasPredictionCol, ABC):
    """An estimator of a model that predicts labels."""


class PredictionModel(Model, HasLabelCol, HasFeaturesCol, HasPredictionCol, ABC):
    """A model that predicts labels."""

    @property
    @abstractmethod
    def numFeatures(self) -> int:
        """The number of features."""


E = TypeVar("E", bound=Estimator[Any])
P = TypeVar("P", bound=Params)


def _with(what: P, params: ParamMap | None) -> P:
    if params is None or params == {}:
        return what
    if not isinstance(params, dict):
        raise TypeError(f"params must be a param map, as in {{estimator.maxIter: 5}}; this is a {type(params).__name__}")
    return what.copy(params)
