"""Runs trials, with Ray Tune's interface."""

from __future__ import annotations

import copy
import os
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wingbeat._errors import TrainingError
from wingbeat._trials import _trial as _trials
from wingbeat._trials._display import Display
from wingbeat._trials._engine import Engine
from wingbeat._trials._trial import ERROR, PENDING, RUNNING, TERMINATED
from wingbeat.train import _storage
from wingbeat.train._config import RunConfig as TrainRunConfig
from wingbeat.train._config import ScalingConfig
from wingbeat.train._trainer import TorchTrainer
from wingbeat.train._unsupported import refuse
from wingbeat.tune import _experiment, _terminated, _trainable, _trial, schedulers
from wingbeat.tune._cluster import Cluster, ClusterLostError, cluster, slots
from wingbeat.tune._config import RunConfig, TuneConfig
from wingbeat.tune._grid import Result, ResultGrid
from wingbeat.tune._same import first_difference
from wingbeat.tune._space import GRID, Categorical, check_grids, is_grid
from wingbeat.tune._trial import Trial, TrialError

# How many trials more than fit are launched: each takes the memory of a command.
_WAITING = 4
# How long the command of a trial may take besides the grace of its ranks, and once it was killed.
_ENDING_S, _KILLED_S = 15, 5
# After how long what could not be written is written again, unless a trial is started: to pickle it may take long.
_SAVE_AGAIN_S = 10


class TuneError(RuntimeError):
    """Trials failed, and `TuneConfig.raise_on_failed_trial` is set.

    Attributes:
        results: What came of all trials.
    """

    __module__ = "wingbeat.tune"

    def __init__(self, message: str, results: ResultGrid) -> None:
        super().__init__(message)
        self.results = results


class Tuner:
    """Tries parameters: each trial runs a function with some of them.

    Trials run on the cluster at `$WINGBEAT_ADDRESS`. Without that, `fit` starts a head and a node on this machine, which end
    with it.

        def train(config):
            for epoch in range(10):
                ...
                tune.report({"loss": loss})

        results = tune.Tuner(
            train,
            param_space={"lr": tune.loguniform(1e-4, 1e-1), "layers": tune.grid_search([1, 2])},
            tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=10),
        ).fit()
        print(results.get_best_result().config)

    Args:
        trainable: A function that takes a dict of parameters, what `with_resources` has made of one, or a `TorchTrainer`.
        param_space: The parameters: values, and what `grid_search`, `choice`, `uniform` and so on return. For a `TorchTrainer`,
            "train_loop_config" is put over that of the trainer, and "scaling_config" in place of that of the trainer.
        tune_config: What is tried, and how many trials run at a time.
        run_config: The name and the folder of all trials, and how each runs.

    Raises:
        TypeError: The trainable is none of these, or a grid is no list.
        ValueError: A grid has no values, or the space has parameters that the trainer, or its loop, does not take.
        NotImplementedError: An option is refused.
    """

    def __init__(
        self,
        trainable: Any,
        *,
        param_space: Mapping[str, Any] | None = None,
        tune_config: TuneConfig | None = None,
        run_config: TrainRunConfig | None = None,
    ) -> None:
        if isinstance(trainable, type):
            raise refuse("a class as a trainable", "give Tuner a function that calls tune.report")
        if not isinstance(trainable, (TorchTrainer, _trainable.WithResources)) and not callable(trainable):
            raise TypeError(f"a trainable must be a function or a TorchTrainer, not {trainable!r:.100}")
        self.param_space = dict(param_space or {})
        check_grids(self.param_space)
        other = sorted(set(self.param_space) - {"train_loop_config", "scaling_config"})
        if isinstance(trainable, TorchTrainer) and other:
            raise ValueError(
                f'param_space[{other[0]!r}]: a TorchTrainer takes "train_loop_config" and "scaling_config"; '
                f'use {{"train_loop_config": {{{other[0]!r}: …}}}}'
            )
        if isinstance(trainable, TorchTrainer) and _trial.LOOP_CONFIG in self.param_space:
            copy.copy(trainable).configure({}, trainable.scaling_config)  # raises if the loop takes none
        self.trainable = trainable
        self.tune_config = tune_config or TuneConfig()
        self.run_config = run_config or RunConfig()
        _trial.run_config_of(trainable, self.run_config)
        self._left: _Left | None = None
        self._results: ResultGrid | None = None

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        trainable: Any,
        *,
        resume_unfinished: bool = True,
        resume_errored: bool = False,
        restart_errored: bool = False,
        param_space: Mapping[str, Any] | None = None,
        storage_filesystem: Any = None,
    ) -> Tuner:
        """A tuner that goes on with the trials of another, whose program has ended.

        Its `fit` keeps the results of trials that had ended. Those that ran go on from their newest checkpoints, and without one
        begin anew. Then it tries what is left to be tried.

        Args:
            path: The folder of its trials, `storage_path/name`, or its `file://` URL. It is read with pickle: restore only what
                you trust.
            trainable: The same trainable.
            resume_unfinished: Whether trials that ran go on; else they count as stopped.
            resume_errored: Whether trials that had failed go on from their newest checkpoints.
            restart_errored: Whether trials that had failed begin anew.
            param_space: The same space, to be sure that it is. None for that of the tuner.
            storage_filesystem: Ray's; refused.

        Returns:
            The tuner.

        Raises:
            FileNotFoundError: There is no such folder of a tuner.
            ValueError: Failed trials are both to go on and to begin anew, or the space is another.
            NotImplementedError: An option, or a URL of another scheme, is refused.
        """
        if resume_errored and restart_errored:
            raise ValueError("failed trials either go on (resume_errored) or begin anew (restart_errored)")
        if storage_filesystem is not None:
            raise refuse("Tuner.restore(storage_filesystem=…)", "give the path of a folder that all nodes share")
        folder = _folder(path)
        if folder is None:
            raise refuse(f"Tuner.restore({os.fspath(path)!r})", "copy it to a folder that all nodes share, and restore that")
        state = _experiment.load(folder)
        differs = None if param_space is None else first_difference(state["param_space"], param_space)
        if differs is not None:
            raise ValueError(
                f"param_space differs in {differs!r} from that of the trials in {folder}, which go on with theirs: leave it out, "
                "or start another search, with another name"
            )
        tuner = cls(trainable, param_space=state["param_space"], tune_config=state["tune_config"], run_config=state["run_config"])
        tuner._left = _Left(folder, resume_unfinished, resume_errored, restart_errored)
        return tuner

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> bool:
        """Whether a folder has trials of a tuner, to go on with.

        Args:
            path: The folder, `storage_path/name`, or its `file://` URL. Other URLs have none that `restore` takes.
            storage_filesystem: Ray's; refused.

        Returns:
            Whether it has.

        Raises:
            NotImplementedError: An option is refused.
        """
        if storage_filesystem is not None:
            raise refuse("Tuner.can_restore(storage_filesystem=…)", "give the path of a folder that all nodes share")
        folder = _folder(path)
        return folder is not None and _experiment.can_restore(folder)

    def get_results(self) -> ResultGrid:
        """The results of `fit`; of a tuner that was restored, before it, what is known of the trials in its folder.

        Returns:
            What came of the trials. Those that had not ended when their program did have what they had reported.

        Raises:
            RuntimeError: There are none yet.
        """
        if self._results is not None:
            return self._results
        if self._left is None:
            raise RuntimeError("there are no results yet: call fit(), or go on with the trials of a folder with Tuner.restore")
        folder = self._left.folder
        trials = [Trial.of(about, folder, _runs_nothing) for about in _experiment.load(folder)["trials"]]
        return _results(trials, folder, self.tune_config)

    def fit(self) -> ResultGrid:
        """Runs all trials. How far they are is shown meanwhile.

        A trial that fails does not end the others. Ctrl-C asks all trials to end, which then have `RunConfig.grace_s` to save
        what they have. A second one kills them. SIGTERM does so, too, and then ends this program, if `fit` runs in its main
        thread and the program does not handle the signal itself. Files of the trials stay.

        Returns:
            What came of them.

        Raises:
            TuneError: A trial failed, and `TuneConfig.raise_on_failed_trial` is set.
            FileExistsError: The folder has trials already.
            OSError: The folder cannot be made.
            ClusterLostError: The head or the node that it had started has ended, or the head that was named does not answer any
                more. Trials that ran are killed.
            RuntimeError: The cluster cannot be reached, or not be started.
        """
        if self._left is not None:
            folder = self._left.folder
        else:
            name = self.run_config.name or _storage.name_of(self.run_config).replace("torch_trainer", "tune", 1)
            folder = _storage.folder_of(TrainRunConfig(name=name, storage_path=self.run_config.storage_path), name)
        if "://" in folder:
            raise refuse(
                f"storage_path={os.fspath(self.run_config.storage_path or '')!r}",
                "metrics are read while trials run: give a folder, which all nodes share",
            )
        with _terminated.raised():
            experiment = _experiment.Experiment(folder, is_new=self._left is None)
            try:
                with cluster() as on:
                    run, scaling = _trial.runner(self.trainable, self.run_config, on.env)
                    grid = self._results = _Fitting(self, experiment, run, on).fit(scaling)
            finally:
                experiment.close()
        if self.tune_config.raise_on_failed_trial and grid.errors:
            first = grid.errors[0]
            raise TuneError(f"{grid.num_errors} of {len(grid)} trials failed; the first: {first}", grid) from first
        return grid


@dataclass(frozen=True)
class _Left:
    """What another program has left, and which of its trials go on."""

    folder: str
    resume_unfinished: bool
    resume_errored: bool
    restart_errored: bool


def _folder(path: str | os.PathLike[str]) -> str | None:
    """A folder on this machine; None if it is elsewhere."""
    local = _storage.local_path(os.fspath(path))
    return None if local is None else os.path.abspath(os.path.expanduser(local))


def _scalings(space: Mapping[str, Any], usual: Any) -> list[ScalingConfig]:
    """What trials may hold: what `param_space` says, where a searcher may say anything, and else what is usual."""
    given = space.get("scaling_config", usual)
    values = given[GRID] if is_grid(given) else given.categories if isinstance(given, Categorical) else [given]
    return [one for one in values if isinstance(one, ScalingConfig)] or [usual]


def _held(scaling: ScalingConfig) -> tuple[float, float]:
    """The CPUs and GPUs of all ranks."""
    held, ranks = scaling.resources_per_worker or {}, scaling.workers[0]
    return held.get("CPU", 1) * ranks, held.get("GPU", 1 if scaling.use_gpu else 0) * ranks


def _runs_nothing(trial: Trial) -> Any:
    raise RuntimeError(f"{trial.trial_id} is not to be run here")


def _results(trials: Sequence[Trial], folder: str, config: TuneConfig) -> ResultGrid:
    results = [
        Result(
            metrics=dict(trial.last),
            checkpoint=trial.checkpoints[-1][0] if trial.checkpoints else None,
            path=str(trial.folder),
            error=trial.error if isinstance(trial.error, TrialError) else None,
            best_checkpoints=trial.checkpoints,
            config=trial.config,
            trial_id=trial.trial_id,
            reports=trial.counted,
            was_stopped=trial.is_stopped,
        )
        for trial in trials
    ]
    return ResultGrid(results, folder, config.metric, config.mode)


class _Fitting(Engine[Trial]):
    """One call of `fit`."""

    def __init__(self, tuner: Tuner, experiment: _experiment.Experiment, run: Callable[[Trial], Any], cluster: Cluster) -> None:
        self._tuner, self._config, self._experiment = tuner, tuner.tune_config, experiment
        self._run, self._cluster = run, cluster
        super().__init__(Display(self._config.metric, self._config.mode))
        self._stop = dict(getattr(tuner.run_config, "stop", None) or {})
        # What is compared, and by what name it is asked for; and what trials have reported.
        self._wanted = {name: f"RunConfig(stop={{{name!r}: …}})" for name in self._stop}
        compare = (self._config, self._config.scheduler, self._config.search_alg)
        for name in (getattr(one, "metric", None) for one in compare):
            if name is not None:
                self._wanted[name] = f"metric={name!r}"
        self._reported: set[str] = set()
        self._missed: set[str] = set()
        self._again: list[Trial] = []
        # Those that have ended once, of which the searcher has learned, and that are tried again.
        self._known: set[str] = set()
        self._is_saved, self._save_again = True, 0.0
        # Whether more is known than was written.
        self._is_changed = False
        if tuner._left is None:
            self._scheduler, self._searcher = schedulers.of(self._config.scheduler), self._config.searcher()
            self._scheduler.set_search_properties(self._config.metric, self._config.mode)
            self._searcher.begin(tuner.param_space, self._config.num_samples, self._config.metric, self._config.mode)
        else:
            self._restore(tuner._left, _experiment.load(experiment.folder))

    def _restore(self, left: _Left, state: Mapping[str, Any]) -> None:
        self._scheduler, self._searcher = state["scheduler"], state["searcher"]
        self._known.update(state.get("known", ()))
        _trial.wait_for_commands(
            [self._experiment.folder_of(about["trial_id"]) for about in state["trials"] if about["status"] == RUNNING],
            self.display.say,
        )
        for about in state["trials"]:
            self.trials.append(Trial.of(about, self._experiment.folder, self._run))
        self._reported.update(name for trial in self.trials for metrics in trial.reports for name in metrics)
        for trial in self.trials:
            if trial.status == ERROR and (left.resume_errored or left.restart_errored):
                self._known.add(trial.trial_id)
                self._put_back(trial, from_checkpoint=left.resume_errored)
            elif trial.status == PENDING:  # it was to be started again
                self._put_back(trial, from_checkpoint=not trial.begins_anew)
            elif trial.status == RUNNING:
                # What was reported after all that was saved is news to the scheduler and the searcher.
                for number, metrics in enumerate(trial.reports, 1):
                    if trial.enough is not None:
                        break
                    if self._is_done(metrics) if number <= trial.heard else self.is_enough(trial, metrics):
                        trial.enough = number
                is_enough = trial.enough is not None
                if is_enough or (trial.is_stopped and trial.has_begun) or not left.resume_unfinished:
                    trial.status, trial.is_stopped, trial.ended = TERMINATED, True, trial.launched
                    self.on_end(trial)
                else:
                    self._put_back(trial)

    def _put_back(self, trial: Trial, from_checkpoint: bool = True) -> None:
        trial.again(from_checkpoint)
        self._again.append(trial)

    def _save(self) -> None:
        """Writes what another program needs to go on. If that is impossible, says so, once."""
        state = {
            "param_space": self._tuner.param_space,
            "tune_config": self._config,
            "run_config": self._tuner.run_config,
            "scheduler": self._scheduler,
            "searcher": self._searcher,
            "trials": [trial.state() for trial in self.trials],
            "known": sorted(self._known),
        }
        try:
            self._experiment.save(state)
            self._is_changed = False
        except Exception as error:
            if self._is_saved:
                self.display.say(f"wingbeat tune: Tuner.restore will not know these trials: {type(error).__name__}: {error}")
            self._is_saved, self._save_again = False, time.monotonic() + _SAVE_AGAIN_S

    def fit(self, scaling: Any) -> ResultGrid:
        if self._config.max_concurrent_trials is None:
            space = self._tuner.param_space if isinstance(self._tuner.trainable, TorchTrainer) else {}
            self.most = max(slots(self._cluster.env, *_held(one)) for one in _scalings(space, scaling))
        else:
            self.most = self._config.max_concurrent_trials
        self._slots = self.most
        if self._config.max_concurrent_trials is None and self._config.search_alg is None:
            # Some wait at the head, and are placed as soon as others have ended. A search algorithm would know less of these.
            self.most += min(self.most, _WAITING)
        budget = self._config.time_budget_s
        until = None if budget is None else time.monotonic() + budget
        self.run(until)
        if self._again or self._is_changed:
            self._save()
        for trial in self._again:  # for which there was no time any more, and which another program tries
            trial.status, trial.is_stopped = TERMINATED, True
        early = [trial for trial in self.trials if trial.is_stopped and not trial.reports]
        if self.is_over and early:
            self.display.say(f"wingbeat tune: time_budget_s={budget:g} was over before {len(early)} trials had reported anything")
        return _results(self.trials, self._experiment.folder, self._config)

    def has_room(self) -> bool:
        running = self.running()
        # Commands of those that will wait take no time from those that are starting.
        all_began = sum(not trial.waits for trial in running) >= self._slots
        return len(running) < (self.most if all_began else self._slots)

    def next_trial(self) -> Trial | None:
        if self._again:
            return self._again.pop(0)
        trial_id = f"trial_{len(self.trials):05}"
        config = self._searcher.suggest(trial_id)
        return None if config is None else Trial(trial_id, config, self._experiment.folder, self._run)

    def start(self, trial: Trial, done: queue.SimpleQueue[_trials.Trial]) -> None:
        trial.launch()
        self._save()  # before it can be seen that it runs
        super().start(trial, done)

    def is_enough(self, trial: Trial, metrics: Mapping[str, float]) -> bool:
        self._reported.update(metrics)
        for name in self._wanted.keys() - metrics.keys() - self._reported - self._missed:
            self._missed.add(name)
            self.display.say(f"wingbeat tune: {trial.trial_id} reports no {name!r}, as {self._wanted[name]} says")
        if trial.trial_id not in self._known:
            self._searcher.on_trial_result(trial.trial_id, metrics)
        return self._scheduler.on_trial_result(trial.trial_id, metrics) == schedulers.STOP or self._is_done(metrics)

    def _is_done(self, metrics: Mapping[str, float]) -> bool:
        """Whether a trial that reports this has done what `RunConfig.stop` asks for."""
        return any(metrics.get(name, float("-inf")) >= value for name, value in self._stop.items())

    def stop_early(self, trial: Trial) -> None:
        if not trial.is_stopped:
            trial.stop(signal.SIGTERM)

    def on_end(self, trial: Trial) -> None:
        if isinstance(trial.error, TrialError) and isinstance(trial.error.__cause__, TrainingError):
            self._cluster.check()  # all trials may have failed with it at once
            if not self._cluster.answers():
                self.display.say("wingbeat tune: the cluster does not answer; trials wait for it")
                self._cluster.wait()
                self._put_back(trial)
                self.has_more = True
                return
        if self.is_over and trial.status == TERMINATED and trial.is_stopped and not trial.has_begun:
            self._put_back(trial)
            self._is_changed = True
            return
        for name, said in self._wanted.items():
            if trial.status == TERMINATED and not trial.is_stopped and trial.enough is None and name not in self._reported:
                raise ValueError(
                    f"{trial.trial_id} has ended, and no trial has reported {name!r}, as {said} says; reported were "
                    f"{', '.join(map(repr, sorted(self._reported))) or 'no metrics: call tune.report, or return a dict'}"
                )
        if trial.trial_id not in self._known:
            self._searcher.on_trial_complete(trial.trial_id, trial.last or None, error=trial.status == ERROR)
        self._scheduler.on_trial_complete(trial.trial_id)
        if trial.status == ERROR:
            self.display.say(f"wingbeat tune: {trial.error}; what it printed is in {trial.folder / 'output.txt'}")
        self._is_changed = True

    def check(self) -> None:
        self._cluster.check()
        # Else, another trial is started now, before which all is written.
        if self._is_changed and not (self.has_more and self.has_room()) and time.monotonic() >= self._save_again:
            self._save()

    def end_all(self, error: BaseException) -> None:
        if self._is_changed:
            self._save()
        # Without the cluster, they would wait for it.
        asked = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        self._end_all(signal.SIGKILL if isinstance(error, ClusterLostError) else asked)

    def _end_all(self, number: int) -> None:
        running = self.running()
        if number == signal.SIGKILL:
            self.display.say(f"wingbeat tune: {len(running)} trials are killed")
        else:
            self.display.say(f"wingbeat tune: {len(running)} trials are asked to end, and may save what they have")
        grace_s = _trial.run_config_of(self._tuner.trainable, self._tuner.run_config).grace_s
        for each in (number, number, signal.SIGKILL):
            for trial in running:
                trial.stop(each)
            until = time.monotonic() + (_KILLED_S if each == signal.SIGKILL else grace_s + _ENDING_S)
            try:
                if all([trial.join(max(0, until - time.monotonic())) for trial in running]):
                    return
            except BaseException:  # asked again: now
                continue
