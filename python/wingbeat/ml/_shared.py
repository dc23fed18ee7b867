"""Parameters that several classes have: pyspark's `pyspark.ml.param.shared`.

`localBytes` and `numWorkers` are Wingbeat's own.
"""

from __future__ import annotations

import math
import zlib
from typing import TypeVar

from wingbeat.ml import _shards
from wingbeat.ml.param import Param, Params, TypeConverters, at_least

Owner = TypeVar("Owner", bound=Params)

class HasFeaturesCol(Params):
    """Has the parameter `featuresCol`: column of feature arrays."""

    featuresCol: Param[str] = Param("undefined", "featuresCol", "column of feature arrays", TypeConverters.toString)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(featuresCol="features")

    def getFeaturesCol(self) -> str:
        """Gets `featuresCol`."""
        value: str = self.getOrDefault(self.featuresCol)
        return value

    def setFeaturesCol(self: Owner, value: str) -> Owner:
        """Sets `featuresCol`."""
        return self._set(featuresCol=value)


class HasLabelCol(Params):
    """Has the parameter `labelCol`: column of labels."""

    labelCol: Param[str] = Param("undefined", "labelCol", "column of labels", TypeConverters.toString)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(labelCol="label")

    def getLabelCol(self) -> str:
        """Gets `labelCol`."""
        value: str = self.getOrDefault(self.labelCol)
        return value

    def setLabelCol(self: Owner, value: str) -> Owner:
        """Sets `labelCol`."""
        return self._set(labelCol=value)


class HasPredictionCol(Params):
    """Has the parameter `predictionCol`: column of predictions."""

    predictionCol: Param[str] = Param("undefined", "predictionCol", "column of predictions", TypeConverters.toString)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(predictionCol="prediction")

    def getPredictionCol(self) -> str:
        """Gets `predictionCol`."""
        value: str = self.getOrDefault(self.predictionCol)
        return value

    def setPredictionCol(self: Owner, value: str) -> Owner:
        """Sets `predictionCol`."""
        return self._set(predictionCol=value)


class HasProbabilityCol(Params):
    """Has the parameter `probabilityCol`: column of the probabilities of all classes."""

    probabilityCol: Param[str] = Param(
        "undefined", "probabilityCol", "column of the probabilities of all classes", TypeConverters.toString
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(probabilityCol="probability")

    def getProbabilityCol(self) -> str:
        """Gets `probabilityCol`."""
        value: str = self.getOrDefault(self.probabilityCol)
        return value

    def setProbabilityCol(self: Owner, value: str) -> Owner:
        """Sets `probabilityCol`."""
        return self._set(probabilityCol=value)


class HasWeightCol(Params):
    """Has the parameter `weightCol`: column of row weights; without it, every row has weight 1."""

    weightCol: Param[str] = Param(
        "undefined", "weightCol", "column of row weights; without it, every row has weight 1", TypeConverters.toString
    )

    def getWeightCol(self) -> str:
        """Gets `weightCol`."""
        value: str = self.getOrDefault(self.weightCol)
        return value

    def setWeightCol(self: Owner, value: str) -> Owner:
        """Sets `weightCol`."""
        return self._set(weightCol=value)


class HasInputCol(Params):
    """Has the parameter `inputCol`: input column."""

    inputCol: Param[str] = Param("undefined", "inputCol", "input column", TypeConverters.toString)

    def getInputCol(self) -> str:
        """Gets `inputCol`."""
        value: str = self.getOrDefault(self.inputCol)
        return value

    def setInputCol(self: Owner, value: str) -> Owner:
        """Sets `inputCol`."""
        return self._set(inputCol=value)


class HasInputCols(Params):
    """Has the parameter `inputCols`: input columns."""

    inputCols: Param[list[str]] = Param("undefined", "inputCols", "input columns", TypeConverters.toListString)

    def getInputCols(self) -> list[str]:
        """Gets `inputCols`."""
        value: list[str] = self.getOrDefault(self.inputCols)
        return value

    def setInputCols(self: Owner, value: list[str]) -> Owner:
        """Sets `inputCols`."""
        return self._set(inputCols=value)


class HasOutputCol(Params):
    """Has the parameter `outputCol`: output column."""

    outputCol: Param[str] = Param("undefined", "outputCol", "output column", TypeConverters.toString)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(outputCol=f"{self.uid}__output")

    def getOutputCol(self) -> str:
        """Gets `outputCol`."""
        value: str = self.getOrDefault(self.outputCol)
        return value

    def setOutputCol(self: Owner, value: str) -> Owner:
        """Sets `outputCol`."""
        return self._set(outputCol=value)


class HasFeatureSizes(Params):
    """Has the parameter `featureSizes`: number of features of each input column."""

    featureSizes: Param[list[int]] = Param(
        "undefined", "featureSizes", "number of features of each input column", TypeConverters.toListInt
    )

    def getFeatureSizes(self) -> list[int]:
        """Gets `featureSizes`."""
        value: list[int] = self.getOrDefault(self.featureSizes)
        return value

    def setFeatureSizes(self: Owner, value: list[int]) -> Owner:
        """Sets `featureSizes`."""
        return self._set(featureSizes=value)


class HasMaxIter(Params):
    """Has the parameter `maxIter`: largest number of epochs (>= 0)."""

    maxIter: Param[int] = Param("undefined", "maxIter", "largest number of epochs (>= 0)", at_least(0, TypeConverters.toInt))

    def getMaxIter(self) -> int:
        """Gets `maxIter`."""
        value: int = self.getOrDefault(self.maxIter)
        return value

    def setMaxIter(self: Owner, value: int) -> Owner:
        """Sets `maxIter`."""
        return self._set(maxIter=value)


class HasTol(Params):
    """Has the parameter `tol`: training stops where the loss changes less twice running (>= 0)."""

    tol: Param[float] = Param(
        "undefined", "tol", "training stops where the loss changes less twice running (>= 0)", at_least(0, TypeConverters.toFloat)
    )

    def getTol(self) -> float:
        """Gets `tol`."""
        value: float = self.getOrDefault(self.tol)
        return value

    def setTol(self: Owner, value: float) -> Owner:
        """Sets `tol`."""
        return self._set(tol=value)


class HasFitIntercept(Params):
    """Has the parameter `fitIntercept`: whether the model has an intercept."""

    fitIntercept: Param[bool] = Param(
        "undefined", "fitIntercept", "whether the model has an intercept", TypeConverters.toBoolean
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(fitIntercept=True)

    def getFitIntercept(self) -> bool:
        """Gets `fitIntercept`."""
        value: bool = self.getOrDefault(self.fitIntercept)
        return value

    def setFitIntercept(self: Owner, value: bool) -> Owner:
        """Sets `fitIntercept`."""
        return self._set(fitIntercept=value)


class HasNumTrainWorkers(Params):
    """Has the parameter `numTrainWorkers`: number of ranks that train (>= 1)."""

    numTrainWorkers: Param[int] = Param(
        "undefined", "numTrainWorkers", "number of ranks that train (>= 1)", at_least(1, TypeConverters.toInt)
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(numTrainWorkers=1)

    def getNumTrainWorkers(self) -> int:
        """Gets `numTrainWorkers`."""
        value: int = self.getOrDefault(self.numTrainWorkers)
        return value

    def setNumTrainWorkers(self: Owner, value: int) -> Owner:
        """Sets `numTrainWorkers`."""
        return self._set(numTrainWorkers=value)


class HasBatchSize(Params):
    """Has the parameter `batchSize`: rows of a batch, of all ranks together (>= 1)."""

    batchSize: Param[int] = Param(
        "undefined", "batchSize", "rows of a batch, of all ranks together (>= 1)", at_least(1, TypeConverters.toInt)
    )

    def getBatchSize(self) -> int:
        """Gets `batchSize`."""
        value: int = self.getOrDefault(self.batchSize)
        return value

    def setBatchSize(self: Owner, value: int) -> Owner:
        """Sets `batchSize`."""
        return self._set(batchSize=value)


class HasLearningRate(Params):
    """Has the parameter `learningRate`: learning rate (> 0)."""

    learningRate: Param[float] = Param(
        "undefined", "learningRate", "learning rate (> 0)", at_least(0, TypeConverters.toFloat, below=math.inf, is_open=True)
    )

    def getLearningRate(self) -> float:
        """Gets `learningRate`."""
        value: float = self.getOrDefault(self.learningRate)
        return value

    def setLearningRate(self: Owner, value: float) -> Owner:
        """Sets `learningRate`."""
        return self._set(learningRate=value)


class HasMomentum(Params):
    """Has the parameter `momentum`: momentum (>= 0, < 1)."""

    momentum: Param[float] = Param(
        "undefined", "momentum", "momentum (>= 0, < 1)", at_least(0, TypeConverters.toFloat, below=1)
    )

    def getMomentum(self) -> float:
        """Gets `momentum`."""
        value: float = self.getOrDefault(self.momentum)
        return value

    def setMomentum(self: Owner, value: float) -> Owner:
        """Sets `momentum`."""
        return self._set(momentum=value)


class HasSeed(Params):
    """Has the parameter `seed`: random seed."""

    seed: Param[int] = Param("undefined", "seed", "random seed", TypeConverters.toInt)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(seed=zlib.crc32(type(self).__name__.encode()))

    def getSeed(self) -> int:
        """Gets `seed`."""
        value: int = self.getOrDefault(self.seed)
        return value

    def setSeed(self: Owner, value: int) -> Owner:
        """Sets `seed`."""
        return self._set(seed=value)


class HasParallelism(Params):
    """Has the parameter `parallelism`: number of trials that run together (>= 1)."""

    parallelism: Param[int] = Param(
        "undefined", "parallelism", "number of trials that run together (>= 1)", at_least(1, TypeConverters.toInt)
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(parallelism=1)

    def getParallelism(self) -> int:
        """Gets `parallelism`."""
        value: int = self.getOrDefault(self.parallelism)
        return value

    def setParallelism(self: Owner, value: int) -> Owner:
        """Sets `parallelism`."""
        return self._set(parallelism=value)


class HasLocalBytes(Params):
    """Has the parameter `localBytes`: data sets of up to this size are read here (>= 0)."""

    localBytes: Param[int] = Param(
        "undefined", "localBytes", "data sets of up to this size are read here (>= 0)", at_least(0, TypeConverters.toInt)
    )

    def getLocalBytes(self) -> int:
        """Gets `localBytes`."""
        value: int = self.getOrDefault(self.localBytes)
        return value

    def setLocalBytes(self: Owner, value: int) -> Owner:
        """Sets `localBytes`."""
        return self._set(localBytes=value)


class HasNumWorkers(Params):
    """Has the parameter `numWorkers`: number of ranks that read larger data sets (>= 1)."""

    numWorkers: Param[int] = Param(
        "undefined", "numWorkers", "number of ranks that read larger data sets (>= 1)", at_least(1, TypeConverters.toInt)
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(numWorkers=min(_shards.local_cpus(), 8))

    def getNumWorkers(self) -> int:
        """Gets `numWorkers`."""
        value: int = self.getOrDefault(self.numWorkers)
        return value

    def setNumWorkers(self: Owner, value: int) -> Owner:
        """Sets `numWorkers`."""
        return self._set(numWorkers=value)

    def _workers(self) -> int | None:
        """What a program has set; None for what is usual, which a cluster may say."""
        return self.getNumWorkers() if self.isSet(self.numWorkers) else None
