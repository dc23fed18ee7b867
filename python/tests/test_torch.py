"""The distributors, beside what pyspark's do."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import DEADLINE_SECONDS

from wingbeat.torch import DeepspeedTorchDistributor, TorchDistributor, TrainingError

PACKAGE = Path(__file__).resolve().parents[1]
NO_GPU = {"use_gpu": False}


@pytest.fixture(autouse=True)
def _on_the_cluster(cluster, monkeypatch):
    for name, value in cluster.items():
        if name.startswith("WINGBEAT_"):
            monkeypatch.setenv(name, value)


def distributor(ranks=2, **more):
    return TorchDistributor(ranks, local_mode=False, use_gpu=False, **more)


def test_rank_0_s_value_comes_back_whoever_is_last(tmp_path):
    first = str(tmp_path / "first")

    def main(a, *, b):
        import os

        rank = int(os.environ["RANK"])
        if rank == 0:
            open(first, "w").close()
        while not os.path.exists(first):  # rank 1 returns after rank 0 has come as far
            os.sched_yield()
        return rank, a + b

    assert distributor().run(main, 1, b=2) == (0, 3)
    assert distributor().run(main, 1, b=2, return_all=True) == [(0, 3), (1, 3)]


def test_spark_s_example_runs_with_another_import(environment):
    program = PACKAGE / "tests/programs/torch_distributor.py"
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "function 2 good" in done.stdout and done.stdout.count("script 2 good") == 2


def test_tensors_and_large_values_come_back():
    def main():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        ones = torch.ones(8 << 20)
        dist.all_reduce(ones)
        return {"sum": ones, "rank": dist.get_rank()}

    value = distributor().run(main)
    assert value["rank"] == 0 and value["sum"].shape == (8 << 20,) and value["sum"].unique().tolist() == [2.0]


def test_a_function_of_main_runs_on_this_machine(python, environment):
    done = python(
        textwrap.dedent("""
            from dataclasses import dataclass
            from wingbeat.torch import TorchDistributor

            @dataclass
            class Point:
                x: int

            def main(point):
                import os
                print("rank", os.environ["RANK"])
                return Point(point.x + 1)

            print(TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(main, Point(1)))
        """),
        environment,
    )
    assert "rank 0" in done.stdout and "rank 1" in done.stdout and "Point(x=2)" in done.stdout


def test_the_original_exception_is_raised_with_its_remote_traceback():
    class Odd(Exception):
        pass

    def main():
        import os
        import signal

        if os.environ["RANK"] == "1":
            raise Odd("no luck")
        signal.pause()

    with pytest.raises(Exception) as raised:
        distributor().run(main)
    assert type(raised.value).__name__ == "Odd" and str(raised.value) == "no luck"
    assert raised.value.__cause__.rank == 1 and "in main" in str(raised.value.__cause__)


def test_a_rank_that_fails_after_rank_0_has_returned_fails_the_run(tmp_path):
    returned = str(tmp_path / "returned")

    def main():
        import atexit
        import os

        if os.environ["RANK"] == "0":
            atexit.register(lambda: open(returned, "w").close())
            return "fine"
        while not os.path.exists(returned):
            os.sched_yield()
        raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        distributor().run(main)


def test_a_script_s_failure_is_an_error(write):
    script = write("seven.py", "import sys\nsys.exit(7)\n")
    with pytest.raises(TrainingError, match="exited with code 7") as raised:
        distributor(1).run(script)
    assert raised.value.rank == 0
    assert distributor().run(write("fine.py", "import sys\nassert sys.argv[1:] == ['--x', '1']\n"), "--x", 1) is None


def test_what_cannot_be_sent_is_named():
    import threading

    lock = threading.Lock()
    with pytest.raises(TypeError, match="its variable 'lock', a lock, cannot be pickled"):
        distributor().run(lambda: lock)
    with pytest.raises(TypeError, match="its argument 0, a lock"):
        distributor().run(print, lock)


def test_what_a_function_returns_must_be_picklable():
    def main():
        import threading

        return threading.Lock()

    with pytest.raises(TypeError, match="what the function returned, a lock, cannot be pickled"):
        distributor(1).run(main)


def test_bad_input_is_refused_before_anything_runs(tmp_path, monkeypatch):
    for bad in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="positive integer"):
            TorchDistributor(bad, **NO_GPU)
    with pytest.raises(ValueError, match="no keyword arguments: rate"):
        distributor().run(str(tmp_path), rate=1)
    with pytest.raises(FileNotFoundError):
        distributor().run(tmp_path / "missing.py")
    with pytest.raises(ValueError, match="numGpus"):
        DeepspeedTorchDistributor(numGpus=0)
    with pytest.raises(ValueError, match="one node"):
        DeepspeedTorchDistributor(numGpus=1, nnodes=2, useGpu=False)
    monkeypatch.delenv("WINGBEAT_ADDRESS")
    with pytest.raises(RuntimeError, match="WINGBEAT_ADDRESS"):
        TorchDistributor(2, local_mode=False, **NO_GPU)


def test_more_ranks_than_gpus_are_reduced_and_none_is_an_error(monkeypatch):
    monkeypatch.setattr("wingbeat.torch.local_gpus", lambda: 2)
    with pytest.warns(RuntimeWarning, match="reduced to 2"):
        assert TorchDistributor(4).num_processes == 2
    monkeypatch.setattr("wingbeat.torch.local_gpus", lambda: 0)
    with pytest.raises(RuntimeError, match="no GPU"):
        TorchDistributor(1)


def test_more_ranks_than_can_ever_fit_are_refused():
    with pytest.raises(TrainingError, match="cannot place 64 workers.*CPU"):
        distributor(64).run(print)


def test_each_rank_has_its_own_rows():
    import pandas

    def main():
        from wingbeat import train

        shard = train.get_dataset_shard()
        return shard.column("x").to_pylist(), shard.schema.names

    table = pandas.DataFrame({"x": range(5), "y": list("abcde")})
    parts = distributor().run_on_dataframe(main, table, return_all=True)
    assert [part for part, _ in parts] == [[0, 1], [2, 3, 4]] and parts[0][1][:2] == ["x", "y"]


def test_what_a_rank_starts_is_a_run_of_its_own(tmp_path):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"id": range(100)}), tmp_path / "rows.parquet")

    def inner():
        from wingbeat import train

        shard = train.get_dataset_shard("train")
        context = train.get_context()
        return shard.num_rows, train.get_checkpoint(), context.trial_id, context.experiment_name == context.run_id

    def outer(path):
        import os

        from wingbeat import train
        from wingbeat.torch import TorchDistributor

        # As a rank of a trial has them that goes on from a checkpoint.
        os.environ.update(WINGBEAT_CHECKPOINT="/a/checkpoint", WINGBEAT_TRIAL="trial_00000", WINGBEAT_EXPERIMENT="search")
        return train.get_dataset_shard("train").num_rows, TorchDistributor(1, local_mode=True, use_gpu=False).run_on_dataframe(inner, path)

    found = distributor(1).run_on_dataframe(outer, pyarrow.table({"id": range(7)}), str(tmp_path / "rows.parquet"))
    assert found == (7, (100, None, None, True))


def test_deepspeed_gets_its_configuration(tmp_path, write):
    script = write(
        "ds.py",
        "import json, os, sys\n"
        "assert sys.argv[1:4] == ['--x', '--deepspeed', '--deepspeed_config'], sys.argv\n"
        "assert json.load(open(sys.argv[4])) == {'train_batch_size': 8}\n"
        "assert sys.argv[4].startswith('/proc/'), 'it is in the memory of the rank\\'s own node'\n"
        "assert all(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT'))\n",
    )
    config = {"train_batch_size": 8}
    deepspeed = DeepspeedTorchDistributor(numGpus=2, localMode=False, useGpu=False, deepspeedConfig=config)
    deepspeed.run(script, "--x")

    def main():
        return sys.argv[1:]

    file = write("ds.json", '{"train_batch_size": 8}')
    deepspeed = DeepspeedTorchDistributor(localMode=False, useGpu=False, deepspeedConfig=file)
    assert deepspeed.run(main) == ["--deepspeed", "--deepspeed_config", str(file)]


def test_pip_install_brings_the_command_and_the_distributor(tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "WINGBEAT_"))}
    # As the tests' own build, which is there; a user's is optimized.
    env["MATURIN_PEP517_ARGS"] = "--profile dev"
    pip = [venv / "bin/pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE]
    subprocess.run(pip, env=env, check=True)
    env["PATH"] = f"{venv / 'bin'}:{env['PATH']}"
    subprocess.run(["wingbeat", "--version"], env=env, check=True)
    program = "import wingbeat.torch as t; print(t.TorchDistributor, t.binary())"
    told = subprocess.run([venv / "bin/python", "-c", program], env=env, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert str(venv / "bin/wingbeat") in told.stdout
    (package,) = venv.glob("lib/python3*/site-packages/wingbeat")
    assert (package / "py.typed").exists(), "type checkers look into a package that says it has types"
    (about,) = package.parent.glob("wingbeat-*.dist-info/METADATA")
    for line in ("License-Expression: MIT OR Apache-2.0", "Provides-Extra: arrow", "Classifier: Typing :: Typed", "# Wingbeat"):
        assert line in about.read_text(encoding="utf-8").splitlines(), line
