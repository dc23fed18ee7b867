"""A trainer with Ray Train's interface."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wingbeat import _job, _sending
from wingbeat._command import binary
from wingbeat._errors import LaunchFailed
from wingbeat._launcher import Launcher
from wingbeat.train import _loop, _storage
from wingbeat.train._checkpoint import Checkpoint
from wingbeat.train._config import RunConfig, ScalingConfig, TorchConfig
from wingbeat.train._context import EXPERIMENT
from wingbeat.train._result import Result, TrainingFailedError, WorkerTrainingFailedError
from wingbeat.train._source import check_ranks, check_rows, is_files, of_files
from wingbeat.train._unsupported import refuse


class TorchTrainer:
    """Runs a training loop on several ranks that are in one process group.

    It runs on the cluster at `$WINGBEAT_ADDRESS`, and without that on this machine.

        def train_loop(config):
            model = prepare_model(build_model())
            loader = prepare_data_loader(DataLoader(data, batch_size=config["batch_size"], shuffle=True))
            for epoch in range(10):
                ...
                train.report({"loss": loss.item()})

        trainer = TorchTrainer(
            train_loop, train_loop_config={"batch_size": 32}, scaling_config=ScalingConfig(num_workers=2)
        )
        result = trainer.fit()

    Args:
        train_loop_per_worker: The function that every rank calls, with `train_loop_config` if it takes an argument.
            What it returns is dropped.
        train_loop_config: What the function gets; `{}` if it takes an argument and this is not given.
        torch_config: How ranks join the process group.
        scaling_config: How many ranks there are, and what each holds.
        run_config: The run's name, storage and behaviour.
        datasets: By name, tables or functions that make them (what pyarrow makes a table of), or files: a path or URL, a list of
            them, a `pyarrow.dataset.Dataset`, or what `read_files` returns. Ranks read them with `get_dataset_shard(name)`. Of a
            table, each rank has as many rows as the others (a rest that is smaller than the number of ranks is left out), and the
            number of ranks must not vary. Files are read row by row, with any number of ranks.
        dataset_config: Ray Train's; refused.
        validation_config: Ray Train's; refused.
        metadata: Ray Train's; refused.
        resume_from_checkpoint: Ray Train's; refused.

    Raises:
        TypeError: The loop is no function, or takes more than one argument.
        ValueError: The loop takes no argument, and there is a `train_loop_config`.
        NotImplementedError: An option is refused.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: Any = None,
        validation_config: Any = None,
        metadata: Any = None,
        resume_from_checkpoint: Any = None,
    ) -> None:
        if dataset_config is not None:
            raise refuse(
                "TorchTrainer(dataset_config=…)",
                "each dataset is split into equal parts; load what every rank needs whole in the loop",
            )
        if validation_config is not None:
            raise refuse("TorchTrainer(validation_config=…)", "validate in the loop, and report the metrics")
        if metadata is not None:
            raise refuse("TorchTrainer(metadata=…)", "use Checkpoint.set_metadata, or train_loop_config")
        if resume_from_checkpoint is not None:
            raise refuse(
                "TorchTrainer(resume_from_checkpoint=…)",
                "a run with the name and storage_path of an earlier one goes on from its checkpoint; "
                "or pass the checkpoint's path in train_loop_config",
            )
        self.train_loop = train_loop_per_worker
        self.torch_config = torch_config or TorchConfig()
        self.datasets = dict(datasets or {})
        self.configure(train_loop_config, scaling_config or ScalingConfig())
        self.run_config = run_config or RunConfig()

    def configure(self, train_loop_config: dict[str, Any] | None, scaling_config: ScalingConfig) -> None:
        """Sets what the loop gets, and how many ranks there are.

        Args:
            train_loop_config: As for the class.
            scaling_config: As for the class.

        Raises:
            TypeError: The loop takes other arguments.
            NotImplementedError: A dataset needs one number of ranks.
        """
        self.train_loop_config, self.scaling_config = train_loop_config, scaling_config
        self.arguments = _arguments(self.train_loop, train_loop_config)
        is_elastic = self.scaling_config.workers[0] != self.scaling_config.workers[1]
        if is_elastic and not all(is_files(given) for given in self.datasets.values()):
            raise refuse(
                "a dataset in memory with (min, max) workers",
                "give its files (a path or read_files(…)), load the data in the loop, or give one number of workers",
            )

    def fit(self) -> Result:
        """Runs the training to its end. What ranks print, and how far they are, is shown meanwhile.

        Ctrl-C asks the ranks to end, which then have `RunConfig.grace_s` to save what they have. A second one kills them.

        Returns:
            What came of it.

        Raises:
            WorkerTrainingFailedError: A rank failed more often than `FailureConfig.max_failures`. Its exception is the
                cause.
            TrainingFailedError: The run failed for another reason.
            OSError: No storage is named, and that of this user cannot be made.
            TypeError: The loop, or something that it uses, cannot be sent to ranks.
        """
        return self.run()

    def run(
        self,
        command: Callable[[Sequence[str], Mapping[str, str]], int] | None = None,
        cluster: Mapping[str, str] | None = None,
    ) -> Result:
        """As `fit`, by another way to run a command.

        Args:
            command: What runs a command with an environment, and answers with its exit code; None to show its output here.
            cluster: Variables of the command's own environment, which say where the cluster is.

        Returns:
            As `fit`.

        Raises:
            TrainingFailedError: As `fit`.
            TypeError: As `fit`.
        """
        name = _storage.name_of(self.run_config)
        folder = _storage.folder_of(self.run_config, name)
        _storage.make_own(self.run_config, folder)
        options = [*self.scaling_config.options(), *self.run_config.options(), *self.torch_config.options()]
        env = {EXPERIMENT: name, **self.run_config.env}
        options += ["--storage", folder, _job.named(name)]
        launcher = Launcher(options, env=env, command=command, cluster=cluster or {})
        ranks = self.scaling_config.workers[1]
        given = {key: rows() if callable(rows) else rows for key, rows in self.datasets.items()}
        files = {key: of_files(rows) for key, rows in given.items() if is_files(rows)}
        check_ranks(files, self.scaling_config.workers[1])
        tables = {key: _equal(key, rows, ranks) for key, rows in given.items() if key not in files}
        try:
            finished = launcher.function(
                _loop.run,
                (self.train_loop, self.torch_config),
                {"train_loop_config": self.arguments},
                all_return=True,
                tables=tables,
                datasets=files,
                ranks=ranks,
            )
        except LaunchFailed as failed:
            if failed.rank is None:
                raise TrainingFailedError(str(failed.error)) from failed.error.__cause__
            kind = type(failed.error).__name__
            message = f"rank {failed.rank} failed: {kind}: {failed.error}"
            raise WorkerTrainingFailedError(message, {failed.rank: failed.error}) from failed.error
        return result_of(finished.told, folder)

    @classmethod
    def restore(cls, *args: Any, **kwargs: Any) -> TorchTrainer:
        """Ray Train's, and refused: make a trainer with the same `RunConfig.name` and `storage_path`.

        Args:
            *args: Ray Train's.
            **kwargs: Ray Train's.

        Raises:
            NotImplementedError: Always.
        """
        raise refuse("TorchTrainer.restore", "make a trainer with the same RunConfig(name=…, storage_path=…) and call fit()")

    can_restore = restore


def _arguments(loop: Callable[..., Any], config: dict[str, Any] | None) -> tuple[Any, ...]:
    """What the loop is called with."""
    if not callable(loop):
        raise TypeError(f"train_loop_per_worker must be a function, not {loop!r:.100}")
    if config is not None and not isinstance(config, dict):
        raise TypeError(f"train_loop_config must be a dict, not a {type(config).__name__}")
    parameters = list(inspect.signature(loop).parameters.values())
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL)]
    needed = [one for one in parameters if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    name = getattr(loop, "__qualname__", repr(loop))
    if len(needed) > 1 or any(one.kind is one.KEYWORD_ONLY for one in needed):
        raise TypeError(f"{name} must take no argument, or one: train_loop_config")
    if not positional:
        if config is not None:
            raise ValueError(f"{name} takes no argument, and there is a train_loop_config: give it a parameter")
        return ()
    return ({} if config is None else config,) if needed or config is not None else ()


def _equal(name: str, rows: Any, ranks: int) -> Any:
    """A table of which each rank has as many rows as the others: with more, one would wait for the others in vain."""
    table = _sending.table_of(rows)
    check_rows(name, table.num_rows, ranks)
    return table.slice(0, table.num_rows - table.num_rows % ranks)


def result_of(told: Mapping[str, Any], folder: str) -> Result:
    """What came of a run.

    Args:
        told: What `wingbeat train` says of it.
        folder: The run's folder.

    Returns:
        The result.

    Raises:
        RuntimeError: The command has said nothing.
    """
    if not told:
        raise RuntimeError(
            f"the run ended well, and what came of it is not known here; what it stored is in {folder}. If the output above does "
            f"not say that it could not be written, {binary()} is of another version than this package: install both together"
        )

    def numbers(metrics: Mapping[str, str]) -> dict[str, float]:
        return {name: float(text) for name, text in metrics.items()}

    def found(url: str) -> Checkpoint:
        path = _storage.local_path(url)
        return Checkpoint(url if path is None else os.path.normpath(path))

    kept = [(found(one["url"]), numbers(one["metrics"])) for one in told["checkpoints"]]
    return Result(
        # The last attempt reports nothing if an earlier one had done all of it.
        metrics=numbers(told["metrics"]) or (dict(kept[-1][1]) if kept else {}),
        checkpoint=kept[-1][0] if kept else None,
        path=folder,
        best_checkpoints=kept,
    )
