"""Logistic regression: pyspark's `pyspark.ml.connect.classification`."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from wingbeat.ml import _columns, _examples, _progress, _sgd, _shards, _torch_file
from wingbeat.ml._errors import InvalidParameter, MlError
from wingbeat.ml._saving import CoreModel
from wingbeat.ml._shared import (
    HasBatchSize,
    HasFitIntercept,
    HasLearningRate,
    HasLocalBytes,
    HasMaxIter,
    HasMomentum,
    HasNumTrainWorkers,
    HasProbabilityCol,
    HasSeed,
    HasTol,
    HasWeightCol,
)
from wingbeat.ml._source import Batch, Source
from wingbeat.ml.base import PredictionModel, Predictor
from wingbeat.ml.param import Param, TypeConverters, keyword_only

if TYPE_CHECKING:
    import numpy
    import pyarrow
    import torch

__all__ = ["LogisticRegression", "LogisticRegressionModel"]

# Data sets of up to this size are trained on in this process: ranks would wait for each other longer than they compute.
LOCAL_BYTES = 64 << 20


class _LogisticRegressionParams(
    HasMaxIter,
    HasFitIntercept,
    HasTol,
    HasWeightCol,
    HasNumTrainWorkers,
    HasBatchSize,
    HasLearningRate,
    HasMomentum,
    HasProbabilityCol,
    HasSeed,
    HasLocalBytes,
):
    useGpu: Param[bool] = Param("undefined", "useGpu", "whether ranks train on GPUs", TypeConverters.toBoolean)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            maxIter=100,
            tol=1e-6,
            batchSize=32,
            learningRate=0.001,
            momentum=0.9,
            seed=0,
            localBytes=LOCAL_BYTES,
            useGpu=None,
        )

    def getUseGpu(self) -> bool | None:
        """Gets `useGpu`."""
        value: bool | None = self.getOrDefault(self.useGpu)
        return value


class LogisticRegression(Predictor["LogisticRegressionModel"], _LogisticRegressionParams):
    """Multinomial logistic regression, trained by stochastic gradient descent with momentum.

        estimator = LogisticRegression(maxIter=20, learningRate=0.01, numTrainWorkers=2)
        model = estimator.fit(table)
        predicted = model.transform(table)

    A batch is the same rows for the same seed, whatever the number of ranks: so is the model, within rounding. That is
    why `batchSize` counts the rows of all ranks together, and not those of each.

    Args:
        featuresCol: The column of arrays.
        labelCol: The column of labels, which are 0, 1, 2 and so on.
        predictionCol: The column that the model writes its predictions to.
        probabilityCol: The column that it writes the probabilities of all classes to; "" for none.
        maxIter: The largest number of epochs.
        tol: Training stops once the mean loss changes by less in two epochs in a row.
        numTrainWorkers: How many ranks train, if there are more than `localBytes` of data.
        batchSize: The rows of a batch, of all ranks together.
        learningRate: The learning rate.
        momentum: The momentum.
        seed: Chooses the order of the rows, and the parameters to start from.
        fitIntercept: Whether the model has an intercept.
        weightCol: The column of row weights. They are scaled so that their mean is 1.
        localBytes: Data sets of up to so many bytes are trained on in this process, without ranks.
        useGpu: Whether ranks train on GPUs, one each. None uses them if this machine has as many, and no cluster is named.
    """

    @keyword_only
    def __init__(
        self,
        *,
        featuresCol: str = "features",
        labelCol: str = "label",
        predictionCol: str = "prediction",
        probabilityCol: str = "probability",
        maxIter: int = 100,
        tol: float = 1e-6,
        numTrainWorkers: int = 1,
        batchSize: int = 32,
        learningRate: float = 0.001,
        momentum: float = 0.9,
        seed: int = 0,
        fitIntercept: bool = True,
        weightCol: str | None = None,
        localBytes: int = LOCAL_BYTES,
        useGpu: bool | None = None,
    ) -> None:
        super().__init__()
        self._set(**self._input_kwargs)

    def setUseGpu(self, value: bool | None) -> LogisticRegression:
        """Sets `useGpu`."""
        return self._set(useGpu=value)

    def _fit(self, source: Source) -> LogisticRegressionModel:
        weight = self.getWeightCol() if self.isDefined(self.weightCol) else None
        columns = _examples.Columns(self.getFeaturesCol(), self.getLabelCol(), weight or None)
        source.require(columns.names)
        settings = _sgd.Settings(
            columns,
            max_iter=self.getMaxIter(),
            tol=self.getTol(),
            batch_size=self.getBatchSize(),
            learning_rate=self.getLearningRate(),
            momentum=self.getMomentum(),
            fit_intercept=self.getFitIntercept(),
            seed=self.getSeed(),
            ranks=self.getNumTrainWorkers(),
            name=_progress.name_of(type(self).__name__),
        )
        fitted = self._train(source, settings)
        classes, features = fitted.weight.shape
        model = LogisticRegressionModel(_torch_file.layer(fitted.weight, fitted.bias), features, classes)
        model.objectiveHistory = fitted.losses
        return self._copyValues(model._resetUid(self.uid))

    def _train(self, source: Source, settings: _sgd.Settings) -> _sgd.Fitted:
        is_alone = settings.ranks == 1 and not os.environ.get("WINGBEAT_ADDRESS")
        if source.nbytes(settings.columns.names) <= self.getLocalBytes() or is_alone:
            return _sgd.fit_here(source, settings, self._device())
        on_ranks = functools.partial(_shards.on_ranks, parameter="numTrainWorkers", use_gpu=self._uses_gpus(settings.ranks))
        if source.is_in_files:
            sent = (source, source.split(settings.ranks), settings)
            fitted: _sgd.Fitted = on_ranks(_sgd.fit_rank, sent, settings.ranks)
            return fitted
        # What is wrong with a table is known before any rank starts.
        if source.nbytes(settings.columns.names) <= _examples.MEMORY_BYTES:
            examples = _examples.Examples(source, settings.columns, 0, None, settings.fit_intercept)
            examples.facts.classes(settings.columns, settings.ranks)
            if examples.is_in_memory:  # small integers take more as float32
                fitted = on_ranks(_sgd.fit_rows, (examples, settings), settings.ranks)
                return fitted
        else:
            _examples.check(source, settings.columns).classes(settings.columns, settings.ranks)
        table = source.table(settings.columns.names)
        args = (None, [(0, 0)] * settings.ranks, settings)
        fitted = on_ranks(_sgd.fit_rank, args, settings.ranks, table=table)
        return fitted

    def _device(self) -> str:
        """What this process trains on. So little is trained on faster by CPUs, unless somebody knows better."""
        if not self.getUseGpu():
            return "cpu"
        import torch

        if not torch.cuda.is_available():
            raise InvalidParameter("useGpu=True, and torch finds no GPU for this process: leave useGpu out to train on CPUs")
        return "cuda"

    def _uses_gpus(self, ranks: int) -> bool:
        from wingbeat.torch import local_gpus

        chosen = self.getUseGpu()
        if chosen is None:
            return not os.environ.get("WINGBEAT_ADDRESS") and local_gpus() >= ranks
        return chosen


class LogisticRegressionModel(PredictionModel, _LogisticRegressionParams, CoreModel):
    """A logistic regression that predicts the class of each row, and the probabilities of all classes.

    Args:
        torch_model: A `torch.nn.Linear` from features to classes.
        num_features: The number of features.
        num_classes: The number of classes.

    Attributes:
        torch_model: The linear layer.
        objectiveHistory: The mean loss of each epoch; empty for a model that was loaded.
    """

    _suffix = ".torch"

    def __init__(
        self, torch_model: torch.nn.Linear | None = None, num_features: int | None = None, num_classes: int | None = None
    ) -> None:
        super().__init__()
        self.torch_model: Any = torch_model
        self.num_features = num_features
        self.num_classes = num_classes
        self.objectiveHistory: list[float] = []

    @property
    def numFeatures(self) -> int:
        """The number of features."""
        return -1 if self.num_features is None else self.num_features

    @property
    def numClasses(self) -> int:
        """The number of classes."""
        return -1 if self.num_classes is None else self.num_classes

    @property
    def coefficientMatrix(self) -> numpy.ndarray[Any, Any]:
        """A row of coefficients for each class."""
        matrix: numpy.ndarray[Any, Any] = self.torch_model.weight.detach().numpy()
        return matrix

    @property
    def interceptVector(self) -> numpy.ndarray[Any, Any]:
        """The intercept of each class: 0 for a model without."""
        import numpy

        bias = self.torch_model.bias
        return numpy.zeros(self.numClasses, dtype=numpy.float32) if bias is None else bias.detach().numpy()

    def _input_columns(self) -> list[str]:
        return [self.getFeaturesCol()]

    def _output_columns(self) -> list[tuple[str, str]]:
        columns = [(self.getPredictionCol(), "bigint")]
        return columns + ([(self.getProbabilityCol(), "array<double>")] if self.getProbabilityCol() else [])

    def _compute(self, batch: Batch) -> dict[str, pyarrow.Array]:
        import numpy
        import pyarrow

        rows = _columns.features(batch, self.getFeaturesCol(), self.numFeatures)
        outputs = rows @ self.coefficientMatrix.T.astype(numpy.float64) + self.interceptVector
        made = {self.getPredictionCol(): pyarrow.array(outputs.argmax(axis=1).astype(numpy.int64))}
        if self.getProbabilityCol():
            odds = numpy.exp(outputs - outputs.max(axis=1, keepdims=True))
            made[self.getProbabilityCol()] = _columns.array_column(odds / odds.sum(axis=1, keepdims=True))
        return made

    def _extra(self) -> dict[str, Any]:
        return {"num_features": self.num_features, "num_classes": self.num_classes}

    def _weights(self) -> dict[str, numpy.ndarray[Any, Any]]:
        state = self.torch_model.state_dict()
        return {name: state[name].numpy() for name in state}

    def _take(self, weights: dict[str, numpy.ndarray[Any, Any]], extra: dict[str, Any]) -> None:
        weight, bias = weights["weight"], weights.get("bias")
        shape = (extra["num_classes"], extra["num_features"])
        if weight.shape != shape or (bias is not None and bias.shape != shape[:1]):
            found = f"{weight.shape}" if bias is None else f"{weight.shape} and {bias.shape}"
            raise MlError(f"its weights have the shapes {found}, and the metadata says {shape[0]} classes of {shape[1]} features")
        self.torch_model = _torch_file.layer(weight, bias)
        self.num_classes, self.num_features = shape

    def _write_spark(self, path: str) -> None:
        _torch_file.write(path, self.torch_model)

    def _read_spark(self, path: str) -> dict[str, numpy.ndarray[Any, Any]]:
        return _torch_file.read(path)
