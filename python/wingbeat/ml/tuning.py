"""Cross-validation: pyspark's `pyspark.ml.connect.tuning`, and `ParamGridBuilder` of `pyspark.ml.tuning`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any, TypeVar

from wingbeat.ml import _progress, _saving, _shards, _trials
from wingbeat.ml._derived import Filtered
from wingbeat.ml._errors import InvalidParameter, MlError, TooFewRows, TrialFailed, UnknownParameter
from wingbeat.ml._folds import NamedFold, RandomFold
from wingbeat.ml._saving import Composite, Savable
from wingbeat.ml._shared import HasLocalBytes, HasParallelism, HasSeed
from wingbeat.ml._source import Source
from wingbeat.ml._trials import Outcome, Trial
from wingbeat.ml.base import Estimator, Evaluator, Model, Transformer
from wingbeat.ml.param import Param, ParamMap, TypeConverters, at_least, keyword_only, of_parts

__all__ = ["CrossValidator", "CrossValidatorModel", "ParamGridBuilder"]

Kind = TypeVar("Kind", bound="_CrossValidatorParams")


class ParamGridBuilder:
    """Makes all combinations of values of parameters.

        maps = ParamGridBuilder().addGrid(estimator.maxIter, [5, 20]).addGrid(estimator.momentum, [0.5, 0.9]).build()
    """

    def __init__(self) -> None:
        self._grid: dict[Param[Any], list[Any]] = {}

    def addGrid(self, param: Param[Any], values: Sequence[Any]) -> ParamGridBuilder:
        """Adds a parameter.

        Args:
            param: The parameter.
            values: Its values.

        Returns:
            This builder.

        Raises:
            TypeError: `param` is no parameter.
        """
        if not isinstance(param, Param):
            raise TypeError(f"{param!r} is not a parameter: pass a Param, as in estimator.maxIter")
        self._grid[param] = list(values)
        return self

    def baseOn(self, *args: ParamMap | tuple[Param[Any], Any]) -> ParamGridBuilder:
        """Gives parameters the same value in all combinations.

        Args:
            *args: A param map, or pairs of a parameter and a value.

        Returns:
            This builder.
        """
        for one in args:
            for param, value in one.items() if isinstance(one, dict) else [one]:
                self.addGrid(param, [value])
        return self

    def build(self) -> list[ParamMap]:
        """Makes the combinations.

        Returns:
            A param map for each.
        """
        values = [[param.typeConverter(value) for value in values] for param, values in self._grid.items()]
        return [dict(zip(self._grid, chosen)) for chosen in itertools.product(*values)]


def _to_maps(value: Any) -> list[ParamMap]:
    """A list of param maps, whose values are what the parameters' type converters make of them."""
    maps = TypeConverters.toList(value)
    for one in maps:
        if not isinstance(one, dict):
            raise TypeError(f"{one!r} is not a param map, as in {{estimator.maxIter: 5}}")
        for param in one:
            if not isinstance(param, Param):
                raise TypeError(f"the key {param!r} is not a parameter: pass a Param, as in {{estimator.maxIter: 5}}")
    return [{param: None if one[param] is None else param.typeConverter(one[param]) for param in one} for one in maps]


class _CrossValidatorParams(HasSeed):
    estimator: Param[Any] = Param("undefined", "estimator", "the estimator to be cross-validated")
    estimatorParamMaps: Param[list[ParamMap]] = Param(
        "undefined", "estimatorParamMaps", "the param maps to try", _to_maps
    )
    evaluator: Param[Any] = Param("undefined", "evaluator", "computes the metric that chooses a param map")
    numFolds: Param[int] = Param("undefined", "numFolds", "number of folds (>= 2)", at_least(2, TypeConverters.toInt))
    foldCol: Param[str] = Param("undefined", "foldCol", "column with the fold of each row", TypeConverters.toString)
    collectSubModels: Param[bool] = Param(
        "undefined", "collectSubModels", "whether the models of all folds are kept", TypeConverters.toBoolean
    )
    skipFailedTrials: Param[bool] = Param(
        "undefined", "skipFailedTrials", "whether a trial may fail without ending the others", TypeConverters.toBoolean
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(numFolds=3, foldCol="", collectSubModels=False, skipFailedTrials=False)

    def getEstimator(self) -> Estimator[Any]:
        """Gets `estimator`."""
        value: Estimator[Any] = self.getOrDefault(self.estimator)
        return value

    def getEstimatorParamMaps(self) -> list[ParamMap]:
        """Gets `estimatorParamMaps`."""
        return list(self.getOrDefault(self.estimatorParamMaps))

    def getEvaluator(self) -> Evaluator:
        """Gets `evaluator`."""
        value: Evaluator = self.getOrDefault(self.evaluator)
        return value

    def getNumFolds(self) -> int:
        """Gets `numFolds`."""
        return int(self.getOrDefault(self.numFolds))

    def getFoldCol(self) -> str:
        """Gets `foldCol`."""
        return str(self.getOrDefault(self.foldCol))

    def getCollectSubModels(self) -> bool:
        """Gets `collectSubModels`."""
        return bool(self.getOrDefault(self.collectSubModels))

    def getSkipFailedTrials(self) -> bool:
        """Gets `skipFailedTrials`."""
        return bool(self.getOrDefault(self.skipFailedTrials))


class _CrossValidatorComposite(Composite, _CrossValidatorParams):
    """How a cross-validator and its model are saved and loaded."""

    def _children(self) -> list[Savable]:
        return [self.getEstimator(), self.getEvaluator()]

    def _skipped(self) -> list[str]:
        return ["estimator", "estimatorParamMaps", "evaluator"]

    def _save(self, root: str, node: list[str]) -> dict[str, Any]:
        _saving.by_uid(self.getEstimator())
        metadata = super()._save(root, node)
        metadata["estimator"] = self.getEstimator()._save(root, [*node, "crossvalidator_estimator"])
        metadata["evaluator"] = self.getEvaluator()._save(root, [*node, "crossvalidator_evaluator"])
        metadata["estimator_param_maps"] = [
            [{"parent": param.parent, "name": param.name, "value": value} for param, value in one.items()]
            for one in self.getEstimatorParamMaps()
        ]
        return metadata

    def _load(self, root: str, metadata: dict[str, Any]) -> None:
        estimator = _saving.load(metadata["estimator"], root)
        owners = _saving.by_uid(estimator)
        maps = [
            {owners[one["parent"]].getParam(one["name"]): one["value"] for one in saved}
            for saved in metadata["estimator_param_maps"]
        ]
        evaluator = _saving.load(metadata["evaluator"], root)
        self._set(estimator=estimator, evaluator=evaluator, estimatorParamMaps=maps)


class CrossValidator(Estimator["CrossValidatorModel"], HasParallelism, _CrossValidatorComposite):
    """Chooses the param map whose models have the best metric on average over folds, and fits it to all rows.

        grid = ParamGridBuilder().addGrid(classifier.learningRate, [0.001, 0.01]).build()
        validator = CrossValidator(
            estimator=classifier, evaluator=MulticlassClassificationEvaluator(), estimatorParamMaps=grid, parallelism=2
        )
        model = validator.fit(table)

    A trial fits one param map to all folds but one, and evaluates it on that one. Folds are chosen while rows are read:
    no copy of the data set is made.

    Args:
        estimator: The estimator.
        estimatorParamMaps: The param maps.
        evaluator: The evaluator.
        numFolds: How many folds.
        seed: Chooses the folds.
        parallelism: How many trials run at the same time, of all folds.
        foldCol: A column with the fold of each row, from 0; "" for random folds.
        collectSubModels: Whether the models of all folds are kept, as `subModels[fold][map]`.
        skipFailedTrials: Whether a trial may fail. Its metric is NaN then, and its param map is not chosen.
    """

    @keyword_only
    def __init__(
        self,
        *,
        estimator: Estimator[Any] | None = None,
        estimatorParamMaps: list[ParamMap] | None = None,
        evaluator: Evaluator | None = None,
        numFolds: int = 3,
        seed: int | None = None,
        parallelism: int = 1,
        foldCol: str = "",
        collectSubModels: bool = False,
        skipFailedTrials: bool = False,
    ) -> None:
        super().__init__()
        self._set(**self._input_kwargs)

    @keyword_only
    def setParams(
        self,
        *,
        estimator: Estimator[Any] | None = None,
        estimatorParamMaps: list[ParamMap] | None = None,
        evaluator: Evaluator | None = None,
        numFolds: int = 3,
        seed: int | None = None,
        parallelism: int = 1,
        foldCol: str = "",
        collectSubModels: bool = False,
        skipFailedTrials: bool = False,
    ) -> CrossValidator:
        """Sets parameters, as the constructor does."""
        return self._set(**self._input_kwargs)

    def setEstimator(self, value: Estimator[Any]) -> CrossValidator:
        """Sets `estimator`."""
        return self._set(estimator=value)

    def setEstimatorParamMaps(self, value: list[ParamMap]) -> CrossValidator:
        """Sets `estimatorParamMaps`."""
        return self._set(estimatorParamMaps=value)

    def setEvaluator(self, value: Evaluator) -> CrossValidator:
        """Sets `evaluator`."""
        return self._set(evaluator=value)

    def setNumFolds(self, value: int) -> CrossValidator:
        """Sets `numFolds`."""
        return self._set(numFolds=value)

    def setFoldCol(self, value: str) -> CrossValidator:
        """Sets `foldCol`."""
        return self._set(foldCol=value)

    def setCollectSubModels(self, value: bool) -> CrossValidator:
        """Sets `collectSubModels`."""
        return self._set(collectSubModels=value)

    def setSkipFailedTrials(self, value: bool) -> CrossValidator:
        """Sets `skipFailedTrials`."""
        return self._set(skipFailedTrials=value)

    def copy(self, extra: ParamMap | None = None) -> CrossValidator:
        """A copy with the same `uid`, of copies of its estimator and evaluator.

        Args:
            extra: Values of parameters, also of the estimator and the evaluator.

        Returns:
            The copy.
        """
        other = super().copy(extra)
        for param in (self.estimator, self.evaluator):
            if other.isSet(param):
                other._set(**{param.name: other.getOrDefault(param).copy(of_parts(extra))})
        return other

    def _fit(self, source: Source) -> CrossValidatorModel:
        estimator, evaluator, maps = self.getEstimator(), self.getEvaluator(), self.getEstimatorParamMaps()
        if not maps:
            raise InvalidParameter("CrossValidator has no estimatorParamMaps: pass [{}] for the estimator as it is")
        for number, one in enumerate(maps):
            _check_map(estimator, one, number)
        keeps, skips, parallelism = self.getCollectSubModels(), self.getSkipFailedTrials(), self.getParallelism()
        on_ranks = parallelism > 1 and _fit_on_ranks(source, [estimator, evaluator], maps)
        metric = str(evaluator.getOrDefault("metricName")) if evaluator.hasParam("metricName") else "metric"
        trials = [
            Trial(
                f"fold {fold}",
                _Run(f"fold {fold} with {_shown(one)}", estimator, evaluator, train, validation, one, keeps, on_ranks),
                _shown(one),
                lambda value: {metric: value[0]},
            )
            for fold, (train, validation) in enumerate(self._folds(source))
            for one in maps
        ]
        mode = "max" if evaluator.isLargerBetter() else "min"
        outcomes = _trials.run(trials, parallelism, stops_at_failure=not skips, metric=metric, mode=mode)
        failures = [
            _failure(trial, number // len(maps), maps[number % len(maps)], outcome.error)
            for number, (trial, outcome) in enumerate(zip(trials, outcomes))
            if outcome is not None and outcome.error is not None
        ]
        if failures and (not skips or len(failures) == len(trials)):
            raise failures[0]
        rows = [outcomes[begin : begin + len(maps)] for begin in range(0, len(outcomes), len(maps))]
        metrics = [[math.nan if one is None or one.error else float(one.value[0]) for one in row] for row in rows]
        average, deviation = _statistics(metrics)
        sign = 1 if evaluator.isLargerBetter() else -1
        candidates = [number for number in range(len(maps)) if not math.isnan(average[number])]
        if not candidates:
            raise failures[0] if failures else TrialFailed("the metric of every param map is NaN", fold=0, params={})
        best = max(candidates, key=lambda number: sign * average[number])
        model = CrossValidatorModel(estimator.fit(source, maps[best]), average, deviation)
        model.foldMetrics, model.failures = metrics, failures
        if keeps:
            model.subModels = [[_model(one) for one in row] for row in rows]
        return self._copyValues(model._resetUid(self.uid))

    def _folds(self, source: Source) -> list[tuple[Source, Source]]:
        count, column = self.getNumFolds(), self.getFoldCol()
        if column:
            source.require([column])
            # An error of the data set, and of no trial.
            for batch in source.batches([column]):
                NamedFold(0, count, column, True).chosen(batch)
            return [
                (Filtered(source, NamedFold(fold, count, column, False)), Filtered(source, NamedFold(fold, count, column, True)))
                for fold in range(count)
            ]
        if source.num_rows < count:
            raise TooFewRows(f"{source.num_rows} rows cannot make {count} folds", rows=source.num_rows, needed=count)
        seed = self.getSeed()
        outer = next((rows for rows in source.rows() if isinstance(rows, RandomFold)), None)
        insides = [RandomFold(fold, count, seed, True, outer) for fold in range(count)]
        return [(Filtered(source, dataclasses.replace(one, is_inside=False)), Filtered(source, one)) for one in insides]


class CrossValidatorModel(Model, _CrossValidatorComposite):
    """Transforms a data set by the model that was best.

    Args:
        bestModel: The model, fitted to all rows.
        avgMetrics: The mean of each param map's metric over folds.
        stdMetrics: Its standard deviation (of a population, with n, as Spark's).

    Attributes:
        bestModel: The model, fitted to all rows.
        avgMetrics: The mean of each param map's metric over folds; NaN if a trial failed.
        stdMetrics: Its standard deviation.
        foldMetrics: The metric of each fold and param map; not saved.
        failures: A `TrialFailed` for each trial that failed; not saved.
        subModels: The model of each fold and param map, None where the trial failed, if `collectSubModels` is set; not saved.
    """

    def __init__(
        self,
        bestModel: Transformer | None = None,
        avgMetrics: list[float] | None = None,
        stdMetrics: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.bestModel: Any = bestModel
        self.avgMetrics = list(avgMetrics or [])
        self.stdMetrics = list(stdMetrics or [])
        self.foldMetrics: list[list[float]] = []
        self.failures: list[TrialFailed] = []
        self.subModels: list[list[Any]] | None = None

    def copy(self, extra: ParamMap | None = None) -> CrossValidatorModel:
        """A copy with the same `uid`, of a copy of its best model.

        Args:
            extra: Values of parameters, also of the best model.

        Returns:
            The copy.
        """
        other = super().copy(extra)
        other.bestModel = self.bestModel.copy(of_parts(extra))
        other.avgMetrics, other.stdMetrics = list(self.avgMetrics), list(self.stdMetrics)
        return other

    def _elements(self) -> Sequence[Transformer]:
        elements: Sequence[Transformer] = self.bestModel._elements()
        return elements

    def _save(self, root: str, node: list[str]) -> dict[str, Any]:
        metadata = {**super()._save(root, node), "avg_metrics": self.avgMetrics, "std_metrics": self.stdMetrics}
        metadata["best_model"] = self.bestModel._save(root, [*node, "crossvalidator_best_model"])
        return metadata

    def _load(self, root: str, metadata: dict[str, Any]) -> None:
        super()._load(root, metadata)
        self.avgMetrics, self.stdMetrics = list(metadata["avg_metrics"]), list(metadata["std_metrics"])
        self.bestModel = _saving.load(metadata["best_model"], root)


class _Run:
    """A trial: fits a param map to some rows, and evaluates it on others. Returns the metric, and the model if it is kept."""

    def __init__(
        self,
        name: str,
        estimator: Estimator[Any],
        evaluator: Evaluator,
        train: Source,
        validation: Source,
        params: ParamMap,
        keeps: bool,
        is_on_rank: bool,
    ) -> None:
        self._name, self._estimator, self._evaluator = name, estimator, evaluator
        self._train, self._validation = train, validation
        self._params, self._keeps, self._is_on_rank = params, keeps, is_on_rank

    def __call__(self) -> tuple[float, Any]:
        if self._is_on_rank:
            value: tuple[float, Any] = _shards.on_ranks(self.fitted_or_error, (), 1)
            return value
        return self.fitted()

    def fitted_or_error(self) -> tuple[float, Any] | MlError:
        try:
            return self.fitted()
        except MlError as error:
            return error

    def fitted(self) -> tuple[float, Any]:
        with _progress.of_trial(self._name):
            model = self._estimator.fit(self._train, self._params)
            metric = self._evaluator.evaluate(model.transform(self._validation, self._params))
        return metric, model if self._keeps else None


def _fit_on_ranks(source: Source, objects: Sequence[Savable], maps: Sequence[ParamMap]) -> bool:
    """Whether each trial runs on a rank of its own: a CPU of the cluster, if there is one, and not a thread beside others of
    this process.

    Not if it starts ranks itself, for which it would wait with others that do. Of classes that are not of `wingbeat.ml`, that is
    not known, nor whether they need what this process has.
    """
    if not os.environ.get("WINGBEAT_ADDRESS"):
        return False
    nbytes = source.nbytes(source.column_names)
    for params in maps:
        for one in objects:
            for part in _saving.by_uid(one.copy(params)).values():
                if not type(part).__module__.startswith("wingbeat.ml.") or isinstance(part, CrossValidator):
                    return False
                if isinstance(part, HasLocalBytes) and part.getLocalBytes() < nbytes:
                    return False
                if part.hasParam("useGpu") and part.getOrDefault("useGpu"):
                    return False
    return True


def _check_map(estimator: Estimator[Any], params: ParamMap, number: int) -> None:
    """Checks that each parameter of a map is one of the estimator or of its parts: others would have no effect."""
    parts = _saving.by_uid(estimator.copy(params))
    for param in params:
        if param.parent not in parts or not parts[param.parent].hasParam(param.name):
            raise UnknownParameter(
                f"estimatorParamMaps[{number}] has the parameter {param}, which is not one of {estimator.uid} or its parts "
                f"({', '.join(parts)}): use the parameters of the objects that the estimator was made of",
                nearest=None,
            )


def _statistics(metrics: list[list[float]]) -> tuple[list[float], list[float]]:
    import numpy

    return numpy.mean(metrics, axis=0).tolist(), numpy.std(metrics, axis=0).tolist()


def _shown(params: ParamMap) -> str:
    return ", ".join(f"{param.name}={value!r}" for param, value in params.items()) or "the estimator's own parameters"


def _failure(trial: Trial, fold: int, params: ParamMap, error: Exception) -> TrialFailed:
    name = f"{trial.trial_id} with {trial.parameters}"
    named = {param.name: value for param, value in params.items()}
    failed = TrialFailed(f"the trial of {name} failed: {type(error).__name__}: {error}", fold=fold, params=named)
    failed.__cause__ = error
    return failed


def _model(outcome: Outcome | None) -> Any:
    return None if outcome is None or outcome.error is not None else outcome.value[1]
