"""Estimators that are trained and evaluated on ranks: the interface of `pyspark.ml.connect`, without Spark.

    from wingbeat.ml.classification import LogisticRegression
    from wingbeat.ml.evaluation import MulticlassClassificationEvaluator
    from wingbeat.ml.feature import StandardScaler
    from wingbeat.ml.pipeline import Pipeline

    scaler = StandardScaler(inputCol="features", outputCol="scaled")
    classifier = LogisticRegression(featuresCol="scaled", learningRate=0.01, numTrainWorkers=2)
    model = Pipeline(stages=[scaler, classifier]).fit("train.parquet")
    print(MulticlassClassificationEvaluator().evaluate(model.transform("test.parquet")))

Data sets are pyarrow Tables, pandas or polars DataFrames, or paths and URLs of Parquet files, which may be larger than
memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wingbeat import _lazy

if TYPE_CHECKING:
    from wingbeat.ml import base as base
    from wingbeat.ml import classification as classification
    from wingbeat.ml import evaluation as evaluation
    from wingbeat.ml import feature as feature
    from wingbeat.ml import param as param
    from wingbeat.ml import pipeline as pipeline
    from wingbeat.ml import summarizer as summarizer
    from wingbeat.ml import tuning as tuning
    from wingbeat.ml._errors import DatasetError as DatasetError
    from wingbeat.ml._errors import EmptyDataset as EmptyDataset
    from wingbeat.ml._errors import ExistingColumn as ExistingColumn
    from wingbeat.ml._errors import InvalidFeatures as InvalidFeatures
    from wingbeat.ml._errors import InvalidFolds as InvalidFolds
    from wingbeat.ml._errors import InvalidLabels as InvalidLabels
    from wingbeat.ml._errors import InvalidParameter as InvalidParameter
    from wingbeat.ml._errors import InvalidWeights as InvalidWeights
    from wingbeat.ml._errors import MissingColumn as MissingColumn
    from wingbeat.ml._errors import MlError as MlError
    from wingbeat.ml._errors import OneClass as OneClass
    from wingbeat.ml._errors import SchemaMismatch as SchemaMismatch
    from wingbeat.ml._errors import TooFewRows as TooFewRows
    from wingbeat.ml._errors import TooManyRanks as TooManyRanks
    from wingbeat.ml._errors import TrainingDiverged as TrainingDiverged
    from wingbeat.ml._errors import TrialFailed as TrialFailed
    from wingbeat.ml._errors import UnknownParameter as UnknownParameter
    from wingbeat.ml._errors import UnreadableFile as UnreadableFile
    from wingbeat.ml._errors import UnsupportedDataset as UnsupportedDataset
    from wingbeat.ml.base import Estimator as Estimator
    from wingbeat.ml.base import Evaluator as Evaluator
    from wingbeat.ml.base import Model as Model
    from wingbeat.ml.base import Transformer as Transformer
    from wingbeat.ml.pipeline import Pipeline as Pipeline
    from wingbeat.ml.pipeline import PipelineModel as PipelineModel

_ERRORS = [
    "DatasetError",
    "EmptyDataset",
    "ExistingColumn",
    "InvalidFeatures",
    "InvalidFolds",
    "InvalidLabels",
    "InvalidParameter",
    "InvalidWeights",
    "MissingColumn",
    "MlError",
    "OneClass",
    "SchemaMismatch",
    "TooFewRows",
    "TooManyRanks",
    "TrainingDiverged",
    "TrialFailed",
    "UnknownParameter",
    "UnreadableFile",
    "UnsupportedDataset",
]
_BASES = ["Estimator", "Evaluator", "Model", "Transformer"]
_PIPELINES = ["Pipeline", "PipelineModel"]
_MODULES = ["base", "classification", "evaluation", "feature", "param", "pipeline", "summarizer", "tuning"]

__all__ = [*_ERRORS, *_BASES, *_PIPELINES, *_MODULES]  # noqa: PLE0604

_HOMES = {
    **{name: "wingbeat.ml._errors" for name in _ERRORS},
    **{name: "wingbeat.ml.base" for name in _BASES},
    **{name: "wingbeat.ml.pipeline" for name in _PIPELINES},
    **{name: f"wingbeat.ml.{name}" for name in _MODULES},
}

if not TYPE_CHECKING:
    __getattr__ = _lazy.names_of(__name__, _HOMES)
