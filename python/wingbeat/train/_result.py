"""What came of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wingbeat.train._checkpoint import Checkpoint

if TYPE_CHECKING:
    import pandas


class TrainingFailedError(RuntimeError):
    """A training run failed. The text says why."""

    __module__ = "wingbeat.train"


class WorkerTrainingFailedError(TrainingFailedError):
    """A rank failed, and with it the run. The original exception is the cause.

    Attributes:
        worker_failures: The exception of the rank that failed first, by its rank.
    """

    __module__ = "wingbeat.train"

    def __init__(self, message: str, worker_failures: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.worker_failures = worker_failures

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.worker_failures)


@dataclass(frozen=True)
class Result:
    """What came of a run that succeeded. A run that failed raises instead.

    Attributes:
        metrics: The last metrics that rank 0 reported in the last attempt, as floats; those of the newest checkpoint if it
            reported none then. Empty if there are neither.
        checkpoint: The newest checkpoint; None if there is none.
        path: The run's folder: an absolute path or a URL.
        error: Always None: `fit` raises.
        best_checkpoints: The checkpoints that were kept, in the order of their reports, each with the metrics of its
            report.
    """

    metrics: dict[str, float]
    checkpoint: Checkpoint | None
    path: str
    error: TrainingFailedError | None = None
    best_checkpoints: list[tuple[Checkpoint, dict[str, float]]] = field(default_factory=list)

    @property
    def metrics_dataframe(self) -> pandas.DataFrame | None:
        """The metrics of the checkpoints that were kept, as a pandas DataFrame; None if there are none.

        All metrics that were reported are in `metrics.jsonl` in `path`.

        Raises:
            ImportError: pandas is not installed.
        """
        if not self.best_checkpoints:
            return None
        import pandas

        return pandas.DataFrame([metrics for _, metrics in self.best_checkpoints])

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint | None:
        """The best of the checkpoints that were kept.

        Args:
            metric: The metric to compare.
            mode: "max" if more is better, or "min".

        Returns:
            The checkpoint; None if there is none with this metric.

        Raises:
            ValueError: The mode is neither.
        """
        if mode not in ("max", "min"):
            raise ValueError(f'mode must be "max" or "min", not {mode!r}')
        of = [(metrics[metric], number) for number, (_, metrics) in enumerate(self.best_checkpoints) if metric in metrics]
        of = [(value, number) for value, number in of if value == value]  # NaN is never the best
        if not of:
            return None
        best = max(of) if mode == "max" else min(of, key=lambda one: (one[0], -one[1]))
        return self.best_checkpoints[best[1]][0]
