"""`TorchTrainer`, beside what Ray Train's documentation says of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import DEADLINE_SECONDS

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def program(cluster, tmp_path):
    """Runs one of the programs in a folder of the test's own."""

    def program(name, *arguments, code=0, **env):
        done = subprocess.run(
            [sys.executable, PROGRAMS / name, *map(str, arguments)],
            env={**cluster, **env}, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_SECONDS,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return program


def last(done, word):
    """The last line of the program's own that begins so."""
    return [line for line in done.stdout.splitlines() if line.startswith(word)][-1]


def test_ray_s_quick_start_runs_with_another_import_and_goes_on_when_it_runs_again(program, tmp_path):
    done = program("quick_start.py", 3, tmp_path / "stored")
    assert last(done, "last") == "last epoch 2.0 accuracy good"
    assert last(done, "kept") == f"kept 3 path {tmp_path / 'stored' / 'quick-start'}"
    assert "[rank 0] {'loss': " in done.stdout and "[rank 1] starts at epoch 0" in done.stdout
    metrics = [json.loads(line) for line in (tmp_path / "stored/quick-start/metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in metrics] == [0, 1, 2]
    done = program("quick_start.py", 4, tmp_path / "stored")
    assert done.stdout.count("starts at epoch 3") == 2 and last(done, "last").startswith("last epoch 3.0")


def test_ray_s_example_with_loaders_runs_with_another_import(program, tmp_path):
    done = program("loaders.py", 3, XDG_DATA_HOME=str(tmp_path))
    assert last(done, "accuracy") == "accuracy good of 50.0"
    assert "Training result: Result(metrics={'accuracy': " in done.stdout and "Train Epoch 2: 100%" in done.stdout + done.stderr


def test_ray_s_examples_of_checkpoints_and_failures_run_with_another_import(program, tmp_path):
    done = program("resumes.py", tmp_path / "stored")
    assert done.stdout.count("begins at epoch 0") == 2 and done.stdout.count("begins at epoch 2") == 2
    assert last(done, "stored") == "stored extra_state.pt model.pt of-rank=0.pt of-rank=1.pt optimizer.pt"
    assert last(done, "kept") == "kept 3.0 4.0" and last(done, "best") == "best True 4.0 None"


def test_ray_s_example_of_torchmetrics_runs_with_another_import(program, tmp_path):
    done = program("metrics_of_all.py", XDG_DATA_HOME=str(tmp_path))
    assert last(done, "ranks") == "ranks 6.0 falls True"


def test_after_a_failure_the_loop_goes_on_from_its_checkpoint(program, tmp_path):
    done = program("loops.py", "fails_once", tmp_path)
    assert done.stdout.count("starts at 0") == 2 and done.stdout.count("starts at 2") == 2
    # The newest and the best are kept.
    kept = "[('checkpoint_000002', 0.0, {}), ('checkpoint_000004', 2.0, {})]"
    assert last(done, "result") == f"result {{'loss': 2.0, 'step': 3.0}} {kept} checkpoint_000002 None"
    assert last(done, "path") == f"path {tmp_path / 'stored' / 'again'}"


def test_a_rank_that_ends_by_sys_exit_has_ended_well(program, tmp_path):
    assert last(program("loops.py", "leaves_early", tmp_path), "result").startswith("result {'rank': 0.0}")


def test_metrics_are_those_of_the_newest_checkpoint_if_the_last_attempt_had_nothing_left_to_do(program, tmp_path):
    done = program("loops.py", "reports_nothing_after_a_restart", tmp_path)
    assert last(done, "result").startswith("result {'loss': 6.0, 'step': 7.0}")


def test_an_exception_of_the_loop_is_the_cause_of_the_failure(program, tmp_path):
    done = program("loops.py", "raises", tmp_path)
    assert last(done, "failed") == "failed OddError 1 7 True rank 1 failed: OddError: no luck 7"
    assert "there in rank 1:" in done.stdout and "in raises" in done.stdout


def test_a_rank_that_ends_before_its_loop_returns_is_a_failure(program, tmp_path):
    assert "failed TrainingError" in last(program("loops.py", "vanishes", tmp_path), "failed")


def test_a_rank_that_fails_with_the_code_of_a_run_without_output_has_failed(program, tmp_path):
    assert "failed TrainingError" in last(program("loops.py", "exits_with_74", tmp_path), "failed")


def test_a_rank_that_ends_before_its_loop_returns_is_waited_for_by_none(program, tmp_path):
    failed = last(program("loops.py", "vanishes_second", tmp_path), "failed")
    assert "rank 1 failed" in failed and "os._exit(0)" in failed


def test_why_a_run_cannot_begin_is_in_the_exception(program, tmp_path):
    failed = last(program("loops.py", "crowd", tmp_path), "failed")
    assert "cannot place 1000 workers" in failed and "all nodes together have" in failed


def test_a_loop_may_return_anything_and_report_nothing(program, tmp_path):
    done = program("loops.py", "returns_what_nobody_can_send", tmp_path)
    assert last(done, "result") == "result {} [] None None"
    assert last(done, "path").startswith(f"path {tmp_path / 'stored' / 'torch_trainer-'}")


def test_ranks_know_their_place_and_secrets_are_on_no_command_line(program, tmp_path):
    program("loops.py", "places", tmp_path)
    told = [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)]
    assert told == [f"[{rank}, 2, {rank}, 2, 0] of-places gloo cpu hunter2" for rank in (0, 1)]


def test_the_first_rank_may_end_long_before_the_last(program, tmp_path):
    program("loops.py", "ranks_of_unequal_length", tmp_path)


def test_each_rank_reads_as_many_rows_as_the_others(program, tmp_path):
    program("loops.py", "reads_rows", tmp_path)
    told = [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)]
    assert told == [f"{seen} (3, 2) ['x', 'image']" for seen in ([[0, 1], [2]], [[3, 4], [5]])]


def test_as_many_ranks_start_as_fit(program, tmp_path):
    program("loops.py", "counts", tmp_path)
    assert (tmp_path / "of-3").exists()


def test_a_directory_that_is_reported_in_the_background_is_deleted_if_it_is_not_the_caller_s(program, tmp_path):
    (tmp_path / "made").mkdir()
    done = program("loops.py", "reports_in_the_background", tmp_path / "made")
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["mine-0", "mine-1"]
    kept = [("checkpoint_000001", None, {"of": "theirs"}), ("checkpoint_000002", None, {"of": "mine"})]
    assert last(done, "result") == f"result {{}} {kept} None None"


def test_without_a_storage_path_a_run_has_a_folder_of_its_own(program, write, cluster, tmp_path):
    write("absent.py", """
        import tempfile
        from wingbeat.train import Checkpoint, TorchTrainer, report

        def loop():
            with tempfile.TemporaryDirectory() as folder:
                report({"x": float("inf")}, checkpoint=Checkpoint.from_directory(folder))

        if __name__ == "__main__":
            for _ in range(2):
                result = TorchTrainer(loop).fit()
                print("at", result.path, result.metrics, result.checkpoint.path)
    """)
    done = program(tmp_path / "absent.py", XDG_DATA_HOME=str(tmp_path / "data"))
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("at ")]
    paths = [Path(path) for _, path, *_ in lines]
    assert {path.parent for path in paths} == {tmp_path / "data/wingbeat/runs"} and len(set(paths)) == 2
    assert [(line[2:4], line[4]) for line in lines] == [(["{'x':", "inf}"], f"{path}/checkpoint_000001") for path in paths]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_ranks_have_their_grace_when_the_program_is_told_to_end(environment, tmp_path, name):
    running = subprocess.Popen(
        [sys.executable, PROGRAMS / "loops.py", "ignores_nothing", tmp_path],
        env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )
    begun = tmp_path / "begun"
    while not (begun.exists() and begun.read_text()):
        assert running.poll() is None, "it has ended before that"
        time.sleep(0.01)
    running.send_signal(signal.Signals[name])
    saved = tmp_path / "saved"
    while not (saved.exists() and saved.read_text()):
        time.sleep(0.01)
    said, _ = running.communicate(timeout=DEADLINE_SECONDS)
    assert saved.read_text() == name and ("interrupted" in said) == (name == "SIGINT")
    while os.path.exists(f"/proc/{begun.read_text()}"):
        time.sleep(0.01)


def test_a_hang_in_the_loop_names_the_rank_that_lags(program, write, tmp_path):
    write("hangs.py", """
        import signal
        from wingbeat import train

        def load_batch():
            while True:  # a signal that asks where it is ends `pause`
                signal.pause()

        def loop():
            if train.get_context().get_world_rank() == 1 and train.get_context().restart_count == 0:
                load_batch()
            train.report({"x": 1})

        if __name__ == "__main__":
            train.TorchTrainer(
                loop,
                scaling_config=train.ScalingConfig(num_workers=2),
                run_config=train.RunConfig(
                    storage_path="stored", hang_timeout_s=4,
                    failure_config=train.FailureConfig(max_failures=1, restart_on_hang=True),
                ),
            ).fit()
    """)
    done = program(tmp_path / "hangs.py")
    assert "rank 1 keeps the others waiting" in done.stderr and "load_batch" in done.stderr, done.stderr
    assert "attempt 2" in done.stderr


def test_the_example_trains(program, tmp_path):
    example = Path(__file__).resolve().parents[2] / "examples/torch_trainer.py"
    done = program(example, "--epochs", "6", "--storage", tmp_path / "stored")
    accuracy = float(last(done, "digits").split("accuracy ")[1].split(",")[0])
    assert accuracy > 0.9, done.stdout


def test_where_output_is_no_file_as_in_a_notebook_it_is_shown_all_the_same(program, write, tmp_path):
    write("cell.py", """
        import contextlib, io
        from wingbeat import train

        def loop():
            print("hello of", train.get_context().get_world_rank())
            train.report({"x": 1})

        if __name__ == "__main__":
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                train.TorchTrainer(loop, run_config=train.RunConfig(storage_path="stored")).fit()
            assert out.getvalue() == "[rank 0] hello of 0\\n", out.getvalue()
            assert "attempt 1, x 1" in err.getvalue(), err.getvalue()
    """)
    done = program(tmp_path / "cell.py")
    assert done.stdout == ""


def test_what_cannot_be_sent_is_named_where_it_is(cluster, monkeypatch):
    import threading

    from wingbeat.train import TorchTrainer

    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    lock = threading.Lock()

    def inner():
        return lock

    with pytest.raises(TypeError, match="inner cannot be sent to ranks: its variable 'lock', a lock"):
        TorchTrainer(lambda: inner()).fit()
    with pytest.raises(TypeError, match="its argument 'train_loop_config'"):
        TorchTrainer(lambda config: None, train_loop_config={"lock": lock}).fit()


def test_a_run_counts_against_the_quota_of_the_namespace_that_it_is_given(cluster, binary, monkeypatch):
    from wingbeat.torch import TorchDistributor
    from wingbeat.train import RunConfig, TorchTrainer

    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    assert subprocess.run([binary, "quota", "team", "CPU=2"], env=cluster).returncode == 0

    def looks(env):
        def told(kind):
            return json.loads(subprocess.run([binary, "list", kind, "--json"], env=env, stdout=subprocess.PIPE, check=True).stdout)

        return [(one["namespace"], one["used"]) for one in told("quotas")], [one["name"] for one in told("jobs")]

    try:
        distributor = TorchDistributor(1, local_mode=False, use_gpu=False, namespace="team", priority=3)
        quotas, jobs = distributor.run(looks, dict(cluster))
        assert [used["CPU"] for namespace, used in quotas if namespace == "team"] == [1] and "wingbeat train looks" in jobs
        others, _ = TorchDistributor(1, local_mode=False, use_gpu=False).run(looks, dict(cluster))
        assert [used.get("CPU", 0) for namespace, used in others if namespace == "team"] == [0]

        def loop(config):
            quotas, _ = looks(config)
            train.report({"used": dict(quotas)["team"]["CPU"]})

        from wingbeat import train

        result = TorchTrainer(loop, train_loop_config=dict(cluster), run_config=RunConfig(namespace="team")).fit()
        assert result.metrics["used"] == 1
    finally:
        subprocess.run([binary, "quota", "team", "--remove"], env=cluster, check=True)
