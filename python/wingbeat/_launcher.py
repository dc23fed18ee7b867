"""Runs scripts and functions as ranks, by the `wingbeat train` command: what every trainer of this package has in common."""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wingbeat import _command, _sending
from wingbeat._errors import LaunchFailed, RemoteTraceback, TrainingError
from wingbeat._own_folder import own_folder

if TYPE_CHECKING:
    import pyarrow

    from wingbeat.train._source import FileDataset


@dataclass(frozen=True)
class Finished:
    """What came of a run that succeeded.

    Attributes:
        values: What the wanted ranks returned, by rank.
        told: What `wingbeat train` says of the run: its metrics and checkpoints. Empty with a command of an older version.
    """

    values: list[Any]
    told: dict[str, Any]


@dataclass
class Launcher:
    """How ranks are started.

    Attributes:
        options: Options of `wingbeat train`.
        env: Variables of the ranks' environment. They are on no command line, which anybody on the machine can read.
        files: Texts that each rank finds as files, by name.
        is_local: Whether ranks run on this machine, whatever `$WINGBEAT_ADDRESS` says.
        command: What runs a command with an environment, and answers with its exit code; None to show its output here.
        cluster: Variables of the command's own environment, which say where the cluster is.
    """

    options: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    is_local: bool = False
    command: Callable[[Sequence[str], Mapping[str, str]], int] | None = None
    cluster: Mapping[str, str] = field(default_factory=dict)

    def script(self, path: str, arguments: Iterable[str]) -> Finished:
        """Runs a script on every rank.

        Args:
            path: The script.
            arguments: Its arguments.

        Returns:
            What came of it.

        Raises:
            LaunchFailed: The run failed.
        """
        with own_folder("wingbeat-run-") as folder:
            self._train([path], arguments, folder)
            return Finished([], _told(folder))

    def function(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        return_all: bool = False,
        all_return: bool = False,
        arguments: Iterable[str] = (),
        tables: Mapping[str, pyarrow.Table] | None = None,
        datasets: Mapping[str, FileDataset] | None = None,
        ranks: int = 1,
    ) -> Finished:
        """Calls a function on every rank.

        Args:
            function: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            return_all: Whether the values of all ranks are wanted, and not only the first's.
            all_return: Whether a rank has failed that ends before the function has returned. No values are wanted then.
            arguments: What it finds in `sys.argv`.
            tables: Tables by name, of which each rank gets its own rows.
            datasets: Datasets in files by name, which ranks read themselves.
            ranks: How many ranks there are.

        Returns:
            What came of it.

        Raises:
            TypeError: The function cannot be sent to ranks.
            LaunchFailed: The run failed.
        """
        with own_folder("wingbeat-run-") as folder:
            if datasets:
                from wingbeat.train import _streaming

                function, args = _streaming.call, (datasets, function, *args)
            file = os.path.join(folder, "function.pickle")
            _sending.write_function(file, function, args, kwargs or {}, "all" if return_all or all_return else "first")
            options = ["--function"]
            if return_all or all_return:
                options.append("--all-return")
            for number, (name, table) in enumerate((tables or {}).items()):
                parts = os.path.join(folder, f"table-{number}")
                os.mkdir(parts)
                _sending.write_parts(table, parts, ranks)
                options += ["--dataset", f"{name}={parts}"]
            self._train([*options, file], arguments, folder)
            wanted = range(ranks) if return_all else range(0 if all_return else 1)
            return Finished([_returned(folder, rank) for rank in wanted], _told(folder))

    def _train(self, what: Sequence[str], arguments: Iterable[str], folder: str) -> None:
        command = [_command.binary(), "train", *self.options]
        command += ["--python", sys.executable, "--parent", str(os.getpid()), "--results", folder]
        if self.env:
            # Nobody else can read this folder.
            path = os.path.join(folder, "env.json")
            with open(path, "w", encoding="utf-8") as out:
                json.dump(dict(self.env), out)
            command += ["--env-file", path]
        for name, text in self.files.items():
            path = os.path.join(folder, name)
            with open(path, "w", encoding="utf-8") as out:
                out.write(text)
            command += ["--file", f"{name}={path}"]
        # Contexts are for people at a terminal: a program says itself where it runs.
        env = {**_command.environment(), **self.cluster, "WINGBEAT_CONTEXT": "none"}
        if self.is_local:
            env.pop("WINGBEAT_ADDRESS", None)
        code = (self.command or _command.run)([*command, *what, "--", *arguments], env)
        if code == _command.OUTPUT_IS_MISSING and not os.path.exists(os.path.join(folder, "error.json")):
            warnings.warn("the run ended well, and some of its output is missing", RuntimeWarning, stacklevel=4)
        elif code != 0:
            raise _failure(folder, code)


def _told(folder: str) -> dict[str, Any]:
    try:
        with open(os.path.join(folder, "result.json"), encoding="utf-8") as file:
            told: dict[str, Any] = json.load(file)
    except (OSError, ValueError):  # its disk is full, which the output says
        return {}
    return told


def _returned(folder: str, rank: int) -> Any:
    try:
        with open(os.path.join(folder, f"returned-{rank}.pickle"), "rb") as file:
            return pickle.load(file)
    except OSError:
        error = TrainingError(f"what rank {rank} returned could not be written down, as the output above says", rank)
        raise LaunchFailed(error, rank) from None


def _failure(folder: str, code: int) -> LaunchFailed:
    try:
        with open(os.path.join(folder, "error.json"), encoding="utf-8") as file:
            told = json.load(file)
    except (OSError, ValueError):
        return LaunchFailed(TrainingError(f"the run ended with code {code}; its output above says why"), None)
    rank, traceback = told.get("rank"), told.get("traceback")
    error: BaseException
    try:
        with open(os.path.join(folder, "raised.pickle"), "rb") as file:
            error = pickle.load(file)
    except Exception:  # there is none, or its class is not to be had here
        error = TrainingError(told["message"], rank)
    error.__cause__ = RemoteTraceback(rank, traceback) if traceback else None
    return LaunchFailed(error, rank)
