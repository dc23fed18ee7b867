"""`wingbeat.tune`: what is tried, what ends early, what fails, and what is left."""

import contextlib
import dataclasses
import datetime
import enum
import io
import json
import math
import os
import pty
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import DEADLINE_SECONDS, one_node

from wingbeat import train, tune
from wingbeat.tune import _space, schedulers
from wingbeat.tune.schedulers import CONTINUE, STOP, ASHAScheduler
from wingbeat.tune.search import BasicVariantGenerator, Searcher
from wingbeat.tune.search.optuna import OptunaSearch


@pytest.fixture(scope="module")
def four_cpus(binary, environment, tmp_path_factory):
    """A cluster of one node with 4 CPUs, for this module: its warm Python serves all trials."""
    with one_node(binary, environment, tmp_path_factory.mktemp("cluster")) as env:
        yield env


@pytest.fixture
def on_cluster(four_cpus, monkeypatch):
    """This process is a user of that cluster."""
    for name, value in four_cpus.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def fit(on_cluster, tmp_path):
    """Tries parameters, in a folder of the test's own."""

    def fit(trainable, space=None, run=None, **config):
        run = run or tune.RunConfig(name="tried", storage_path=tmp_path)
        return tune.Tuner(trainable, param_space=space, tune_config=tune.TuneConfig(**config), run_config=run).fit()

    return fit


def test_each_combination_of_the_grid_is_tried_and_the_best_is_known(fit, tmp_path):
    def square(config):
        for step in range(1, 4):
            tune.report({"loss": (config["x"] - 2) ** 2 + config["more"]["y"] / step, "step": step})

    space = {"x": tune.grid_search([1, 2, 3]), "more": {"y": tune.grid_search([0.0, 0.5]), "z": "fixed"}}
    grid = fit(square, space, metric="loss", mode="min")
    assert len(grid) == 6 and grid.num_errors == 0 and grid.num_terminated == 6
    assert [result.config["x"] for result in grid] == [1, 1, 2, 2, 3, 3]
    best = grid.get_best_result()
    assert best.config == {"x": 2, "more": {"y": 0.0, "z": "fixed"}} and best.metrics["loss"] == 0
    assert grid.get_best_result("loss", "max", scope="all").metrics_dataframe["loss"].tolist()[0] == 1.5
    frame = grid.get_dataframe()
    assert sorted(frame["config/more/y"]) == [0.0] * 3 + [0.5] * 3 and frame["training_iteration"].tolist() == [3] * 6
    assert grid.get_dataframe("loss", "max")["loss"].max() == 1.5
    assert json.loads((tmp_path / "tried/trial_00002/params.json").read_text())["x"] == 2
    with pytest.raises(RuntimeError, match="no trial has reported 'accuracy'; reported were 'loss'"):
        grid.get_best_result("accuracy", "max")
    with pytest.raises(FileExistsError, match="give RunConfig another name"):
        fit(square, space)


def test_what_a_function_returns_is_its_last_report_and_further_arguments_reach_it(fit):
    def add(config, data):
        return {"sum": config["x"] + sum(data)}

    (result,) = fit(tune.with_parameters(add, data=list(range(1000))), {"x": 1})
    assert result.metrics["sum"] == 499501


def test_what_a_function_returns_or_yields_is_reported_as_ray_does(fit, tmp_path):
    def number(config):
        return 3

    def yields(config):
        yield {"x": 1}
        yield {"x": 2}

    def wrong(config):
        return [1]

    run = tune.RunConfig(name="yields", storage_path=tmp_path)
    assert fit(number)[0].metrics["_metric"] == 3
    assert [report["x"] for report in fit(yields, run=run)[0].reports] == [1, 2]
    run.name = "wrong"
    assert "TypeError: the function returned a list" in str(fit(wrong, run=run).errors[0])


def test_each_trial_has_its_folder_and_knows_it(fit, tmp_path, monkeypatch):
    def train(config):
        before = Path(os.environ.get("TUNE_ORIG_WORKING_DIR", "none"))
        Path("model").write_text(str(config["x"]))
        context = tune.get_context()
        assert context.get_trial_name() == context.get_trial_id() and before.is_absolute()
        Path("said").write_text(f"{context.get_trial_id()} {context.get_trial_dir()} {context.get_experiment_name()}")
        with pytest.raises(NotImplementedError, match="get_trial_resources"):
            context.get_trial_resources()

    grid = fit(train, {"x": tune.grid_search([1, 2])})
    assert not grid.errors, grid.errors
    assert [Path(result.path, "model").read_text() for result in grid] == ["1", "2"]
    assert Path(grid[1].path, "said").read_text() == f"trial_00001 {grid[1].path} tried"
    assert tune.get_context().get_trial_id() is None and tune.get_context().get_trial_dir() is None
    monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "0")
    (result,) = fit(lambda config: {"same": os.getcwd() == config["here"]}, {"here": os.getcwd()}, tune.RunConfig(name="stays", storage_path=tmp_path))
    assert result.metrics["same"] == 1


def test_a_function_that_has_returned_is_not_stopped(tmp_path, monkeypatch):
    from wingbeat.tune import _called

    before, here = signal.getsignal(signal.SIGTERM), os.getcwd()
    monkeypatch.setattr("wingbeat.train._report.report", lambda metrics: None)
    try:
        _called.run(lambda config: {"x": 1}, {}, str(tmp_path))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # where Python would call the handler
    finally:
        signal.signal(signal.SIGTERM, before)
        os.chdir(here)
        os.environ.pop("TUNE_ORIG_WORKING_DIR")


def test_a_budget_that_is_over_before_anything_is_reported_is_told(fit, capfd):
    grid = fit(lambda config: time.sleep(60), num_samples=2, time_budget_s=0.5)
    assert len(grid) == 2 and grid.num_errors == 0
    assert "time_budget_s=0.5 was over before 2 trials had reported anything" in capfd.readouterr().err


def test_a_trial_that_is_worse_is_stopped_early_and_may_end_cleanly(fit, tmp_path):
    def climb(config):
        try:
            for step in range(4):
                tune.report({"score": config["slope"] * (step + 1)})
                if config["slope"] == 1:
                    while True:  # a signal just before `pause` would be missed
                        time.sleep(0.01)
        finally:
            (tmp_path / f"left-{config['slope']}").touch()

    scheduler = ASHAScheduler(max_t=100, grace_period=1, reduction_factor=2)
    grid = fit(climb, {"slope": tune.grid_search([10, 1, 20])}, metric="score", mode="max", scheduler=scheduler, max_concurrent_trials=1)
    assert [result.was_stopped for result in grid] == [False, True, False]
    assert [len(result.reports) for result in grid] == [4, 1, 4] and grid.num_errors == 0
    assert (tmp_path / "left-1").exists() and grid.get_best_result().config == {"slope": 20}


def test_a_trial_that_has_reported_enough_is_stopped(fit, tmp_path):
    def count(config):
        for step in range(3):
            tune.report({"step": step})
        while True:  # a signal just before `pause` would be missed
            time.sleep(0.01)

    run = tune.RunConfig(name="tried", storage_path=tmp_path, stop={"training_iteration": 3})
    (result,) = fit(count, run=run)
    assert result.was_stopped and len(result.reports) == 3


def test_a_fast_trial_is_judged_by_what_it_had_reported_when_that_was_enough(fit, tmp_path):
    def run(config):
        for step in range(400):
            tune.report({"loss": step * config["x"]})

    run_config = tune.RunConfig(name="fast", storage_path=tmp_path, stop={"training_iteration": 10})
    grid = fit(run, {"x": tune.grid_search([1, 2, 3])}, run_config, metric="loss", mode="min", max_concurrent_trials=2)
    for results in (grid, tune.Tuner.restore(tmp_path / "fast", run).get_results()):
        assert [result.metrics["loss"] for result in results] == [9, 18, 27], "each is compared at the same iteration"
        assert [len(result.reports) for result in results] == [10] * 3 and results.get_best_result().config == {"x": 1}


def test_a_run_of_its_own_does_not_go_on_from_a_checkpoint_that_was_reported_outside_of_it(fit, tmp_path, monkeypatch):
    def loop(config):
        begins = train.get_checkpoint() is None
        train.report({"begins": begins}, checkpoint=config["folder"])

    monkeypatch.setattr("wingbeat.train._report._reported_here", None)
    (tmp_path / "saved").mkdir()
    loop({"folder": str(tmp_path / "saved")})  # as one tries it here first
    assert train.get_checkpoint().path == str(tmp_path / "saved")
    (result,) = fit(loop, {"folder": str(tmp_path / "saved")})
    assert result.metrics["begins"] == 1


def test_a_trial_computes_with_as_many_threads_as_it_holds_cpus_unless_it_is_told(fit, tmp_path, monkeypatch):
    def count(config):
        import torch

        return {"threads": torch.get_num_threads()}

    def threads(trainable, name):
        (result,) = fit(trainable, run=tune.RunConfig(name=name, storage_path=tmp_path))
        return result.metrics["threads"]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads(count, "one") == 1
    assert threads(tune.with_resources(count, {"cpu": 2}), "two") == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(count, "told") == 3


def test_a_failing_trial_is_named_with_its_parameters_and_ends_no_other(fit):
    def fails(config):
        if config["x"] == 2:
            raise KeyError("no luck")
        tune.report({"x": config["x"]})

    grid = fit(fails, {"x": tune.grid_search([1, 2, 3]), "rate": 0.25})
    assert [result.error is None for result in grid] == [True, False, True]
    (error,) = grid.errors
    assert str(error) == "trial trial_00001 (x=2, rate=0.25) failed: rank 0: KeyError: 'no luck'"
    assert isinstance(error.__cause__, KeyError) and grid.num_terminated == 2
    assert "in fails" in (Path(grid[1].path) / "output.txt").read_text()


def test_a_failing_trial_is_an_error_in_the_end_if_that_is_asked_for(fit):
    def fails(config):
        raise ValueError("never")

    with pytest.raises(tune.TuneError, match="1 of 1 trials failed; the first: trial trial_00000 .* ValueError: never") as raised:
        fit(fails, raise_on_failed_trial=True)
    assert raised.value.results.num_errors == 1


def test_a_trial_goes_on_from_its_checkpoint_after_a_failure(fit, tmp_path):
    def resumes(config):
        import tempfile

        start = 0
        if checkpoint := tune.get_checkpoint():
            start = int((Path(checkpoint.path) / "step").read_text()) + 1
        for step in range(start, 3):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "step").write_text(str(step))
                tune.report({"step": step, "start": start}, checkpoint=tune.Checkpoint.from_directory(folder))
            if step == 1 and start == 0:
                os._exit(1)

    run = tune.RunConfig(name="tried", storage_path=tmp_path, failure_config=tune.FailureConfig(max_failures=1))
    (result,) = fit(resumes, run=run)
    assert result.metrics["start"] == 2 and [report["step"] for report in result.reports] == [0, 1, 2]
    assert (Path(result.checkpoint.path) / "step").read_text() == "2"


def test_reports_are_counted_from_the_checkpoint_on_and_a_failed_trial_has_its_checkpoints(fit, tmp_path):
    def fails(config):
        import tempfile

        for step in range(2):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "x").touch()
                has_one = config["keeps"] and step == 0 and tune.get_checkpoint() is None
                tune.report({"step": step}, checkpoint=tune.Checkpoint.from_directory(folder) if has_one else None)
        raise ValueError("always")

    run = tune.RunConfig(name="tried", storage_path=tmp_path, failure_config=tune.FailureConfig(max_failures=1))
    without, having = fit(fails, {"keeps": tune.grid_search([False, True])}, run=run)
    assert [report["training_iteration"] for report in without.reports] == [1, 2, 1, 2] and without.checkpoint is None
    assert [report["training_iteration"] for report in having.reports] == [1, 2, 2, 3]
    assert Path(having.checkpoint.path, "x").exists() and having.best_checkpoints[-1][1]["training_iteration"] == 1


def test_a_stopped_trial_has_its_checkpoints_and_one_that_crashes_by_itself_has_failed(fit, tmp_path):
    def stopped(config):
        import tempfile

        if config["crashes"]:  # before it is asked to end
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "x").write_text("7")
            tune.report({"loss": 1.0}, checkpoint=tune.Checkpoint.from_directory(folder))
        if config["crashes"]:
            raise RuntimeError("by itself")
        while True:  # a signal just before `pause` would be missed
            time.sleep(0.01)

    run = tune.RunConfig(name="tried", storage_path=tmp_path, stop={"training_iteration": 1})
    paused, crashed = fit(stopped, {"crashes": tune.grid_search([False, True])}, run=run)
    assert paused.was_stopped and paused.error is None and Path(paused.checkpoint.path, "x").read_text() == "7"
    assert isinstance(crashed.error.__cause__, RuntimeError) and crashed.checkpoint is not None


def test_a_trial_is_not_stopped_by_a_report_whose_checkpoint_is_still_being_stored(fit, tmp_path):
    def stopped(config):
        import tempfile

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # which removes the folder
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "large").touch()
            os.truncate(Path(folder, "large"), 300 << 20)
            tune.report({"loss": 1.0}, checkpoint=tune.Checkpoint.from_directory(folder))
        while True:
            time.sleep(0.01)

    run = tune.RunConfig(name="large", storage_path=tmp_path, stop={"training_iteration": 1})
    (result,) = fit(stopped, {}, run=run)
    assert result.error is None and Path(result.checkpoint.path, "large").stat().st_size == 300 << 20


def test_what_a_trial_has_of_its_own_ends_no_other(fit):
    class Odd:
        def __repr__(self):
            raise ValueError("no repr")

    def reports(config):
        tune.report({"y": 1.0, **config["metrics"]})

    metrics = tune.grid_search([{}, {"time": math.nan}, {"attempt": 3.0}, {"training_iteration": math.nan}])
    grid = fit(reports, {"metrics": metrics, "m": {(1, 2): 3}, "odd": Odd()}, metric="y", mode="min", search_alg=None)
    assert [result.error is None for result in grid] == [True, False, False, True]
    assert "the metric 'time' has the name of what is recorded with each report" in str(grid.errors[0])


def test_a_folder_that_cannot_be_made_is_the_error_of_its_trial(tmp_path):
    import queue

    from wingbeat.tune._trial import ERROR, Trial

    (tmp_path / "full").touch()
    trial, done = Trial("trial_00000", {}, str(tmp_path / "full"), lambda trial: []), queue.SimpleQueue()
    trial.start(done)
    assert done.get(timeout=DEADLINE_SECONDS) is trial
    trial.finish()
    assert trial.status == ERROR and "NotADirectoryError" in str(trial.error)


def test_text_of_parameters_is_no_markup():
    from rich.console import Console

    from wingbeat._trials._display import Display
    from wingbeat.tune._trial import Trial

    trial = Trial("trial_00000", {"prompt": "[INST] {} [/INST]"}, "/nowhere", lambda trial: [])
    trial.reports = [{"loss[/val]": 1.0, "loss": 2.0}]
    shown, display = io.StringIO(), Display("loss", "min")
    Console(file=shown, width=200).print(display._table([trial], display._line([trial])))
    assert "[INST] {} [/INST]" in shown.getvalue() and "loss[/val] 1" in shown.getvalue()


def test_a_trainer_s_trials_run_as_the_tuner_says(fit, tmp_path):
    def fails(config):
        print("BEGUN", flush=True)
        raise ValueError("always")

    twice = tune.RunConfig(name="tried", storage_path=tmp_path, failure_config=tune.FailureConfig(max_failures=1))
    (result,) = fit(train.TorchTrainer(fails), run=twice)
    assert (Path(result.path) / "output.txt").read_text().count("BEGUN") == 2
    thrice = train.TorchTrainer(fails, run_config=train.RunConfig(failure_config=train.FailureConfig(max_failures=2)))
    with pytest.raises(ValueError, match="RunConfig.failure_config is .*max_failures=1.* for Tuner and .*max_failures=2"):
        tune.Tuner(thrice, run_config=twice)


def test_trials_run_at_the_same_time_as_far_as_their_resources_allow(fit, tmp_path):
    def counts(config):
        # Waits until it has seen another, which with 3 of 4 CPUs never is there.
        (tmp_path / f"here-{config['x']}").touch()
        others = len(list(tmp_path.glob("here-*")))
        while config["waits"] and others < 2:
            time.sleep(0.01)
            others = len(list(tmp_path.glob("here-*")))
        tune.report({"others": others})
        (tmp_path / f"here-{config['x']}").unlink()
        return None

    space = {"x": tune.grid_search([1, 2]), "waits": False}
    alone = fit(tune.with_resources(counts, {"cpu": 3}), space)
    assert [result.metrics["others"] for result in alone] == [1, 1]

    def meets(config):
        (tmp_path / f"there-{config['x']}").touch()
        while len(list(tmp_path.glob("there-*"))) < 2:
            time.sleep(0.01)

    run = tune.RunConfig(name="both", storage_path=tmp_path)
    both = fit(tune.with_resources(meets, {"cpu": 2}), {"x": tune.grid_search([1, 2])}, run=run)
    assert both.num_errors == 0


def test_two_trials_share_a_gpu(gpu_cluster, tmp_path, monkeypatch):
    for name, value in gpu_cluster.items():
        monkeypatch.setenv(name, value)

    def meets(config):
        (tmp_path / f"there-{config['x']}").touch()
        while len(list(tmp_path.glob("there-*"))) < 2:
            time.sleep(0.01)
        (tmp_path / f"gpu-{config['x']}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])

    half = tune.with_resources(meets, {"cpu": 1, "gpu": 0.5})
    grid = tune.Tuner(half, param_space={"x": tune.grid_search([1, 2])}, run_config=tune.RunConfig(storage_path=tmp_path)).fit()
    assert grid.num_errors == 0, grid.errors
    assert (tmp_path / "gpu-1").read_text() == (tmp_path / "gpu-2").read_text() == "5"


def test_a_trainer_is_tried_with_its_own_ranks_and_files(fit, tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"x": range(10)}), tmp_path / "rows.parquet")

    def loop(config):
        rows = sum(len(batch["x"]) for batch in train.get_dataset_shard("train").iter_batches(batch_size=config["size"]))
        train.report({"rows": rows, "ranks": train.get_context().get_world_size(), "kept": config["kept"]})

    trainer = train.TorchTrainer(
        loop, train_loop_config={"size": 0, "kept": 7}, datasets={"train": tmp_path / "rows.parquet"},
        scaling_config=train.ScalingConfig(num_workers=2),
    )
    grid = fit(trainer, {"train_loop_config": {"size": tune.grid_search([2, 5])}})
    assert [(one.metrics["rows"], one.metrics["ranks"], one.metrics["kept"]) for one in grid] == [(5, 2, 7)] * 2
    with pytest.raises(ValueError, match="use {\"train_loop_config\": {'size': …}}"):
        tune.Tuner(trainer, param_space={"size": 1})


def test_a_trainer_whose_loop_takes_no_argument_is_tried(fit):
    def loop():
        train.report({"ranks": train.get_context().get_world_size()})

    space = {"scaling_config": tune.grid_search([train.ScalingConfig(num_workers=ranks) for ranks in (1, 2)])}
    assert [result.metrics["ranks"] for result in fit(train.TorchTrainer(loop), space)] == [1, 2]
    with pytest.raises(ValueError, match="loop takes no argument, and there is a train_loop_config"):
        tune.Tuner(train.TorchTrainer(loop), param_space={"train_loop_config": {"x": tune.choice([1])}})


def test_a_searcher_learns_from_what_trials_report(fit):
    class Halves(Searcher):
        """Halves x until that is no better."""

        def __init__(self):
            self.x, self.heard = 8.0, []

        def suggest(self, trial_id):
            return {"x": self.x} if len(self.heard) < 2 * 3 else None

        def on_trial_result(self, trial_id, result):
            self.heard.append((trial_id, result["y"]))

        def on_trial_complete(self, trial_id, result=None, error=False):
            self.heard.append((trial_id, error))
            self.x /= 2

    searcher = Halves()
    grid = fit(lambda config: {"y": config["x"] ** 2}, search_alg=searcher, max_concurrent_trials=1)
    assert [result.metrics["y"] for result in grid] == [64, 16, 4]
    assert searcher.heard[:2] == [("trial_00000", 64), ("trial_00000", False)]


def test_optuna_chooses_parameters(fit):
    space = {"x": tune.uniform(-10, 10), "kind": tune.choice(["a", None])}
    search = OptunaSearch(seed=1, points_to_evaluate=[{"x": 3.0, "kind": None}])
    grid = fit(lambda config: {"y": config["x"] ** 2}, space, metric="y", mode="min", num_samples=3, search_alg=search, max_concurrent_trials=1)
    assert grid[0].config == {"x": 3.0, "kind": None} and len(grid) == 3


def test_optuna_finds_better_parameters_than_chance():
    space = {"x": tune.uniform(-10, 10), "n": tune.randint(0, 8), "rate": tune.loguniform(1e-4, 1), "kind": tune.choice([(1, 2), "b"])}

    def loss(config):
        return (config["x"] - 3) ** 2 + config["n"] + abs(math.log10(config["rate"]) + 2) + (config["kind"] == "b")

    def of_the_last(search):
        search.begin(space, 60, "loss", "min")
        values = []
        while (config := search.suggest(f"trial_{len(values)}")) is not None:
            assert -10 <= config["x"] <= 10 and config["n"] in range(8) and config["kind"] in ((1, 2), "b")
            values.append(loss(config))
            name = f"trial_{len(values) - 1}"
            search.on_trial_result(name, {"loss": values[-1], "training_iteration": 1})
            search.on_trial_complete(name, {"loss": values[-1]}, error=len(values) == 5)
        assert len(values) == 60
        return sum(values[30:])

    found, again = of_the_last(OptunaSearch(seed=0)), of_the_last(OptunaSearch(seed=0))
    assert found == again < of_the_last(BasicVariantGenerator(random_state=0)) / 2
    with pytest.raises(ValueError, match="'x'.*takes no grid_search"):
        OptunaSearch().begin({"x": tune.grid_search([1])}, 1, "loss", "min")
    with pytest.raises(ValueError, match="give TuneConfig.metric"):
        OptunaSearch().begin({}, 1, None, None)


def test_asha_lets_the_best_part_of_a_milestone_go_on():
    scheduler = ASHAScheduler(max_t=16, grace_period=2, reduction_factor=2, metric="loss", mode="min")

    def at(trial, step, loss):
        return scheduler.on_trial_result(trial, {"loss": loss, "training_iteration": step})

    assert at("a", 1, 9.0) == CONTINUE  # before the grace
    assert at("a", 2, 1.0) == CONTINUE  # the first
    assert at("b", 2, 2.0) == STOP
    assert at("c", 2, 0.5) == CONTINUE
    assert at("d", 2, 1.0) == CONTINUE  # as good as the middle of 1.0, 2.0 and 0.5
    assert at("e", 2, float("nan")) == STOP
    assert at("a", 3, 5.0) == CONTINUE  # between two milestones
    assert at("a", 4, 1.0) == CONTINUE
    assert at("c", 5, 1.1) == STOP  # it has passed 4 without a report
    assert at("a", 16, 0.0) == STOP  # max_t
    with pytest.raises(ValueError, match="does not report it"):
        scheduler.on_trial_result("a", {"loss": 1.0})


def test_asha_decides_once_at_the_latest_milestone_that_a_trial_has_passed():
    def at(trial, epoch, score):
        return asha.on_trial_result(trial, {"epoch": epoch, "score": score})

    asha = ASHAScheduler("epoch", "score", "max", max_t=100, grace_period=1, reduction_factor=4)
    for epoch in (10, 20, 30, 40):  # it reports seldom
        assert at("slow", epoch, 0.9) == CONTINUE
    for number in range(4):
        assert at(f"fast{number}", 1, 0.5 + number / 100) == CONTINUE, "those that are early are compared with one another"
    asha = ASHAScheduler("epoch", "score", "max", max_t=100, grace_period=4, reduction_factor=4)
    assert [at(trial, 20, 0.9 if trial == "a" else 0.95) for trial in "abcd"].count(CONTINUE) == 4
    assert [at(trial, 25, 0.5) for trial in "dcba"] == [CONTINUE] * 4, "it has passed no other milestone"


def test_asha_goes_on_with_the_best_beside_trials_that_diverge_and_forgets_earlier_ones():
    scheduler = ASHAScheduler(max_t=100, grace_period=1)

    def tried(*values):
        return [scheduler.on_trial_result(f"trial_{n}", {"y": value, "training_iteration": 1}) for n, value in enumerate(values)]

    nan, inf = math.nan, math.inf
    scheduler.set_search_properties("y", "min")
    assert tried(nan, 5.0, 0.001, inf, 0.0001) == [STOP, CONTINUE, CONTINUE, STOP, CONTINUE]
    scheduler.set_search_properties("y", "max")
    assert tried(1.0, 0.0, 2.0, -inf) == [CONTINUE, STOP, CONTINUE, STOP]


def test_lists_have_parameters_too():
    space = {"m": [tune.uniform(0, 1), {"n": tune.grid_search([1, 2])}], "t": ("a", (tune.choice([7]), 5)), "kept": [1, [2]],
             "f": [tune.sample_from(lambda config: config["m"][1]["n"] * 10)]}
    configs = list(_space.Configurations(space, 2, random.Random(0)))
    assert [config["m"][1]["n"] for config in configs] == [1, 2, 1, 2] and [config["f"] for config in configs] == [[10], [20]] * 2
    assert all(0 <= config["m"][0] <= 1 and config["t"] == ("a", (7, 5)) and config["kept"] == [1, [2]] for config in configs)
    search = OptunaSearch(seed=0, points_to_evaluate=[{"m": [0.5]}])
    search.begin({"m": [tune.uniform(0, 1), tune.choice(["a"])], ("k", 1): tune.uniform(0, 1)}, 2, "y", "min")
    first, second = search.suggest("a"), search.suggest("b")
    assert first["m"] == [0.5, "a"] and 0 < second["m"][0] < 1 and ("k", 1) in first


def test_optuna_draws_multiples_and_logarithms():
    import optuna

    search = OptunaSearch(sampler=optuna.samplers.RandomSampler(seed=0))
    search.begin({"x": tune.qloguniform(1e-4, 1, 1e-4), "y": tune.quniform(0.1, 1, 0.25), "n": tune.qrandint(3, 20, 5)}, 300, "l", "min")
    drawn = [search.suggest(str(number)) for number in range(300)]
    assert 0.4 < sum(one["x"] < 1e-2 for one in drawn) / 300 < 0.6
    assert {one["y"] for one in drawn} == {0.25, 0.5, 0.75, 1} and {one["n"] for one in drawn} == {5, 10, 15, 20}


def test_optuna_names_a_point_outside_of_its_space_and_a_seed_draws_the_same_again():
    space = {"c": tune.choice(["a", "b"]), "x": tune.uniform(0, 1), "n": tune.randint(1, 3)}
    for point, match in [({"c": "z"}, "'c' is 'z', and has to be one of"), ({"x": 2.0}, "'x' is 2.0, .*from 0 to 1"), ({"n": 3}, "1 to 2")]:
        with pytest.raises(ValueError, match=match):
            OptunaSearch("l", "min", points_to_evaluate=[point]).begin(space, 1, None, None)
    search = OptunaSearch("l", "min", seed=1)
    drawn = []
    for _ in range(2):
        search.begin(space, 3, None, None)
        drawn.append([search.suggest(str(number)) for number in range(3)])
    assert drawn[0] == drawn[1]


def test_functions_of_other_parameters_are_called_in_any_order_and_as_ray_calls_them():
    import numpy as np

    space = {
        "y": tune.sample_from(lambda config: config["x"] + 1),
        "x": tune.sample_from(lambda spec: spec.config.inner.a * 2),
        "z": tune.sample_from(lambda spec: spec["config"].get("y") + spec.config.get("none", 0)),
        "inner": {"a": 3, "b": tune.sample_from(lambda config: config["y"])},
        "same": tune.sample_from(lambda config: config.inner),
        "drawn": tune.sample_from(np.random.rand),
        "now": tune.sample_from(time.time),
    }
    (config,) = _space.Configurations(space, 1, random.Random(0))
    assert (config["x"], config["y"], config["z"], config["inner"]["b"]) == (6, 7, 7, 7)
    assert type(config["same"]) is dict and config["same"] == {"a": 3, "b": 7} and isinstance(config["drawn"], float) and config["now"] > 0
    for wrong, match in [
        ({"x": tune.sample_from(lambda config: config["none"])}, r"param_space\['x'\]: the function .* KeyError: 'none'"),
        ({"x": tune.sample_from(lambda config: config.none)}, "there is no parameter 'none'"),
        ({"x": tune.sample_from(lambda c: c["y"]), "y": tune.sample_from(lambda c: c["x"])}, "ask for each other"),
    ]:
        with pytest.raises(ValueError, match=match):
            list(_space.Configurations(wrong, 1, random.Random(0)))


def test_asha_ends_with_an_error_if_nothing_reports_what_it_compares():
    asha = ASHAScheduler(metric="los", mode="min", max_t=3)
    assert asha.on_trial_result("a", {"training_iteration": 1, "loss": 1.0}) == CONTINUE
    with pytest.raises(ValueError, match="compares 'los', and trial a has come to max_t=3 without it; reported were 'loss'"):
        asha.on_trial_result("a", {"training_iteration": 3, "loss": 1.0})


def test_spaces_hold_what_they_say():
    chosen = random.Random(0)
    drawn = {
        tune.uniform(1, 2): lambda value: 1 <= value <= 2,
        tune.quniform(0, 1, 0.25): lambda value: value in (0, 0.25, 0.5, 0.75, 1),
        tune.loguniform(1e-5, 1e-1): lambda value: 1e-5 <= value <= 1e-1,
        tune.qloguniform(1, 100, 5): lambda value: value % 5 == 0 and 5 <= value <= 100,
        tune.randint(3, 6): lambda value: value in (3, 4, 5),
        tune.qrandint(0, 10, 5): lambda value: value in (0, 5, 10),
        tune.quniform(0.13, 0.9, 0.1): lambda value: round(value * 10) in range(2, 10) and value * 10 == pytest.approx(round(value * 10)),
        tune.qrandint(2, 13, 5): lambda value: value in (5, 10),
        tune.lograndint(1, 100): lambda value: value in range(1, 100),
        tune.choice(["a", "b"]): lambda value: value in ("a", "b"),
        tune.randn(0, 1): lambda value: isinstance(value, float),
    }
    for domain, holds in drawn.items():
        values = [domain.sample(chosen) for _ in range(500)]
        assert all(map(holds, values)) and len(set(values)) > 1, domain
    assert sum(tune.loguniform(1e-4, 1).sample(chosen) < 1e-2 for _ in range(1000)) > 400
    space = {"a": tune.grid_search([1, 2]), "b": tune.sample_from(lambda config: config["a"] * 10), "c": {"d": tune.uniform(0, 1)}}
    configs = list(_space.Configurations(space, 2, chosen))
    assert [(config["a"], config["b"]) for config in configs] == [(1, 10), (2, 20)] * 2
    assert len({config["c"]["d"] for config in configs}) == 4
    again = [list(_space.Configurations(space, 2, random.Random(5))) for _ in range(2)]
    assert again[0] == again[1]
    assert tune.choice(one for one in "ab").categories == ("a", "b") and tune.grid_search(iter([1, 2])) == tune.grid_search([1, 2])
    for wrong in (lambda: tune.uniform(2, 1), lambda: tune.loguniform(0, 1), lambda: tune.choice([]), lambda: tune.grid_search([]),
                  lambda: tune.quniform(0.1, 0.2, 0.5), lambda: tune.qrandint(1, 9, 0)):
        with pytest.raises(ValueError):
            wrong()


@pytest.mark.parametrize("make, error, match", [
    (lambda: tune.Tuner(int), NotImplementedError, "give Tuner a function"),
    (lambda: tune.Tuner(7), TypeError, "must be a function or a TorchTrainer"),
    (lambda: tune.Tuner(print, param_space={"a": {"b": {"grid_search": []}}}), ValueError, "'a/b'.: grid_search needs values, and has none"),
    (lambda: tune.Tuner(print, param_space={"a": [{"grid_search": 3}]}), TypeError, "'a/0'.: grid_search needs a list of values, not 3"),
    (lambda: tune.TuneConfig(mode="best"), ValueError, "mode must be"),
    (lambda: tune.TuneConfig(num_samples=0), ValueError, "num_samples must be"),
    (lambda: tune.TuneConfig(num_samples=-1), ValueError, "needs a time_budget_s"),
    (lambda: tune.TuneConfig(max_concurrent_trials=0), ValueError, "max_concurrent_trials must be"),
    (lambda: tune.TuneConfig(search_alg="optuna"), TypeError, "must be a Searcher"),
    (lambda: tune.TuneConfig(scheduler="asha"), TypeError, "must be a TrialScheduler"),
    (lambda: tune.TuneConfig(reuse_actors=True), NotImplementedError, "forked"),
    (lambda: ASHAScheduler(grace_period=5, max_t=2), ValueError, "at most max_t"),
    (lambda: ASHAScheduler(reduction_factor=1), ValueError, "more than 1"),
    (lambda: ASHAScheduler(brackets=2), NotImplementedError, "one bracket"),
    (lambda: tune.with_resources(print, {"tpu": -1}), ValueError, "tpu"),
    (lambda: tune.with_resources(print, train.ScalingConfig(num_workers=2)), NotImplementedError, "TorchTrainer"),
    (lambda: tune.run, AttributeError, r"use Tuner\(…\).fit"),
    (lambda: tune.CLIReporter, AttributeError, "a table is shown"),
    (lambda: tune.qrandn, AttributeError, "use sample_from"),
    (lambda: tune.schedulers.PopulationBasedTraining, AttributeError, "ASHAScheduler ends trials early"),
    (lambda: tune.search.ConcurrencyLimiter, AttributeError, "max_concurrent_trials"),
    (lambda: train.lightning, AttributeError, "runs as it is"),
    (lambda: tune.sample_from(3), TypeError, "takes a function"),
    (lambda: tune.sample_from(lambda a, b: 1), TypeError, "takes the parameters, or nothing"),
])
def test_what_makes_no_sense_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_metrics_of_trials_in_an_object_store_could_not_be_read_in_time(fit):
    with pytest.raises(NotImplementedError, match="metrics are read while trials run"):
        fit(print, run=tune.RunConfig(name="tried", storage_path="s3://bucket/runs"))
    with pytest.raises(ValueError, match="ASHAScheduler compares trials"):
        fit(print, scheduler=ASHAScheduler())


PROGRAM = """
    import os, sys, time
    from pathlib import Path
    from wingbeat import tune

    def waits(config):
        here = Path(os.environ["TUNE_ORIG_WORKING_DIR"])
        try:
            (here / f"rank-{config['x']}").write_text(str(os.getpid()))
            while True:  # a signal just before `pause` would be missed
                time.sleep(0.01)
        finally:
            (here / f"saved-{config['x']}").touch()

    if __name__ == "__main__":
        os.environ["WHERE"] = os.getcwd()
        waits_with = tune.with_resources(waits, {"cpu": 0.25})
        try:
            tune.Tuner(waits_with, param_space={"x": tune.grid_search([1, 2])}, run_config=tune.RunConfig(storage_path="runs")).fit()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
"""


def descendants(pid):
    """All processes that a process has started, and those that these have."""
    found = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # or one of its threads
                for child in (task / "children").read_text().split():
                    found += [int(child), *descendants(child)]
    return found


def until(holds, process=None):
    """Waits for something."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.01)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def waiting(environment, write, tmp_path):
    """A program without a cluster whose two trials wait, with all processes that it has started."""
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, write("waits.py", PROGRAM)], env={**environment, "TMPDIR": str(tmp_path / "tmp")}, cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    ranks = [tmp_path / f"rank-{x}" for x in (1, 2)]
    until(lambda: all(rank.exists() and rank.read_text() for rank in ranks), process)
    yield process, {*descendants(process.pid), *(int(rank.read_text()) for rank in ranks)}
    process.kill()
    process.communicate()


def test_ctrl_c_ends_all_trials_which_may_save_and_nothing_is_left(waiting, tmp_path):
    process, all_of_it = waiting
    assert len(all_of_it) >= 6  # a head, a worker, two commands and two ranks at least
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert out == "interrupted\n" and process.returncode == 0, errors
    assert (tmp_path / "saved-1").exists() and (tmp_path / "saved-2").exists()
    assert "2 trials are asked to end" in errors
    until(lambda: not any(map(is_running, all_of_it)))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_sigterm_lets_trials_save_before_it_ends_the_program(waiting, tmp_path):
    process, all_of_it = waiting
    process.terminate()
    out, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert (out, process.returncode) == ("", -signal.SIGTERM), errors
    assert (tmp_path / "saved-1").exists() and (tmp_path / "saved-2").exists()
    assert "2 trials are asked to end, and may save what they have" in errors
    until(lambda: not any(map(is_running, all_of_it)))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_program_that_handles_sigterm_itself_still_does():
    from wingbeat.tune import _terminated

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with _terminated.raised():
            os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(ValueError), _terminated.raised():
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            raise ValueError
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_trials_that_do_not_end_in_time_are_killed(environment, write, tmp_path):
    program = write("stays.py", """
        import signal, time
        from pathlib import Path
        from wingbeat import tune
        from wingbeat.tune import _tuner

        HERE = Path.cwd()
        _tuner._ENDING_S = 1

        def stays(config):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (HERE / "began").touch()
            time.sleep(600)

        if __name__ == "__main__":
            tune.Tuner(stays, run_config=tune.RunConfig(storage_path="runs", grace_s=0.5)).fit()
    """)
    process = subprocess.Popen([sys.executable, program], env=environment, cwd=tmp_path)
    until((tmp_path / "began").exists, process)
    began = time.monotonic()
    process.terminate()
    assert process.wait(DEADLINE_SECONDS) == -signal.SIGTERM and time.monotonic() - began < 30


def test_whatever_kills_the_program_its_cluster_and_trials_end(waiting):
    process, all_of_it = waiting
    process.kill()
    until(lambda: not any(map(is_running, all_of_it)))


@pytest.mark.parametrize("daemon", ["head", "worker"])
def test_if_the_head_or_the_node_of_a_fit_dies_it_says_so(waiting, daemon):
    process, all_of_it = waiting
    commands, parents = {}, {}
    for pid in all_of_it:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    (pid,) = [pid for pid, parent in parents.items() if parent == process.pid and commands[pid][1:2] == [daemon.encode()]]
    os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 1 and f"ClusterLostError: `wingbeat {daemon}`, which this fit had started, was killed by signal 9" in errors
    until(lambda: not any(map(is_running, all_of_it)))


def test_the_next_fit_removes_what_a_killed_program_has_left(waiting, tmp_path, monkeypatch):
    from wingbeat import _own_folder

    process, all_of_it = waiting
    monkeypatch.setattr(_own_folder.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    left = [*(tmp_path / "tmp").glob("wingbeat-tune-*"), *(tmp_path / "tmp").glob("wingbeat-run-*")]

    def remove():
        for prefix in ("wingbeat-tune-", "wingbeat-run-"):
            _own_folder.remove_left(prefix)

    remove()
    assert len(left) == 3 and all(folder.exists() for folder in left)
    process.kill()
    until(lambda: not any(map(is_running, all_of_it)))
    remove()
    assert not any(folder.exists() for folder in left)


SEARCH = """
import sys
import tempfile
import time
from pathlib import Path
from wingbeat import tune

HERE = Path(__file__).parent

def train(config):
    with open(HERE / f"calls-{config['x']}", "a") as calls:
        calls.write(f"{config['drawn']}\\n")
    start = 0
    if checkpoint := tune.get_checkpoint():
        start = int((Path(checkpoint.path) / "step").read_text()) + 1
    for step in range(start, 4):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            kept = tune.Checkpoint.from_directory(folder) if config["x"] == 1 else None
            tune.report({"step": step, "start": start}, checkpoint=kept)
        while step == 2 and config["x"] in (1, 2) and not (HERE / "open").exists():
            time.sleep(0.01)
    if config["x"] == 0:
        raise ValueError("always")

if __name__ == "__main__":
    space = {"x": tune.grid_search([0, 1, 2, 3, 4]), "drawn": tune.uniform(0, 1)}
    tune.Tuner(
        train, param_space=space, tune_config=tune.TuneConfig(max_concurrent_trials=2, metric="step", mode="max"),
        run_config=tune.RunConfig(name="search", storage_path=HERE),
    ).fit()
"""


@pytest.fixture
def killed(four_cpus, write, tmp_path, monkeypatch):
    """The folder of a search whose program was killed when one trial had failed and two had come to their third steps."""
    for name, value in four_cpus.items():
        monkeypatch.setenv(name, value)
    process = subprocess.Popen([sys.executable, write("search.py", SEARCH)], env=four_cpus, cwd=tmp_path)
    folder = tmp_path / "search"

    def reports(number):
        file = folder / f"trial_{number:05}" / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    until(lambda: reports(1) == 3 and reports(2) == 3, process)
    commands = descendants(process.pid)
    process.kill()
    process.wait()
    # Before, what ran then might report once more.
    until(lambda: not any(map(is_running, commands)))
    (tmp_path / "open").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_a_search_whose_program_was_killed_goes_on(killed, tmp_path):
    import search

    assert tune.Tuner.can_restore(killed) and not tune.Tuner.can_restore(tmp_path)
    with pytest.raises(FileExistsError, match="or go on with Tuner.restore"):
        tune.Tuner(search.train, run_config=tune.RunConfig(name="search", storage_path=tmp_path)).fit()
    grid = tune.Tuner.restore(killed, search.train).fit()
    assert [result.config["x"] for result in grid] == [0, 1, 2, 3, 4]
    assert [result.metrics["start"] for result in grid] == [0, 3, 0, 0, 0]
    assert [[report["step"] for report in result.reports] for result in grid] == [[0, 1, 2, 3]] * 5
    assert str(grid[0].error) == f"trial trial_00000 (x=0, drawn={grid[0].config['drawn']:.4g}) failed: rank 0: ValueError: always"
    assert [grid[number].error for number in range(1, 5)] == [None] * 4 and grid[1].checkpoint is not None
    calls = [(tmp_path / f"calls-{x}").read_text().split() for x in range(5)]
    assert [len(one) for one in calls] == [1, 2, 2, 1, 1] and all(len(set(one)) == 1 for one in calls)
    assert len({one[0] for one in calls}) == 5
    # Once more, with what had failed.
    again = tune.Tuner.restore(killed, lambda config: {"step": 9.0}, restart_errored=True).fit()
    assert again.num_errors == 0 and [result.metrics["step"] for result in again] == [9, 3, 3, 3, 3]
    with pytest.raises(ValueError, match="either go on"):
        tune.Tuner.restore(killed, search.train, resume_errored=True, restart_errored=True)
    with pytest.raises(FileNotFoundError, match="has no trials to go on with"):
        tune.Tuner.restore(tmp_path / "nothing", search.train)


def state_of(trial_id, **more):
    names = {"config": {}, "status": "TERMINATED", "is_stopped": False, "launched": 1.0, "began": 1.0, "ended": 2.0, "error": None}
    return {"trial_id": trial_id, "heard": 0, **names, **more}


def leave(folder, trials, **more):
    """Leaves the state of a tuner in a folder, as a program does that is killed."""
    from wingbeat.tune._experiment import Experiment

    usual = {"param_space": {}, "tune_config": tune.TuneConfig(), "scheduler": schedulers.of(None), "searcher": Drawn([])}
    run = tune.RunConfig(name=folder.name, storage_path=folder.parent)
    experiment = Experiment(str(folder), is_new=True)
    experiment.save({**usual, "run_config": run, "trials": trials, **more})
    experiment.close()


def report_before(folder, trial_id, *reports):
    (folder / trial_id).mkdir()
    lines = [json.dumps({"time": 1.0, **report}) + "\n" for report in reports]
    (folder / trial_id / "metrics.jsonl").write_text("".join(lines))


class Drawn(Searcher):
    """Chooses from a list, and writes down what it learns."""

    def __init__(self, left):
        self.left, self.heard = list(left), []

    def suggest(self, trial_id):
        return self.left.pop(0) if self.left else None

    def on_trial_result(self, trial_id, result):
        self.heard.append((trial_id, result.get("x")))


def test_trials_that_waited_to_be_tried_again_are_tried_by_the_next_program(on_cluster, tmp_path):
    folder = tmp_path / "search"
    leave(folder, [state_of("trial_00000", status="PENDING", config={"x": 0}), state_of("trial_00001"), state_of("trial_00002", status="PENDING", config={"x": 2})])
    for number in range(3):
        (folder / f"trial_{number:05}").mkdir()
    grid = tune.Tuner.restore(folder, lambda config: {"y": config["x"]}).fit()
    assert [result.metrics.get("y") for result in grid] == [0, None, 2] and grid.num_errors == 0
    assert [result.was_stopped for result in grid] == [False] * 3


def test_a_trial_for_which_the_time_did_not_suffice_was_stopped(on_cluster, tmp_path):
    folder = tmp_path / "search"
    config = tune.TuneConfig(time_budget_s=1e-9, max_concurrent_trials=1)
    leave(folder, [state_of("trial_00000", status="PENDING")], tune_config=config)
    for _ in range(2):
        grid = tune.Tuner.restore(folder, lambda config: {"y": 1}).fit()
        assert [result.was_stopped for result in grid] == [True] and grid[0].metrics == {}


def test_trials_that_waited_for_room_when_the_time_was_over_are_tried_by_the_next_program(on_cluster, tmp_path, monkeypatch):
    from wingbeat._trials import _engine
    from wingbeat.tune import _experiment

    def train(config):
        (tmp_path / "begun").touch()
        while not (tmp_path / "goes on").exists():
            time.sleep(0.01)
        return {"x": config["x"]}

    class Until:
        """Is over once a trial has begun, and one more was launched."""

        def __lt__(self, now):
            return (tmp_path / "begun").exists() and (folder / "trial_00001").exists()

    folder, run = tmp_path / "search", _engine.Engine.run
    monkeypatch.setattr(_engine.Engine, "run", lambda fitting, until: run(fitting, until and Until()))
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 4}), param_space={"x": tune.grid_search([0, 1, 2])},
        tune_config=tune.TuneConfig(time_budget_s=DEADLINE_SECONDS), run_config=tune.RunConfig(name="search", storage_path=tmp_path),
    )
    assert [(result.was_stopped, result.metrics) for result in tuner.fit()] == [(True, {})] * 2
    state = _experiment.load(str(folder))
    assert [trial["status"] for trial in state["trials"]] == ["TERMINATED", "PENDING"]
    experiment = _experiment.Experiment(str(folder), is_new=False)
    experiment.save({**state, "tune_config": tune.TuneConfig()})
    experiment.close()
    (tmp_path / "goes on").touch()
    grid = tune.Tuner.restore(folder, train).fit()
    assert [result.metrics.get("x") for result in grid] == [None, 1, 2]


def test_what_was_reported_before_counts_after_a_restore_and_is_told_once(on_cluster, tmp_path):
    folder = tmp_path / "search"
    leave(
        folder,
        [state_of("trial_00000", heard=1), state_of("trial_00001", status="RUNNING", heard=2)],
        tune_config=tune.TuneConfig(metric="x", mode="max", max_concurrent_trials=1),
        searcher=Drawn([{"x": 9}]),
    )
    report_before(folder, "trial_00000", {"x": 1.0})
    report_before(folder, "trial_00001", {"x": 1.0}, {"x": 2.0}, {"x": 3.0})
    # Neither reports what is compared: the first trial has.
    grid = tune.Tuner.restore(folder, lambda config: {"other": 1.0}).fit()
    assert len(grid) == 3 and grid.num_errors == 0
    from wingbeat.tune import _experiment

    assert _experiment.load(str(folder))["searcher"].heard[:1] == [("trial_00001", 3.0)]
    assert tune.Tuner.restore(folder, print).get_results()[0].metrics["x"] == 1


def test_commands_of_a_killed_program_are_waited_for_together_and_as_long_as_they_live(tmp_path, monkeypatch):
    import socket
    import threading

    from wingbeat.tune import _trial

    monkeypatch.setattr(_trial, "_LEAVE_S", 2)
    monkeypatch.setattr(_trial, "_TELL_S", 0)
    command = subprocess.Popen(["sleep", str(DEADLINE_SECONDS)])
    folders = [tmp_path / f"trial_{number:05}" for number in range(8)]
    for folder in folders:
        folder.mkdir()

    def say(folder, said, **user):
        (folder / ".wingbeat-in-use").write_text(json.dumps({"said": said, **user}))

    for folder in folders[:5]:  # of a machine that is gone
        say(folder, 0, host="elsewhere", pid=1)
    here = {"host": socket.gethostname(), "pid": command.pid}
    ended = threading.Event()

    def go_on():
        for said in range(30):  # for longer than one that says nothing
            say(folders[6], said, **here)
            time.sleep(0.1)
        ended.set()
        command.kill()
        command.wait()

    say(folders[6], 0, **here)
    thread = threading.Thread(target=go_on)
    thread.start()
    told = []
    _trial.wait_for_commands(folders, told.append)
    assert ended.is_set()
    thread.join()
    assert len(told) == 1 and "commands of 6 trials of the program before (trial_00000, trial_00001, trial_00002, …)" in told[0]


def test_a_trial_goes_on_without_what_was_reported_after_its_checkpoint(tmp_path):
    from wingbeat.tune._trial import Trial

    folder = tmp_path / "trial_00000"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"time": 1.0, "x": 2.0}\n{"time": 2.0, "x"')
    trial = Trial.of(state_of("trial_00000", status="RUNNING"), str(tmp_path), lambda trial: [])
    assert [report["x"] for report in trial.reports] == [2.0]
    trial.again()
    assert trial.reports == [] and not (folder / "metrics.jsonl").exists()  # without a checkpoint


def test_the_seconds_of_a_trial_go_on_after_a_restore(tmp_path):
    from wingbeat.tune import _called
    from wingbeat.tune._trial import Trial

    folder = tmp_path / "trial_00000"
    (folder / "checkpoint_000000").mkdir(parents=True)
    (folder / "checkpoint_000000" / ".wingbeat-complete.json").write_text('{"metrics": {}}')
    lines = "".join(json.dumps({"time": 100.0 + second, "x": second}) + "\n" for second in range(1, 4))
    (folder / "metrics.jsonl").write_text(lines)
    state, expected = state_of("trial_00000", status="RUNNING", launched=99.0, began=100.0), [1.0, 2.0, 3.0]
    for begins in (1000, 2000):
        trial = Trial.of(state, str(tmp_path), print)
        assert [report["time_total_s"] for report in trial.reports] == expected
        trial.again()
        (folder / _called.STARTED).write_text(str(float(begins)))
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"time": begins + 0.5, "x": 4}) + "\n")
        expected.append(expected[-1] + 0.5)
        assert [report["time_total_s"] for report in trial.new_reports()] == expected[-1:]
        state = trial.state()
    assert [report["time_total_s"] for report in Trial.of(state, str(tmp_path), print).reports] == [1.0, 2.0, 3.0, 3.5, 4.0]


def test_a_damaged_report_and_missing_metrics_are_no_end_of_a_search(tmp_path):
    from wingbeat.tune._trial import Trial

    folder = tmp_path / "trial_00000"
    (folder / "checkpoint_000000").mkdir(parents=True)
    lines = ['{"time": 1.0, "x": 1.0}', '{"time": 1', "null", '{"x": 2.0}', '{"time": 2.0, "attempt": 0, "launch": 1, "x": 3.0}']
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    trial = Trial.of(state_of("trial_00000"), str(tmp_path), print)
    assert [report["x"] for report in trial.reports] == [1, 3]
    assert not {"attempt", "launch"} & set(trial.reports[1])
    trial.again()
    (folder / "checkpoint_000000" / ".wingbeat-complete.json").write_text("{}")
    trial.again()  # from a checkpoint whose metrics could not be written


def test_what_a_failed_trial_left_stays_until_it_is_tried_anew(on_cluster, tmp_path):
    folder = tmp_path / "search"
    config = tune.TuneConfig(max_concurrent_trials=1)
    leave(folder, [state_of(f"trial_{number:05}", status="ERROR") for number in range(2)], tune_config=config)
    for number in range(2):
        report_before(folder, f"trial_{number:05}", {"x": 1.0})
        (folder / f"trial_{number:05}" / "output.txt").write_text("why it failed")

    def looks(config):
        other = Path(tune.get_context().get_trial_dir()).parent / "trial_00001"
        return {"there": float((other / "output.txt").read_text().startswith("why"))}

    grid = tune.Tuner.restore(folder, looks, restart_errored=True).fit()
    assert [(result.metrics["there"], len(result.reports)) for result in grid] == [(1, 1), (0, 1)]


def test_the_cause_of_a_failure_is_known_after_a_restore(fit, tmp_path):
    grid = fit(lambda config: {}["nothing"])
    (known,) = tune.Tuner.restore(grid.experiment_path, print).get_results().errors
    assert isinstance(known.__cause__, KeyError) and str(known) == str(grid.errors[0])


def test_a_damaged_state_is_named_with_its_file(tmp_path):
    leave(tmp_path / "search", [])
    (tmp_path / "search" / "tuner.pickle").write_bytes(b"")
    with pytest.raises(RuntimeError, match="search/tuner.pickle is damaged, or needs a module .*EOFError"):
        tune.Tuner.restore(tmp_path / "search", print)


def test_as_many_trials_of_a_trainer_run_as_fit_with_the_ranks_that_are_tried(on_cluster, tmp_path):
    def loop(config):
        train.report({"x": 1.0})

    asked = []

    class Looks(Searcher):
        def suggest(self, trial_id):
            asked.append(trial_id)
            return {"scaling_config": train.ScalingConfig(1)} if len(asked) <= 4 else None

        def on_trial_complete(self, trial_id, result=None, error=False):
            asked.append("end")

    trainer = train.TorchTrainer(loop, scaling_config=train.ScalingConfig(4))
    grid = tune.Tuner(
        trainer, param_space={"scaling_config": train.ScalingConfig(1)}, tune_config=tune.TuneConfig(search_alg=Looks()),
        run_config=tune.RunConfig(name="one", storage_path=tmp_path),
    ).fit()
    assert len(grid) == 4 and asked.index("end") >= 4  # and not one after the other


def test_results_are_known_after_a_fit_and_after_a_restore(fit, tmp_path):
    tuner = tune.Tuner(lambda config: {"x": 1.0}, run_config=tune.RunConfig(name="one", storage_path=tmp_path))
    with pytest.raises(RuntimeError, match="there are no results yet"):
        tuner.get_results()
    grid = tuner.fit()
    assert tuner.get_results() is grid
    restored = tune.Tuner.restore(tmp_path / "one", print)
    (result,) = restored.get_results()
    assert result.metrics["x"] == 1.0 and result.path == grid[0].path and restored.get_results().experiment_path == grid.experiment_path
    failing = tune.Tuner(
        lambda config: 1 / 0, run_config=tune.RunConfig(name="two", storage_path=tmp_path),
        tune_config=tune.TuneConfig(raise_on_failed_trial=True),
    )
    with pytest.raises(tune.TuneError) as raised:
        failing.fit()
    assert failing.get_results() is raised.value.results and failing.get_results().num_errors == 1


def test_results_of_a_killed_search_are_known_before_it_goes_on(killed):
    import search

    grid = tune.Tuner.restore(killed, search.train).get_results()
    assert [len(result.reports) for result in grid] == [4, 3, 3] and grid.num_errors == 1
    assert grid[1].checkpoint is not None and grid[2].metrics["step"] == 2


def test_a_search_is_restored_by_its_url_and_others_say_what_to_do(tmp_path):
    folder = tmp_path / "a b"
    leave(folder, [state_of("trial_00000")])
    url = folder.as_uri()
    assert "%20" in url and tune.Tuner.can_restore(url) and not tune.Tuner.can_restore(tmp_path.as_uri())
    assert len(tune.Tuner.restore(url, print).get_results()) == 1
    assert not tune.Tuner.can_restore("s3://bucket/search")
    with pytest.raises(NotImplementedError, match="'s3://bucket/search'. is not supported: copy it to a folder that all nodes share"):
        tune.Tuner.restore("s3://bucket/search", print)
    with pytest.raises(NotImplementedError, match="storage_filesystem"):
        tune.Tuner.restore(folder, print, storage_filesystem=object())
    with pytest.raises(NotImplementedError, match="storage_filesystem"):
        tune.Tuner.can_restore(folder, storage_filesystem=object())


class Odd:
    pass


class Color(enum.Enum):
    RED, BLUE = range(2)


@dataclasses.dataclass
class Shape:
    width: int
    color: Color = Color.RED


def times(number):
    return tune.sample_from(lambda config: config["lr"] * number)


def plus(number):
    return tune.sample_from(lambda config, more=number: config["lr"] + more)


def of_itself(number):
    def function(config):
        return number or function

    return tune.sample_from(function)


def space(**more):
    return {
        "lr": tune.loguniform(1e-3, 1), "layers": tune.grid_search([1, 2]), "of": {"kind": tune.choice(["a", ("b", 1)])},
        "made": tune.sample_from(lambda config: config["lr"] * 2), "steps": [tune.randint(1, 9), 3], "object": Odd(), "none": None,
        "nan": math.nan, "class": tune.choice([Odd, dict]), "dtype": torch.float16, "numpy": np.dtype("f4"), "array": np.array([1, math.nan]),
        "enum": tune.grid_search([Color.RED]), "set": {1, "a"}, "range": range(3), "path": Path("a"), "date": datetime.date(2020, 1, 1),
        "times": times(1), "plus": plus(1), "itself": of_itself(0), "built in": tune.sample_from(np.random.rand), "call": len, "shape": Shape(1),
        "bool": True, "tensor": torch.tensor([1.0]), "frame": pd.DataFrame({"x": [math.nan]}), **more,
    }


@pytest.mark.parametrize(
    "name, value",
    [
        ("lr", tune.loguniform(1e-4, 1)),
        ("lr", tune.uniform(1e-3, 1)),
        ("layers", tune.grid_search([1, 3])),
        ("layers", 1),
        ("of/kind", {"kind": tune.choice(["a", ("b", 2)])}),
        ("made", tune.sample_from(lambda config: config["lr"] * 3)),
        ("steps/0", [tune.randint(1, 8), 3]),
        ("more", 1),
        ("none", 0),
        ("class", tune.choice([Shape, dict])),
        ("dtype", torch.bfloat16),
        ("numpy", np.dtype("f8")),
        ("array", np.array([2, math.nan])),
        ("array", np.array([1])),
        ("enum", tune.grid_search([Color.BLUE])),
        ("set", {2, "a"}),
        ("range", range(4)),
        ("path", Path("b")),
        ("date", datetime.date(2020, 1, 2)),
        ("times", times(2)),
        ("plus", plus(2)),
        ("itself", of_itself(1)),
        ("built in", tune.sample_from(np.random.randn)),
        ("call", sum),
        ("shape", Shape(1, Color.BLUE)),
        ("bool", 1),
        ("tensor", torch.tensor([2.0])),
        ("frame", pd.DataFrame({"x": [1.0]})),
    ],
)
def test_a_restored_search_has_the_space_that_it_had(tmp_path, name, value):
    folder = tmp_path / "search"
    leave(folder, [state_of("trial_00000")], param_space=space())
    tune.Tuner.restore(folder, print, param_space=space())
    changed = space(**{name.split("/")[0]: value})
    with pytest.raises(ValueError, match=f"param_space differs in '{name}' from that of the trials in .*search"):
        tune.Tuner.restore(folder, print, param_space=changed)


def test_what_a_program_defines_is_the_same_in_another(environment):
    program = """
import enum
import sys
import cloudpickle
from wingbeat import tune
from wingbeat.tune import _same
class Color(enum.Enum):
    RED, BLUE = range(2)
class Model:
    def __init__(self, width):
        self.width = width
    def __eq__(self, other):
        return type(self) is type(other) and self.width == other.width
fixed = {"class": tune.choice([Model, Color]), "enum": Color.RED, "object": Model(1), "set": {Color.RED, Model, "a", "b", "c"}}
space = {"x": tune.sample_from(lambda config: config["y"] in {NAMES, 1}), **fixed}
other = {"x": tune.sample_from(lambda config: config["y"] in {NAMES, 1.0}), **fixed}
if sys.argv[1:]:
    left = cloudpickle.loads(bytes.fromhex(sys.argv[1]))
    others = [space, other, {**space, "enum": Color.BLUE}, {**space, "class": tune.choice([Color, Model])}]
    print(*[_same.first_difference(left, one) for one in others])
else:
    print(cloudpickle.dumps(space).hex())
""".replace("NAMES", ", ".join(f"'name {number}'" for number in range(40)))  # so many that the order of some is that of their insertion

    def run(seed, *arguments):
        env = {**environment, "PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, "-c", program, *arguments], env=env, capture_output=True, text=True, check=True).stdout.strip()

    left = run("0")
    assert [run(seed, left) for seed in ("1", "2", "3")] == ["None x enum class"] * 3


def test_the_end_of_a_trial_is_written_also_while_others_have_not_begun(on_cluster, tmp_path, monkeypatch):
    from wingbeat.tune import _experiment, _tuner

    def train(config):
        while config["x"] and not (tmp_path / "ended").exists():
            time.sleep(0.01)
        return {"x": config["x"]}

    save = _experiment.Experiment.save

    def saved(experiment, state):
        save(experiment, state)
        if state["trials"][0]["status"] == "TERMINATED":
            (tmp_path / "ended").touch()

    monkeypatch.setattr(_experiment.Experiment, "save", saved)
    # No room: those that are launched have not begun.
    monkeypatch.setattr(_tuner._Fitting, "has_room", lambda fitting: len(fitting.trials) < 2 or (tmp_path / "ended").exists())
    run = tune.RunConfig(name="search", storage_path=tmp_path)
    grid = tune.Tuner(train, param_space={"x": tune.grid_search([0, 1, 2])}, run_config=run).fit()
    assert [result.metrics["x"] for result in grid] == [0, 1, 2]


def test_what_cannot_be_written_is_not_written_again_and_again(fit, tmp_path, monkeypatch, capfd):
    from wingbeat.tune import _experiment, _tuner

    saves, check = [], _tuner._Fitting.check

    def save(experiment, state):
        saves.append([trial["status"] for trial in state["trials"]])
        raise OSError("full")

    def checked(fitting):
        check(fitting)
        looks.append(fitting.trials[0].status)
        if looks.count("TERMINATED") == 5:
            (tmp_path / "enough").touch()

    def train(config):
        while config["x"] and not (tmp_path / "enough").exists():
            time.sleep(0.01)

    looks = []
    monkeypatch.setattr(_experiment.Experiment, "save", save)
    monkeypatch.setattr(_tuner, "_SAVE_AGAIN_S", DEADLINE_SECONDS)
    monkeypatch.setattr(_tuner._Fitting, "check", checked)
    fit(train, {"x": tune.grid_search([0, 1])})
    assert saves == [["RUNNING"], ["RUNNING"] * 2, ["TERMINATED"] * 2]
    assert capfd.readouterr().err.count("will not know these trials: OSError: full") == 1


def test_trials_that_ran_may_be_left_and_the_same_values_are_drawn(killed, tmp_path):
    import search

    grid = tune.Tuner.restore(killed, search.train, resume_unfinished=False).fit()
    assert [result.was_stopped for result in grid] == [False, True, True, False, False]
    assert [len(result.reports) for result in grid] == [4, 3, 3, 4, 4]


def test_searchers_and_schedulers_go_on_where_they_were():
    import cloudpickle

    space = {"x": tune.uniform(0, 1), "n": tune.grid_search([1, 2])}
    search = BasicVariantGenerator()
    search.begin(space, 3, None, None)
    first = [search.suggest("") for _ in range(3)]
    copy = cloudpickle.loads(cloudpickle.dumps(search))
    rest = [search.suggest("") for _ in range(4)]
    assert [copy.suggest("") for _ in range(4)] == rest and rest[-1] is None and first[0] != rest[0]
    bayes = OptunaSearch(metric="y", mode="min", seed=1)
    bayes.begin({"x": tune.uniform(0, 1)}, 5, None, None)
    bayes.suggest("a")
    copy = cloudpickle.loads(cloudpickle.dumps(bayes))
    copy.on_trial_complete("a", {"y": 1.0})
    assert copy.suggest("b") is not None
    asha = ASHAScheduler(metric="y", mode="min", max_t=10)
    assert asha.on_trial_result("a", {"training_iteration": 1, "y": 1.0}) == CONTINUE
    assert cloudpickle.loads(cloudpickle.dumps(asha)).on_trial_result("b", {"training_iteration": 1, "y": 2.0}) == STOP


def test_a_search_that_goes_on_calls_functions_of_earlier_trials_no_more():
    import cloudpickle

    numbers = iter(range(100))
    space = {"seed": tune.sample_from(lambda: next(numbers)), "x": tune.uniform(0, 1), "n": tune.grid_search([1, 2, 3])}
    search = BasicVariantGenerator(random_state=3)
    search.begin(space, 2, None, None)
    assert [search.suggest("")["seed"] for _ in range(2)] == [0, 1]
    copy = cloudpickle.loads(cloudpickle.dumps(search))
    rest = [copy.suggest("") for _ in range(5)]
    assert [(config["seed"], config["n"]) for config in rest[:4]] == [(2, 3), (3, 1), (4, 2), (5, 3)] and rest[4] is None
    assert [search.suggest("")["x"] for _ in range(4)] == [config["x"] for config in rest[:4]]


def test_a_search_of_optuna_whose_failed_trials_are_tried_again_may_be_killed_once_more(on_cluster, tmp_path):
    folder = tmp_path / "search"
    search = OptunaSearch(metric="x", mode="max", seed=1)
    search.begin({"lr": tune.uniform(0, 1)}, 2, None, None)
    for number in range(2):
        trial_id = f"trial_{number:05}"
        search.suggest(trial_id)
        search.on_trial_complete(trial_id, error=True)
    trials = [state_of("trial_00000", status="RUNNING"), state_of("trial_00001", status="ERROR")]
    leave(folder, trials, searcher=search, known=["trial_00000"], tune_config=tune.TuneConfig(metric="x", mode="max"))
    for number in range(2):
        report_before(folder, f"trial_{number:05}", {"x": 1.0})
    grid = tune.Tuner.restore(folder, lambda config: {"x": 2.0}, resume_errored=True).fit()
    assert [result.metrics["x"] for result in grid] == [2, 2]
    search.on_trial_result("trial_00000", {"x": 1.0, "training_iteration": 1})  # which it does not know any more


def test_a_search_may_have_a_long_name(fit, tmp_path):
    (result,) = fit(lambda config: {"x": 1.0}, run=tune.RunConfig(name="n" * 250, storage_path=tmp_path))
    assert result.error is None and result.metrics["x"] == 1


def test_two_searches_of_one_name_do_not_mix(four_cpus, write, tmp_path):
    program = write("both.py", """
        from wingbeat import tune

        if __name__ == "__main__":
            run = tune.RunConfig(name="same", storage_path="runs")
            try:
                print(tune.Tuner(lambda config: {"x": config["x"]}, param_space={"x": tune.grid_search([1, 2, 3])}, run_config=run).fit())
            except FileExistsError as error:
                print("refused", error)
    """)
    both = [subprocess.Popen([sys.executable, program], env=four_cpus, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(one.communicate(timeout=DEADLINE_SECONDS)[0] for one in both)
    assert said[0].startswith("ResultGrid(3 trials, 0 failed") and "give RunConfig another name" in said[1], said


def test_a_folder_in_use_is_not_gone_on_with_and_one_without_trials_is_removed(tmp_path, monkeypatch):
    from wingbeat.tune._experiment import Experiment

    first = Experiment(str(tmp_path / "search"), is_new=True)
    first.save({})
    with pytest.raises(RuntimeError, match="another program runs the trials in"):
        Experiment(str(tmp_path / "search"), is_new=False)
    first.close()
    Experiment(str(tmp_path / "search"), is_new=False).close()
    monkeypatch.setenv("WINGBEAT_ADDRESS", "127.0.0.1:1")
    with pytest.raises(RuntimeError, match="does not answer"):
        tune.Tuner(print, run_config=tune.RunConfig(name="other", storage_path=tmp_path)).fit()
    assert not (tmp_path / "other").exists()


def test_a_metric_that_no_trial_reports_is_named(fit, capfd):
    def train(config):
        for step in range(3):
            tune.report({"loss": 1.0})

    with pytest.raises(ValueError, match="no trial has reported 'los', as metric='los' says; reported were 'loss', "):
        fit(train, metric="los", mode="min", max_concurrent_trials=1, num_samples=3)
    assert "trial_00000 reports no 'los', as metric='los' says" in capfd.readouterr().err


def test_a_search_whose_first_trial_reports_nothing_ends(fit):
    none = "trial_00000 has ended, and no trial has reported 'loss', as metric='loss' says; reported were no metrics: call tune.report"
    with pytest.raises(ValueError, match=none):
        fit(lambda config: None, metric="loss", mode="min", max_concurrent_trials=1, num_samples=3)

def test_a_stop_that_cannot_be_compared_is_refused(fit, tmp_path):
    run = tune.RunConfig(name="stops", storage_path=tmp_path, stop={"iterations": 2})
    with pytest.raises(ValueError, match="no trial has reported 'iterations', as RunConfig.stop={'iterations': …}. says"):
        fit(lambda config: {"loss": 1.0}, run=run)
    with pytest.raises(NotImplementedError, match="RunConfig.stop=<function"):
        tune.RunConfig(stop=lambda trial_id, result: True)
    with pytest.raises(ValueError, match="'loss': '3'"):
        tune.RunConfig(stop={"loss": "3"})


def test_a_search_whose_cluster_is_gone_ends_and_goes_on_on_another(own_cluster, four_cpus, tmp_path, monkeypatch):
    from wingbeat.tune import _cluster

    own_cluster.worker()
    for name, value in own_cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_cluster, "_BACK_S", 1)

    class Ends(Searcher):
        def __init__(self):
            self.left = 4

        def suggest(self, trial_id):
            self.left -= 1
            return {} if self.left >= 0 else None

        def on_trial_complete(self, trial_id, result=None, error=False):
            if self.left == 2 and "ended" not in os.environ:
                own_cluster.end()
                own_cluster.daemons.clear()

    run = tune.RunConfig(name="search", storage_path=tmp_path)
    config = tune.TuneConfig(search_alg=Ends(), max_concurrent_trials=1)
    with pytest.raises(tune.ClusterLostError, match="has not answered for 1 s, and trials fail; go on with Tuner.restore"):
        tune.Tuner(lambda config: {"y": 1.0}, tune_config=config, run_config=run).fit()
    for name, value in four_cpus.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ended", "yes")
    grid = tune.Tuner.restore(tmp_path / "search", lambda config: {"y": 1.0}).fit()
    assert len(grid) == 4 and grid.num_errors == 0


def test_in_a_terminal_a_table_shows_the_trials(four_cpus, write, tmp_path):
    program = write("shows.py", """
        from wingbeat import tune

        if __name__ == "__main__":
            space = {"rate": tune.grid_search([0.5, 0.25])}
            config = tune.TuneConfig(metric="loss", mode="min")
            tune.Tuner(lambda config: {"loss": config["rate"]}, param_space=space, tune_config=config,
                       run_config=tune.RunConfig(storage_path="runs")).fit()
    """)
    ours, theirs = pty.openpty()
    environment = {**four_cpus, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen([sys.executable, program], env=environment, cwd=tmp_path, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # it has ended
            break
    os.close(ours)
    assert process.wait(DEADLINE_SECONDS) == 0
    text = shown.decode()
    assert "parameters" in text and "rate=0.5" in text, text
    assert "2 done, 0 failed; best loss 0.25 of trial_00001 (rate=0.25)" in text, text


def test_what_a_program_prints_goes_where_its_output_does_beside_the_table(four_cpus, write, tmp_path):
    program = write("prints.py", """
        from wingbeat import tune

        class Prints(tune.search.Searcher):
            left = 1

            def suggest(self, trial_id):
                self.left -= 1
                return {} if self.left >= 0 else None

            def on_trial_complete(self, trial_id, result=None, error=False):
                print("MINE", trial_id, flush=True)

        if __name__ == "__main__":
            config = tune.TuneConfig(search_alg=Prints())
            tune.Tuner(lambda config: {"x": 1.0}, tune_config=config, run_config=tune.RunConfig(storage_path="runs")).fit()
    """)
    ours, theirs = pty.openpty()
    with open(tmp_path / "out", "wb") as out:
        process = subprocess.Popen([sys.executable, program], env={**four_cpus, "TERM": "xterm"}, cwd=tmp_path, stdout=out, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # it has ended
        while more := os.read(ours, 65536):
            shown += more
    os.close(ours)
    assert process.wait(DEADLINE_SECONDS) == 0, shown
    assert (tmp_path / "out").read_text() == "MINE trial_00000\n" and b"MINE" not in shown


def test_lines_say_how_far_trials_are_when_that_has_changed(monkeypatch):
    from wingbeat._trials import _display
    from wingbeat._trials._trial import ERROR, RUNNING, TERMINATED, Trial

    class Told(Trial):
        parameters = "x=1"

        def _run(self):
            pass

    def trial(name, status, **reported):
        made = Told(name)
        made.status, made.launched, made.began = status, 1.0, 2.0
        made.reports = [reported] if reported else []
        return made

    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr(_display, "_LINE_S", 0)
    display = _display.Display("loss", "min")
    trials = [trial("a", RUNNING), trial("b", TERMINATED, loss=0.25), trial("c", ERROR), trial("d", TERMINATED, loss=math.nan)]
    trials[0].began = 0.0  # it waits
    for _ in range(2):
        display.update(trials)
    display.update(trials, is_last=True)
    trials[0].began = 2.0
    display.update(trials)
    best = "2 done, 1 failed; best loss 0.25 of b (x=1)"
    assert shown.getvalue() == f"wingbeat tune: 0 running, {best}\nwingbeat tune: 1 running, {best}\n"
    monkeypatch.setattr(_display, "_LINE_S", 60)
    quiet = _display.Display(None, None, title="CrossValidator", is_quiet=True)
    shown.truncate(0)
    quiet.update(trials)
    quiet.update(trials, is_last=True)
    assert shown.getvalue() == ""
    monkeypatch.setattr("sys.stderr", None)  # as in a program without a console
    _display.Display(None, None).update(trials)


def test_the_documented_program_runs(four_cpus, write, tmp_path):
    text = (Path(__file__).resolve().parents[2] / "docs/guide/tune.md").read_text()
    program = textwrap.dedent(text.split("```python\n")[1].split("```")[0])
    done = subprocess.run(
        [sys.executable, write("documented.py", program)], env={**four_cpus, "XDG_DATA_HOME": str(tmp_path / "data")}, cwd=tmp_path,
        capture_output=True, text=True, timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lr" in done.stdout
