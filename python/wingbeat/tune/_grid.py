"""What came of all trials."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wingbeat._trials._trial import is_number
from wingbeat.train._result import Result as _Result
from wingbeat.tune import _space
from wingbeat.tune._trial import TrialError

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Result(_Result):
    """What came of a trial.

    Attributes:
        config: Its parameters.
        trial_id: Its name.
        reports: The metrics of each of its reports, with `training_iteration` and `time_total_s`.
        was_stopped: Whether it was ended before it had come to its end.
    """

    config: dict[str, Any] = field(default_factory=dict)
    trial_id: str = ""
    reports: list[dict[str, float]] = field(default_factory=list)
    was_stopped: bool = False

    @property
    def metrics_dataframe(self) -> pandas.DataFrame | None:
        """The metrics of each report, as a pandas DataFrame; None if there are none.

        Raises:
            ImportError: pandas is not installed.
        """
        if not self.reports:
            return None
        import pandas

        return pandas.DataFrame(self.reports)


class ResultGrid:
    """The results of all trials, in the order in which they were started.

    Args:
        results: The results.
        experiment_path: The folder in which the trials have theirs.
        metric: The metric to improve, unless a method is told another.
        mode: "max" or "min".
    """

    def __init__(self, results: list[Result], experiment_path: str, metric: str | None, mode: str | None) -> None:
        self._results, self.experiment_path, self._metric, self._mode = results, experiment_path, metric, mode

    def __len__(self) -> int:
        return len(self._results)

    def __getitem__(self, number: int) -> Result:
        return self._results[number]

    def __iter__(self) -> Iterator[Result]:
        return iter(self._results)

    def __repr__(self) -> str:
        return f"ResultGrid({len(self)} trials, {self.num_errors} failed, in {self.experiment_path})"

    @property
    def errors(self) -> list[TrialError]:
        """Why trials failed. Each names its trial and the parameters."""
        return [result.error for result in self._results if isinstance(result.error, TrialError)]

    @property
    def num_errors(self) -> int:
        """How many trials failed."""
        return len(self.errors)

    @property
    def num_terminated(self) -> int:
        """How many trials ended well, or were stopped."""
        return len(self) - self.num_errors

    def get_best_result(
        self, metric: str | None = None, mode: str | None = None, scope: str = "last", filter_nan_and_inf: bool = True
    ) -> Result:
        """The best trial.

        Args:
            metric: The metric to compare; None for that of `TuneConfig`.
            mode: "max" or "min"; None for that of `TuneConfig`.
            scope: "last" compares the last report of each trial, "all" the best.
            filter_nan_and_inf: Whether NaN and infinities do not count. NaN never does.

        Returns:
            Its result.

        Raises:
            ValueError: There is no metric to compare, or an argument is none of these.
            RuntimeError: No trial has reported the metric.
        """
        metric, mode = metric or self._metric, mode or self._mode
        if metric is None or mode is None:
            raise ValueError("there is nothing to compare: give get_best_result(metric=…, mode=…), or set them in TuneConfig")
        if mode not in ("max", "min"):
            raise ValueError(f'mode must be "max" or "min", not {mode!r}')
        if scope not in ("last", "all"):
            raise ValueError(f'scope must be "last" or "all", not {scope!r}')
        best: tuple[float, Result] | None = None
        for result in self._results:
            reports = [result.metrics] if scope == "last" else result.reports
            values = [report[metric] for report in reports if is_number(report.get(metric))]
            if filter_nan_and_inf:
                values = [value for value in values if abs(value) != float("inf")]
            for value in values:
                if best is None or (value > best[0] if mode == "max" else value < best[0]):
                    best = (value, result)
        if best is None:
            there = sorted({name for result in self._results for name in result.metrics})
            raise RuntimeError(f"no trial has reported {metric!r}; reported were {', '.join(map(repr, there)) or 'no metrics'}")
        return best[1]

    def get_dataframe(self, filter_metric: str | None = None, filter_mode: str | None = None) -> pandas.DataFrame:
        """A row for each trial: its last metrics, `trial_id`, and its parameters as `config/…`.

        Args:
            filter_metric: Take the report in which this metric was best, and not the last.
            filter_mode: "max" or "min".

        Returns:
            The DataFrame.

        Raises:
            ImportError: pandas is not installed.
            ValueError: A metric is given without its mode.
        """
        import pandas

        if filter_metric is not None and filter_mode not in ("max", "min"):
            raise ValueError('filter_mode must be "max" or "min" with a filter_metric')
        rows = []
        for result in self._results:
            metrics = result.metrics
            having = [report for report in result.reports if filter_metric and is_number(report.get(filter_metric))]
            if filter_metric is not None and having:
                metrics = (max if filter_mode == "max" else min)(having, key=lambda report: report[filter_metric])
            config = {f"config/{name}": value for name, value in _space.flat(result.config).items()}
            rows.append({**metrics, "trial_id": result.trial_id, **config})
        return pandas.DataFrame(rows)
