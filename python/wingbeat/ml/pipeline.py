"""Pipelines of transformers and estimators: pyspark's `pyspark.ml.connect.pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wingbeat.ml import _saving
from wingbeat.ml._derived import Derived
from wingbeat.ml._saving import Composite, Savable
from wingbeat.ml._source import Source
from wingbeat.ml.base import Estimator, Model, Transformer
from wingbeat.ml.param import Param, ParamMap, keyword_only, of_parts

__all__ = ["Pipeline", "PipelineModel"]


class Pipeline(Estimator["PipelineModel"], Composite):
    """Fits its estimators one after the other, each to what the stages before it make of the data set.

        pipeline = Pipeline(stages=[scaler, classifier])
        predicted = pipeline.fit(table).transform(table)

    What stages make is computed while it is read, and is never held as a whole: also a pipeline fits to files that are
    larger than memory.

    Args:
        stages: Estimators and transformers. With an empty list, the model changes nothing.
    """

    stages: Param[list[Any]] = Param("undefined", "stages", "estimators and transformers")

    @keyword_only
    def __init__(self, *, stages: list[Any] | None = None) -> None:
        super().__init__()
        self._set(**self._input_kwargs)

    @keyword_only
    def setParams(self, *, stages: list[Any] | None = None) -> Pipeline:
        """Sets parameters, as the constructor does."""
        return self._set(**self._input_kwargs)

    def getStages(self) -> list[Any]:
        """Gets `stages`."""
        return list(self.getOrDefault(self.stages) or [])

    def setStages(self, value: list[Any]) -> Pipeline:
        """Sets `stages`."""
        return self._set(stages=value)

    def copy(self, extra: ParamMap | None = None) -> Pipeline:
        """A copy with the same `uid`, of copies of its stages.

        Args:
            extra: Values of parameters, also of stages.

        Returns:
            The copy.
        """
        other = super().copy(extra)
        return other.setStages([stage.copy(of_parts(extra)) for stage in other.getStages()])

    def _fit(self, source: Source) -> PipelineModel:
        stages = self.getStages()
        for stage in stages:
            if not isinstance(stage, (Estimator, Transformer)):
                raise TypeError(f"a stage of a pipeline is an estimator or a transformer, and not a {type(stage).__name__}")
        last = max((number for number, stage in enumerate(stages) if isinstance(stage, Estimator)), default=-1)
        fitted: list[Transformer] = []
        for number, stage in enumerate(stages):
            model = stage.fit(source) if isinstance(stage, Estimator) else stage
            fitted.append(model)
            if number < last:  # nothing reads what is after the last estimator
                source = Derived(source, model._elements())
        return PipelineModel(fitted)._resetUid(self.uid)

    def _children(self) -> list[Savable]:
        return self.getStages()

    def _skipped(self) -> list[str]:
        return ["stages"]

    def _save(self, root: str, node: list[str]) -> dict[str, Any]:
        return {**super()._save(root, node), "stages": _save_stages(self.getStages(), root, node)}

    def _load(self, root: str, metadata: dict[str, Any]) -> None:
        self.setStages([_saving.load(stage, root) for stage in metadata["stages"]])


class PipelineModel(Model, Composite):
    """Transforms a data set by its stages, one after the other.

    Args:
        stages: Transformers.

    Attributes:
        stages: The transformers.
    """

    def __init__(self, stages: list[Transformer] | None = None) -> None:
        super().__init__()
        self.stages: list[Transformer] = list(stages or [])

    def copy(self, extra: ParamMap | None = None) -> PipelineModel:
        """A copy with the same `uid`, of copies of its stages.

        Args:
            extra: Values of parameters, also of stages.

        Returns:
            The copy.
        """
        other = super().copy(extra)
        other.stages = [stage.copy(of_parts(extra)) for stage in self.stages]
        return other

    def _elements(self) -> Sequence[Transformer]:
        return [element for stage in self.stages for element in stage._elements()]

    def _children(self) -> list[Savable]:
        return list(self.stages)

    def _save(self, root: str, node: list[str]) -> dict[str, Any]:
        return {**super()._save(root, node), "stages": _save_stages(self.stages, root, node)}

    def _load(self, root: str, metadata: dict[str, Any]) -> None:
        stages = [_saving.load(stage, root) for stage in metadata["stages"]]
        self.stages = [stage for stage in stages if isinstance(stage, Transformer)]


def _save_stages(stages: Sequence[Savable], root: str, node: list[str]) -> list[dict[str, Any]]:
    return [stage._save(root, [*node, f"pipeline_stage_{number}"]) for number, stage in enumerate(stages)]
