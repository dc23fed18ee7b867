"""Distributed PyTorch from a Python program: Spark's TorchDistributor, without Spark.

    from wingbeat.torch import TorchDistributor

    def main(rate):
        import torch.distributed as dist
        dist.init_process_group("gloo")
        ...
        return model.state_dict()

    state = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(main, 0.1)

The signatures and defaults are pyspark's. What differs: any rank's failure is the run's failure, the value is always
rank 0's, and a file that ends with an error raises one.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wingbeat import _job, _sending
from wingbeat._command import binary, local_gpus
from wingbeat._errors import LaunchFailed, RemoteTraceback, TrainingError
from wingbeat._launcher import Launcher

if TYPE_CHECKING:
    import pyarrow

    from wingbeat.train._source import FileDataset

__all__ = ["DeepspeedTorchDistributor", "RemoteTraceback", "TorchDistributor", "TrainingError", "binary", "local_gpus"]


class TorchDistributor:
    """Runs a function or a script on several ranks.

    Args:
        num_processes: How many ranks.
        local_mode: Whether they run on this machine; else on the cluster whose head is at `$WINGBEAT_ADDRESS`.
        use_gpu: Whether each rank gets a GPU of its own, the one with its LOCAL_RANK. More ranks than GPUs on this
            machine are reduced to those, with a warning.
        max_failures: How often the group is started again.
        warm: Whether ranks are forked from a process that has torch imported.
        env: Variables of the ranks' environment.
        storage: Where checkpoints that ranks report are stored, and gone on from: a folder that all nodes share, or a URL
            (`s3://…`, `gs://…`, `az://…`).
        layout: "torchrun", "virtual" (as torchrun's `--virtual-local-rank`), or "spark" for what pyspark's gives to ranks
            on a cluster: each is LOCAL_RANK 0 of 1 with its own GPU, as Lightning expects it with
            `devices=1, num_nodes=num_processes`.
        namespace: The namespace of a run's job, to which quotas apply; None for `$WINGBEAT_NAMESPACE`, and without that a new
            one.
        priority: Whose ranks are placed first: those of the job with the larger number.

    Raises:
        ValueError: `num_processes` is not positive, there is no such layout, or a namespace or priority makes no sense.
        RuntimeError: GPUs are asked for where none are, or no cluster is named.
    """

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool = True,
        use_gpu: bool = True,
        *,
        max_failures: int = 0,
        warm: bool = True,
        env: Mapping[str, str] | None = None,
        storage: str | os.PathLike[str] | None = None,
        layout: str = "torchrun",
        namespace: str | None = None,
        priority: int = 0,
    ) -> None:
        _job.check(namespace, priority)
        if layout not in ("torchrun", "virtual", "spark"):
            raise ValueError(f'layout has to be "torchrun", "virtual" or "spark", and is {layout!r}')
        if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
            raise ValueError(f"num_processes has to be a positive integer, and is {num_processes!r}")
        if not local_mode and not os.environ.get("WINGBEAT_ADDRESS"):
            raise RuntimeError(
                "local_mode=False runs on a cluster: set WINGBEAT_ADDRESS to its head's host:port (`wingbeat head` prints it)"
            )
        if local_mode and use_gpu:
            there = local_gpus()
            if there == 0:
                raise RuntimeError("use_gpu=True, and this machine has no GPU; use_gpu=False trains on CPUs")
            if num_processes > there:
                warnings.warn(
                    f"num_processes is {num_processes}, and this machine has {there} GPUs: num_processes is reduced to {there}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                num_processes = there
        self.num_processes = num_processes
        self.local_mode = local_mode
        self.use_gpu = use_gpu
        self.max_failures = max_failures
        self.warm = warm
        self.env = {str(name): str(value) for name, value in (env or {}).items()}
        self.layout = layout
        self.namespace, self.priority = namespace, priority
        self.storage = None if storage is None else os.fspath(storage)
        self.files: dict[str, str] = {}  # texts that each rank finds as files, by name
        self.options: list[str] = []  # what follows the arguments of scripts and functions

    def run(
        self,
        train_object: Callable[..., Any] | str | os.PathLike[str],
        *args: Any,
        return_all: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs a function or a script on every rank.

        Args:
            train_object: The function, or the script's path.
            *args: Its arguments.
            return_all: Whether the values of all ranks are wanted, and not only rank 0's.
            **kwargs: The function's keyword arguments.

        Returns:
            What rank 0's function returned; with `return_all`, a list of what each rank's did; None for a script.

        Raises:
            Exception: That of the first rank that failed, with its remote traceback as the cause.
            TrainingError: The run failed, and no exception says why.
            TypeError: The function cannot be sent to ranks, or this is neither a function nor a script.
            ValueError: A script is given keyword arguments.
            FileNotFoundError: There is no such script.
        """
        if callable(train_object):
            return self._call(train_object, args, kwargs, return_all)
        if kwargs:
            raise ValueError(f"a script takes no keyword arguments: {', '.join(kwargs)}")
        try:
            path = os.fspath(train_object)
        except TypeError:
            kind = type(train_object).__name__
            raise TypeError(f"run takes a function, or the path of a script; this is {train_object!r}, a {kind}") from None
        if not os.path.isfile(path):
            raise FileNotFoundError(f"the script {path} does not exist")
        try:
            self._launcher().script(path, [*map(str, args), *self.options])
        except LaunchFailed as failed:
            raise failed.error from failed.error.__cause__
        return None

    def run_on_dataframe(
        self,
        train_function: Callable[..., Any],
        dataframe: Any,
        *args: Any,
        return_all: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs a function with a table, of which each rank has its own rows.

        `wingbeat.train.get_dataset_shard()` gives a rank its rows. Rank i has the i-th of `num_processes` parts, whose
        numbers of rows differ by one at most, and so may their numbers of batches: where each step is one of all ranks, as with
        DistributedDataParallel, give files or a table whose rows divide. Of files, it gives a
        `wingbeat.train.StreamingShard`, and all ranks have as many batches.

        Args:
            train_function: The function.
            dataframe: A pandas DataFrame, whatever pyarrow makes a table of, or Parquet or Arrow IPC files: a path, a folder, a
                URL, a list of these, a `pyarrow.dataset.Dataset`, or what `wingbeat.train.read_files` returns.
            *args: The function's arguments.
            return_all: Whether the values of all ranks are wanted, and not only rank 0's.
            **kwargs: The function's keyword arguments.

        Returns:
            As `run`.

        Raises:
            Exception: As `run`.
        """
        from wingbeat.train._source import check_ranks, is_files, of_files

        if is_files(dataframe):
            datasets = {"train": of_files(dataframe)}
            check_ranks(datasets, self.num_processes)
            return self._call(train_function, args, kwargs, return_all, datasets=datasets)
        return self._call(train_function, args, kwargs, return_all, {"train": _sending.table_of(dataframe)})

    def _call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        return_all: bool,
        tables: Mapping[str, pyarrow.Table] | None = None,
        datasets: Mapping[str, FileDataset] | None = None,
    ) -> Any:
        try:
            name = getattr(function, "__name__", type(function).__name__)
            finished = self._launcher([_job.named(name)]).function(
                function,
                args,
                kwargs,
                return_all=return_all,
                arguments=self.options,
                tables=tables,
                datasets=datasets,
                ranks=self.num_processes,
            )
        except LaunchFailed as failed:
            raise failed.error from failed.error.__cause__
        return finished.values if return_all else finished.values[0]

    def _layout(self) -> list[str]:
        return ["--workers", str(self.num_processes)]

    def _launcher(self, more: Sequence[str] = ()) -> Launcher:
        options = [*self._layout(), *more, "--gpus-per-worker", "1" if self.use_gpu else "0"]
        options += _job.options(self.namespace, self.priority)
        options += ["--max-failures", str(self.max_failures), "--layout", self.layout, "--unprefixed"]
        options += [] if self.warm else ["--cold"]
        options += [] if self.storage is None else ["--storage", self.storage]
        return Launcher(options, env=self.env, files=self.files, is_local=self.local_mode)


class DeepspeedTorchDistributor(TorchDistributor):
    """As TorchDistributor, for scripts and functions that use DeepSpeed.

    They are called with `--deepspeed --deepspeed_config PATH` after their arguments; a function finds those in `sys.argv`.

    Args:
        numGpus: Ranks on each machine.
        nnodes: Machines.
        localMode: As TorchDistributor's `local_mode`.
        useGpu: As TorchDistributor's `use_gpu`.
        deepspeedConfig: A dict, which travels to every node, or the path of a JSON file there.
        **more: As TorchDistributor.

    Raises:
        ValueError: A number is not positive, or several nodes are asked for on this machine.
        TypeError: The configuration is neither a dict nor a path.
        RuntimeError: As TorchDistributor.
    """

    def __init__(
        self,
        numGpus: int = 1,
        nnodes: int = 1,
        localMode: bool = True,
        useGpu: bool = True,
        deepspeedConfig: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **more: Any,
    ) -> None:
        for name, value in (("numGpus", numGpus), ("nnodes", nnodes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} has to be a positive integer, and is {value!r}")
        if localMode and nnodes != 1:
            raise ValueError(f"localMode=True is on one node, and nnodes is {nnodes}")
        if deepspeedConfig is not None and not isinstance(deepspeedConfig, (dict, str, os.PathLike)):
            raise TypeError("deepspeedConfig has to be a dict or a path")
        super().__init__(numGpus * nnodes, localMode, useGpu, **more)
        self.nnodes = nnodes
        self.options = ["--deepspeed"]
        if isinstance(deepspeedConfig, dict):
            self.files = {"deepspeed.json": json.dumps(deepspeedConfig)}
            self.options += ["--deepspeed_config", "{file:deepspeed.json}"]
        elif isinstance(deepspeedConfig, (str, os.PathLike)):
            self.options += ["--deepspeed_config", os.path.abspath(os.fspath(deepspeedConfig))]

    def _layout(self) -> list[str]:
        return ["--nodes", str(self.nnodes), "--workers", str(self.num_processes // self.nnodes)]
