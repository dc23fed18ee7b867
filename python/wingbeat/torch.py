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

import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import warnings
from pathlib import Path

__all__ = ["DeepspeedTorchDistributor", "TorchDistributor", "TrainingError"]


class TrainingError(RuntimeError):
    """A run failed. `rank` is the rank that failed first, if one did."""

    def __init__(self, message, rank=None):
        super().__init__(message)
        self.rank = rank


class RemoteTraceback(Exception):
    """The cause of an exception that was raised in a rank: where it was raised there."""

    def __init__(self, rank, text):
        super().__init__(rank, text)
        self.rank, self.text = rank, text

    def __str__(self):
        return f"in rank {self.rank}:\n\n{self.text}"


class TorchDistributor:
    """Runs a function or a script on several ranks.

    num_processes: how many. local_mode: on this machine; else on the cluster whose head is at $WINGBEAT_ADDRESS.
    use_gpu: each rank gets a GPU of its own, the one with its LOCAL_RANK; more ranks than GPUs on this machine are
    reduced to those, with a warning. max_failures: how often the group is started again. warm: fork ranks from a
    process with torch imported. env: variables of the ranks' environment. storage: where checkpoints that ranks report
    are stored, and gone on from: a folder that all nodes share, or a URL (s3://…, gs://…, az://…). layout: "torchrun", or
    "spark" for what pyspark's gives to ranks on a cluster: each is LOCAL_RANK 0 of 1 with its own GPU, as Lightning expects
    it with `devices=1, num_nodes=num_processes`.

    Raises ValueError if num_processes is not positive, and RuntimeError if GPUs are asked for where none are.
    """

    def __init__(
        self,
        num_processes=1,
        local_mode=True,
        use_gpu=True,
        *,
        max_failures=0,
        warm=True,
        env=None,
        storage=None,
        layout="torchrun",
    ):
        if layout not in ("torchrun", "virtual", "spark"):
            raise ValueError(f'layout has to be "torchrun", "virtual" or "spark", and is {layout!r}')
        if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
            raise ValueError(f"num_processes has to be a positive integer, and is {num_processes!r}")
        if not local_mode and not os.environ.get("WINGBEAT_ADDRESS"):
            raise RuntimeError(
                "local_mode=False runs on a cluster: set WINGBEAT_ADDRESS to its head's host:port "
                "(`wingbeat head` prints it)"
            )
        if local_mode and use_gpu:
            there = local_gpus()
            if there == 0:
                raise RuntimeError("use_gpu=True, and this machine has no GPU; use_gpu=False trains on CPUs")
            if num_processes > there:
                warnings.warn(
                    f"num_processes is {num_processes}, and this machine has {there} GPUs: "
                    f"num_processes is reduced to {there}",
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
        self.storage = None if storage is None else os.fspath(storage)
        self.files = {}  # texts that each rank finds as files, by name

    def run(self, train_object, *args, return_all=False, **kwargs):
        """Runs `train_object(*args, **kwargs)` on every rank, or the script of this path with these arguments.

        Returns what rank 0's function returned, or with return_all, a list of what each rank's did; None for a script.
        Raises the exception of the first rank that failed, with its remote traceback as the cause, or TrainingError.
        """
        if callable(train_object):
            return self._run_function(train_object, args, kwargs, return_all, ())
        if kwargs:
            raise ValueError(f"a script takes no keyword arguments: {', '.join(kwargs)}")
        try:
            path = os.fspath(train_object)
        except TypeError:
            kind = type(train_object).__name__
            raise TypeError(f"run takes a function, or the path of a script; this is {train_object!r}, a {kind}") from None
        if not os.path.isfile(path):
            raise FileNotFoundError(f"the script {path} does not exist")
        with tempfile.TemporaryDirectory(prefix="wingbeat-run-") as folder:
            # A script's errors are described there, too.
            self._train(["--results", folder, path], map(str, args), folder)

    def run_on_dataframe(self, train_function, dataframe, *args, return_all=False, **kwargs):
        """As run, with a table of which each rank has its own rows: `wingbeat.train.get_dataset_shard()` gives them.

        dataframe: a pandas DataFrame, or whatever pyarrow makes a table of. Rank i has the i-th of num_processes parts
        that differ by one row at most.
        """
        import pyarrow

        if isinstance(dataframe, pyarrow.Table):
            table = dataframe
        elif hasattr(dataframe, "__arrow_c_stream__"):
            table = pyarrow.table(dataframe)
        else:
            table = pyarrow.Table.from_pandas(dataframe)
        with tempfile.TemporaryDirectory(prefix="wingbeat-table-") as folder:
            ends = [table.num_rows * rank // self.num_processes for rank in range(self.num_processes + 1)]
            for rank, (begin, end) in enumerate(zip(ends, ends[1:])):
                with pyarrow.ipc.new_file(os.path.join(folder, f"{rank}.arrow"), table.schema) as file:
                    file.write_table(table.slice(begin, end - begin))
            datasets = ["--dataset", f"train={folder}"]
            return self._run_function(train_function, args, kwargs, return_all, (), datasets)

    def _run_function(self, function, args, kwargs, return_all, options, datasets=()):
        import cloudpickle

        about = {"sys_path": sys.path, "first": _before_the_library(sys.path), "returns": "all" if return_all else "first"}
        with tempfile.TemporaryDirectory(prefix="wingbeat-run-") as folder:
            file = os.path.join(folder, "function.pickle")
            with open(file, "wb") as out:
                pickle.dump(about, out)
                try:
                    cloudpickle.dump((function, args, kwargs), out)
                except Exception as error:
                    raise TypeError(_who_cannot_be_sent(function, args, kwargs, error)) from error
            self._train(["--function", "--results", folder, *datasets, file], options, folder)
            ranks = range(self.num_processes) if return_all else [0]
            values = [_load(folder, rank) for rank in ranks]
        return values if return_all else values[0]

    def _layout(self):
        return ["--workers", str(self.num_processes)]

    def _train(self, what, args, folder):
        command = [binary(), "train", *self._layout(), "--python", sys.executable]
        command += ["--gpus-per-worker", "1" if self.use_gpu else "0", "--max-failures", str(self.max_failures)]
        command += ["--layout", self.layout, "--unprefixed", *([] if self.warm else ["--cold"])]
        command += ["--parent", str(os.getpid())]
        if self.storage is not None:
            command += ["--storage", self.storage]
        if self.env:
            # Anybody on the machine can read a command line, and nobody else this folder.
            file = os.path.join(folder, "env.json")
            with open(file, "w", encoding="utf-8") as out:
                json.dump(self.env, out)
            command += ["--env-file", file]
        for name, text in self.files.items():
            path = os.path.join(folder, name)
            with open(path, "w", encoding="utf-8") as out:
                out.write(text)
            command += ["--file", f"{name}={path}"]
        env = dict(os.environ)
        if self.local_mode:
            env.pop("WINGBEAT_ADDRESS", None)
        code = _run([*command, *what, "--", *args], env)
        if code != 0:
            _raise(folder, code)


class DeepspeedTorchDistributor(TorchDistributor):
    """As TorchDistributor, for scripts and functions that use DeepSpeed: on nnodes machines, with numGpus ranks each.

    deepspeedConfig: a dict, which travels to every node, or the path of a JSON file there. They are called with `--deepspeed --deepspeed_config PATH`
    after their arguments; a function finds those in sys.argv.
    """

    def __init__(self, numGpus=1, nnodes=1, localMode=True, useGpu=True, deepspeedConfig=None, **more):
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
        elif deepspeedConfig is not None:
            self.options += ["--deepspeed_config", os.path.abspath(os.fspath(deepspeedConfig))]

    def run(self, train_object, *args, return_all=False, **kwargs):
        """As TorchDistributor.run."""
        if callable(train_object):
            return self._run_function(train_object, args, kwargs, return_all, self.options)
        return super().run(train_object, *args, *self.options, **kwargs)

    def _layout(self):
        return ["--nodes", str(self.nnodes), "--workers", str(self.num_processes // self.nnodes)]


def binary():
    """The `wingbeat` command: $WINGBEAT_BIN, the one that was installed with this package, or one on the PATH."""
    given = os.environ.get("WINGBEAT_BIN")
    beside = Path(sysconfig.get_path("scripts"), "wingbeat")
    found = given or (str(beside) if beside.exists() else shutil.which("wingbeat"))
    if found is None:
        raise RuntimeError("the `wingbeat` command is not installed; `pip install wingbeat` brings it")
    return found


def local_gpus():
    """How many GPUs this machine has, of those that this process may use."""
    told = subprocess.run([binary(), "devices", "--json"], stdout=subprocess.PIPE, check=True).stdout
    return len(json.loads(told))


def _run(command, env):
    """Runs a command, and shows its output where this program's goes. Ctrl-C ends it as it ends itself: ranks have their time
    to save what they have."""
    streams = [_target(sys.stdout, 1), _target(sys.stderr, 2)]
    # In a session of its own, so that Ctrl-C comes once: from here.
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=streams[0], stderr=streams[1], start_new_session=True
    )

    def show(source, target):
        for line in io.TextIOWrapper(source, encoding="utf-8", errors="replace"):
            target.write(line)
            target.flush()

    pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    threads = [threading.Thread(target=show, args=pair, daemon=True) for pair in pairs if pair[0] is not None]
    for thread in threads:
        thread.start()
    try:
        code = process.wait()
    except BaseException as error:
        process.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        try:
            process.wait()
        except BaseException:  # asked again: now
            process.terminate()
            process.wait()
        raise
    for thread in threads:
        thread.join()
    return code


def _target(stream, number):
    """Where the command writes: to where this program does, or where that is no file, as in a notebook, into a pipe."""
    try:
        is_own = stream.fileno() == number
        stream.flush()
    except (OSError, ValueError, AttributeError):
        is_own = False
    return None if is_own else subprocess.PIPE


def _load(folder, rank):
    try:
        with open(os.path.join(folder, f"returned-{rank}.pickle"), "rb") as file:
            return pickle.load(file)
    except FileNotFoundError:
        raise TrainingError(f"rank {rank} ended well before its function returned: by os._exit(0)?", rank) from None


def _raise(folder, code):
    try:
        with open(os.path.join(folder, "error.json"), encoding="utf-8") as file:
            told = json.load(file)
    except OSError:
        raise TrainingError(f"the run ended with code {code}; its output above says why") from None
    rank, traceback = told.get("rank"), told.get("traceback")
    cause = RemoteTraceback(rank, traceback) if traceback else None
    try:
        with open(os.path.join(folder, "raised.pickle"), "rb") as file:
            error = pickle.load(file)
    except Exception:  # there is none, or its class is not to be had here
        error = TrainingError(told["message"], rank)
    raise error from cause


def _before_the_library(paths):
    """How many of these come before Python's own: the script's folder, and what the user has named."""
    library = os.path.dirname(os.__file__)
    own = (index for index, path in enumerate(paths) if path == library or path.endswith(".zip") and os.path.dirname(path) == os.path.dirname(library))
    return next(own, 0)


def _who_cannot_be_sent(function, args, kwargs, error):
    """Names the part of a call that cannot be pickled."""
    import cloudpickle

    def fails(value):
        try:
            cloudpickle.dumps(value)
        except Exception:
            return True
        return False

    name = getattr(function, "__qualname__", repr(function))
    parts = [(f"argument {number}", value) for number, value in enumerate(args)]
    parts += [(f"argument {key!r}", value) for key, value in kwargs.items()]
    code = getattr(function, "__code__", None)
    if code is not None:
        cells = getattr(function, "__closure__", None) or ()
        for variable, cell in zip(code.co_freevars, cells):
            try:
                parts.append((f"variable {variable!r}", cell.cell_contents))
            except ValueError:
                pass  # not assigned yet
        names = function.__globals__
        parts += [(f"global {variable!r}", names[variable]) for variable in code.co_names if variable in names]
    for part, value in parts:
        if fails(value):
            return f"{name} cannot be sent to ranks: its {part}, a {type(value).__qualname__}, cannot be pickled: {error}"
    return f"{name} cannot be sent to ranks: {error}"
