"""A trial: its parameters, its process, and what it has reported."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wingbeat import _job
from wingbeat._errors import LaunchFailed, RemoteTraceback, TrainingError
from wingbeat._launcher import Launcher
from wingbeat._trials import _trial
from wingbeat._trials._trial import ERROR, PENDING, TERMINATED
from wingbeat.train._checkpoint import complete_in
from wingbeat.train._config import RunConfig, ScalingConfig
from wingbeat.train._context import EXPERIMENT, TRIAL, TRIAL_DIR
from wingbeat.train._report import ITERATION
from wingbeat.train._result import TrainingFailedError
from wingbeat.train._trainer import TorchTrainer, result_of
from wingbeat.tune import _called, _space, _trainable

_METRICS = "metrics.jsonl"
# How long a trial had run at a report, unless it says that itself.
_SECONDS = "time_total_s"
# What `wingbeat train` leaves in a folder that it uses, after how long one that says nothing more is gone, and after how long a
# person is told for what is waited.
_IN_USE, _LEAVE_S, _TELL_S = ".wingbeat-in-use", 60, 1


# What `param_space` has for the loop of a `TorchTrainer`.
LOOP_CONFIG = "train_loop_config"
_THREADS = "OMP_NUM_THREADS"
# Ray's variable: "0" leaves trials in the program's working directory.
_CHANGES_FOLDER = "RAY_CHDIR_TO_TRIAL_DIR"


class TrialError(TrainingFailedError):
    """A trial failed. The text names it and its parameters; the cause is what it raised.

    Attributes:
        trial_id: The trial.
        config: Its parameters.
    """

    __module__ = "wingbeat.tune"

    def __init__(self, trial_id: str, config: Mapping[str, Any], why: str) -> None:
        super().__init__(f"trial {trial_id} ({described(config)}) failed: {why}")
        self.trial_id, self.config, self.why = trial_id, config, why

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            cause = pickle.dumps(self.__cause__)
        except Exception:  # some cannot be pickled
            cause = b""
        return _made_again, (self.trial_id, self.config, self.why, cause)


def _made_again(trial_id: str, config: Mapping[str, Any], why: str, cause: bytes) -> TrialError:
    error = TrialError(trial_id, config, why)
    with contextlib.suppress(Exception):  # its class is not to be had here
        error.__cause__ = pickle.loads(cause)
    return error


def described(config: Mapping[str, Any]) -> str:
    """Parameters on a line.

    Args:
        config: The parameters.
    """
    values = _space.flat(config).items()
    return ", ".join(f"{name}={_shown(value)}" for name, value in values)


def _shown(value: Any) -> str:
    try:
        return f"{value:.4g}" if isinstance(value, float) else f"{value!r:.40}"
    except Exception:  # of the value's own
        return f"<{type(value).__name__}>"


def _for_json(value: Any) -> Any:
    """What JSON can hold of parameters."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _shown(key): _for_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else _text(value)


def _text(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return _shown(value)


class Trial(_trial.Trial):
    """A trial of a `Tuner`: a run of `wingbeat train`.

    Args:
        trial_id: Its name, and that of its folder.
        config: Its parameters.
        folder: The folder of the whole.
        run: What runs it.
    """

    def __init__(self, trial_id: str, config: dict[str, Any], folder: str, run: Callable[[Trial], Any]) -> None:
        super().__init__(trial_id)
        self.config = config
        self.folder = Path(folder, trial_id)
        self.checkpoints: list[tuple[Any, dict[str, float]]] = []
        self._run_it = run
        self._is_again = False
        # Whether what it has left is removed when it is started.
        self.begins_anew = False
        # How many of its reports were told to the scheduler and the searcher when it was last saved.
        self.heard = 0
        # The seconds of attempts of earlier programs; and of each of these how many reports there were at its end, when it had
        # begun, and the seconds of those before it.
        self.before = 0.0
        self.earlier: list[tuple[int, float, float]] = []
        self._read = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def parameters(self) -> str:
        return described(self.config)

    @property
    def has_begun(self) -> bool:
        """Whether its function was called. A `TorchTrainer` does not say so: whether it has reported anything."""
        return self.began > 0 and (self.began != self.launched or bool(self.reports))

    def launch(self) -> None:
        if self.begins_anew:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.begins_anew, self._read = False, 0
        super().launch()

    def _run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=self._is_again)
        params = json.dumps(_for_json(self.config), indent=1)
        (self.folder / "params.json").write_text(params + "\n", encoding="utf-8")
        self.checkpoints = self._run_it(self)

    def state(self) -> dict[str, Any]:
        """What another program needs to know of it, besides its files."""
        names = ["trial_id", "config", "status", "is_stopped", "launched", "began", "ended", "begins_anew"]
        names += ["enough", "before", "earlier"]
        self.heard = len(self.reports)
        error = self.error if isinstance(self.error, TrialError) else None  # what it has just raised may be anything
        return {"error": error, "heard": self.heard, **{name: getattr(self, name) for name in names}}

    @classmethod
    def of(cls, state: Mapping[str, Any], folder: str, run: Callable[[Trial], Any]) -> Trial:
        """A trial of another program: what that has known of it, and what is in its files.

        Args:
            state: What `state` returned there.
            folder: The folder of the whole.
            run: What runs it.
        """
        trial = cls(state["trial_id"], state["config"], folder, run)
        for name, value in state.items():
            setattr(trial, name, value)
        trial.new_reports()
        trial.checkpoints = complete_in(trial.folder)
        return trial

    def again(self, from_checkpoint: bool = True) -> None:
        """Prepares it to be started again, from its newest checkpoint if it has one.

        Args:
            from_checkpoint: Whether it goes on from there, and is not begun anew.
        """
        self.status, self.error, self.is_stopped, self._process = PENDING, None, False, None
        self.enough = None
        began, self.launched, self.began, self.ended = self.began or self.launched, 0.0, 0.0, 0.0
        self._is_again = True
        for name in (_called.STARTED, _called.RAISED):
            (self.folder / name).unlink(missing_ok=True)
        self.begins_anew = not from_checkpoint
        if self.begins_anew:
            self.reports, self.checkpoints, self.before, self.earlier = [], [], 0.0, []
            return
        if not complete_in(self.folder):
            (self.folder / _METRICS).unlink(missing_ok=True)
            self.reports, self._read, self.before, self.earlier = [], 0, 0.0, []
        else:
            if began and self.reports:
                self.earlier.append((len(self.reports), began, self.before))
                self.before = self.reports[-1][_SECONDS]
            with contextlib.suppress(OSError):  # there are none, as on a disk that was full
                if self._read < (self.folder / _METRICS).stat().st_size:
                    os.truncate(self.folder / _METRICS, self._read)  # a line that was being written

    def command(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        """Runs the command of its ranks, and keeps what they print in its folder.

        Args:
            command: The command.
            env: Its whole environment.

        Returns:
            The exit code.
        """
        with open(self.folder / "output.txt", "ab") as out:
            with self._lock:
                if self.is_stopped:
                    return 128 + signal.SIGTERM
                # Ctrl-C comes once: from the Tuner.
                self._process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            return self._process.wait()

    def stop(self, number: int) -> None:
        """Asks its ranks to end. Asked again, they are killed.

        Args:
            number: The signal.
        """
        with self._lock:
            self.is_stopped = True
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)

    def new_reports(self) -> list[dict[str, float]]:
        """What it has reported since this was asked last. `wingbeat train` writes each report to its folder at once.

        Returns:
            The metrics of each report, with `training_iteration` and `time_total_s`.
        """
        if not self.began:
            with contextlib.suppress(OSError):
                self.began = float((self.folder / _called.STARTED).read_text(encoding="ascii"))
        try:
            with open(self.folder / _METRICS, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        new = []
        for line in whole.splitlines():
            try:
                told = json.loads(line)
                for name in ("attempt", "launch"):
                    told.pop(name, None)
                moment = float(told.pop("time"))
                metrics = {name: float(value) for name, value in told.items()}
            except (ValueError, TypeError, KeyError, AttributeError):  # damaged: reports before and after it are whole
                continue
            metrics.setdefault(ITERATION, len(self.reports) + 1)
            metrics.setdefault(_SECONDS, self._seconds_until(moment))
            self.reports.append(metrics)
            new.append(metrics)
        return new

    def _seconds_until(self, moment: float) -> float:
        """How long it had run when its next report was made, in all programs that have run it."""
        for end, began, before in self.earlier:
            if len(self.reports) < end:
                return before + moment - began
        return self.before + moment - (self.began or self.launched)

    def _raised_itself(self) -> LaunchFailed | None:
        """What its function raised before it was asked to end."""
        try:
            return LaunchFailed(pickle.loads((self.folder / _called.RAISED).read_bytes()), 0)
        except Exception:  # it has raised nothing, or its class is not to be had here
            return None

    def finish(self) -> None:
        """Decides what came of it, once it has ended."""
        self.ended = time.time()
        if self.error is not None:
            # Of one that has ended otherwise than well, its command says nothing.
            self.checkpoints = complete_in(self.folder)
            if self.is_stopped:
                self.error = self._raised_itself() or self.error
        if self.error is None or (self.is_stopped and not _raised(self.error)):
            self.status, self.error = TERMINATED, None
            return
        self.status = ERROR
        cause = self.error
        if isinstance(cause, LaunchFailed):
            where = "" if cause.rank is None else f"rank {cause.rank}: "
            why = f"{where}{type(cause.error).__name__}: {cause.error}"
            cause = cause.error
        elif isinstance(cause, TrainingFailedError):
            why = str(cause)
            cause = cause.__cause__ or cause
        else:
            why = f"{type(cause).__name__}: {cause}"
        self.error = TrialError(self.trial_id, self.config, why)
        self.error.__cause__ = cause


def wait_for_commands(folders: Sequence[Path], say: Callable[[str], None]) -> None:
    """Waits until the commands of trials, whose program was killed, have ended as well: ranks have their grace, and what they
    report is still stored.

    A command says in a file that it uses the folder, again and again until it leaves. Where it was killed, or its machine is
    gone, the file does not change any more.

    Args:
        folders: The folders of the trials.
        say: What says a line if that takes long.
    """
    seen: dict[Path, tuple[bytes, float]] = {}
    begun, is_told = time.monotonic(), False
    while folders := [folder for folder in folders if _is_used(folder, seen)]:
        if not is_told and time.monotonic() - begun > _TELL_S:
            is_told = True
            some = ", ".join(folder.name for folder in folders[:3]) + (", …" if len(folders) > 3 else "")
            say(
                f"wingbeat tune: waits until the commands of {len(folders)} trials of the program before ({some}) have ended, or "
                f"have said nothing for {_LEAVE_S} s"
            )
        time.sleep(0.05)


def _is_used(folder: Path, seen: dict[Path, tuple[bytes, float]]) -> bool:
    """Whether a command may still use a folder, of which is known what its file has had in it, and since when."""
    try:
        said = (folder / _IN_USE).read_bytes()
    except OSError:  # there is none
        return False
    try:
        user = json.loads(said)
        if user["host"] == socket.gethostname():
            stat = Path(f"/proc/{int(user['pid'])}/stat").read_text(encoding="utf-8", errors="replace")
            if stat.rsplit(")", 1)[-1].split()[0] == "Z":
                return False
    except OSError:  # there is no such process
        return False
    except (ValueError, KeyError, TypeError):  # it is being written
        pass
    before, since = seen.setdefault(folder, (said, time.monotonic()))
    if said != before:
        seen[folder] = said, time.monotonic()
    return said != before or time.monotonic() - since < _LEAVE_S


def _raised(error: BaseException) -> bool:
    """Whether a rank has raised an exception of its own, and not only ended as it was asked to."""
    cause = error.error if isinstance(error, LaunchFailed) else error.__cause__
    if isinstance(cause, TrainingError):
        cause = cause.__cause__  # what it raised cannot be made here
    if isinstance(cause, RemoteTraceback):
        return not cause.text.strip().rsplit("\n", 1)[-1].startswith("SystemExit")
    return isinstance(cause, Exception)


def run_config_of(trainable: Any, given: RunConfig) -> RunConfig:
    """How each trial runs. What a `TorchTrainer` has for itself and `Tuner` leaves as it is holds as well.

    Args:
        trainable: What the user gave to `Tuner`.
        given: What the user gave to `Tuner`.

    Returns:
        The configuration, of which the name and the storage mean nothing.

    Raises:
        ValueError: The two contradict each other.
    """
    usual = RunConfig()
    values = {one.name: getattr(given, one.name) for one in dataclasses.fields(RunConfig) if one.init}
    if isinstance(trainable, TorchTrainer):
        for name, value in values.items():
            own, left = getattr(trainable.run_config, name), getattr(usual, name)
            if name in ("name", "storage_path") or own == left or own == value:
                continue
            if value != left:
                raise ValueError(f"RunConfig.{name} is {value!r} for Tuner and {own!r} for its TorchTrainer; give one of them")
            values[name] = own
    return RunConfig(**values)


def runner(trainable: Any, run_config: RunConfig, cluster: Mapping[str, str]) -> tuple[Callable[[Trial], Any], ScalingConfig]:
    """What runs a trial, and what its ranks hold.

    Args:
        trainable: What the user gave to `Tuner`.
        run_config: How each trial runs.
        cluster: Variables for commands that run on the cluster.

    Returns:
        The function, which answers with the checkpoints that were kept, and the ranks.
    """
    run_config = run_config_of(trainable, run_config)
    if isinstance(trainable, TorchTrainer):
        trainer = trainable

        def train(trial: Trial) -> Any:
            trial.began = trial.launched
            own = copy.copy(trainer)
            own.run_config = _of_trial(run_config, trial)
            config = trainer.train_loop_config
            if LOOP_CONFIG in trial.config:  # else, the loop may take none
                config = _merged(config or {}, trial.config[LOOP_CONFIG])
            own.configure(config, trial.config.get("scaling_config", trainer.scaling_config))
            return own.run(trial.command, cluster).best_checkpoints

        return train, trainer.scaling_config
    scaling = ScalingConfig()
    if isinstance(trainable, _trainable.WithResources):
        trainable, scaling = trainable.trainable, trainable.scaling

    changes_folder = os.environ.get(_CHANGES_FOLDER, "1") != "0"

    def call(trial: Trial) -> Any:
        config = _of_trial(run_config, trial)
        if _THREADS not in os.environ:
            # Others run beside it. As in Ray, it computes with as many threads as it holds CPUs.
            config.env.setdefault(_THREADS, str(max(1, int((scaling.resources_per_worker or {}).get("CPU", 1)))))
        options = [*scaling.options(), *config.options(), "--storage", str(trial.folder), "--unprefixed"]
        # As their folders are called: of the search and of the trial.
        options += [_job.named("/".join(Path(trial.folder).parts[-2:]))]
        launcher = Launcher(options, env=config.env, command=trial.command, cluster=cluster)
        what = (trainable, trial.config, str(trial.folder))
        finished = launcher.function(_called.run, what, {"changes_folder": changes_folder}, all_return=True)
        return result_of(finished.told, str(trial.folder)).best_checkpoints

    return call, scaling


def _of_trial(config: RunConfig, trial: Trial) -> RunConfig:
    own = RunConfig(**{one.name: getattr(config, one.name) for one in dataclasses.fields(RunConfig) if one.init})
    own.name, own.storage_path = trial.trial_id, trial.folder.parent
    own.env.update({TRIAL: trial.trial_id, TRIAL_DIR: str(trial.folder), EXPERIMENT: trial.folder.parent.name})
    return own


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        inner = merged.get(name)
        merged[name] = _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged
