"""`wingbeat.train` in a script, inside and outside of a run."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import DEADLINE_SECONDS

from wingbeat import train

BASE = os.path.realpath(sys.executable)


def test_outside_of_a_run_a_script_is_the_only_rank(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "WINGBEAT_RANK_SOCKET", "WINGBEAT_CHECKPOINT"):
        monkeypatch.delenv(name, raising=False)
    context = train.get_context()
    assert (context.world_rank, context.world_size, context.local_rank, context.restart_count) == (0, 1, 0, 0)
    assert train.get_checkpoint() is None
    train.report({"loss": 1})
    monkeypatch.setattr("wingbeat.train._report._reported_here", None)
    monkeypatch.setenv("WINGBEAT_CHECKPOINT", "")
    train.report({"loss": 1}, checkpoint=tmp_path)
    assert train.get_checkpoint().path == str(tmp_path)
    with pytest.raises(KeyError, match="no dataset 'train'"):
        train.get_dataset_shard()


def test_a_metric_is_a_number():
    import torch

    train.report({"loss": torch.tensor(0.5), "nan": float("nan")})
    for bad in ("0.5", None, [1], torch.ones(2)):
        with pytest.raises(TypeError, match="the metric 'loss' is a .*, not a number"):
            train.report({"loss": bad})
    with pytest.raises(FileNotFoundError):
        train.report({}, checkpoint="/no/such/folder")


def test_reports_wait_for_all_ranks_and_the_last_is_the_run_s(run, write, cluster):
    script = write(
        "reports.py",
        textwrap.dedent("""
            import os, sys
            from wingbeat import train
            rank = train.get_context().world_rank
            for step in range(3):
                train.report({"step": step, "rank": rank, "big": float("inf")})
        """),
    )
    done = run("train", "-n", "2", script, env=cluster)
    assert done.stderr.endswith("attempt 1, big inf, rank 0, step 2\n")


def test_a_rank_that_ends_early_fails_the_reports_of_others(run, write, cluster):
    script = write(
        "early.py",
        "import os, sys\nfrom wingbeat import train\n"
        "if os.environ['RANK'] == '1':\n    sys.exit(0)\n"
        "train.report({'x': 1})\n",
    )
    done = run("train", "-n", "2", script, env=cluster, code=1)
    assert "ReportError: rank 1 ended without this report" in done.stderr


def test_a_report_that_cannot_be_read_is_refused_and_the_next_is_taken(run, write, cluster, tmp_path):
    script = write("odd.py", """
        import os, sys
        from wingbeat import train

        odd = os.fsencode(sys.argv[1]) + b"/state-\\xff"  # no UTF-8
        os.mkdir(odd)
        for refused in ({"metrics": {"x": 1}, "checkpoint": os.fsdecode(odd)}, {"metrics": {"x" * (17 << 20): 1}}):
            try:
                train.report(**refused)
            except train.ReportError as error:
                print(error)
        train.report({"x": 2})
    """)
    done = run("train", "--unprefixed", script, "--", tmp_path, env=cluster)
    first, second = done.stdout.splitlines()
    assert "surrogate" in first or "unicode" in first.lower() or "escape" in first, first
    assert "may take 16,777,216" in second
    assert done.stderr.endswith("attempt 1, x 2\n")


# py-spy is beside the tests' own interpreter, and not beside the one that it was made from.
@pytest.mark.parametrize("options", [(), ("--cold",), ("--cold", "--python", BASE)], ids=["forked", "cold", "no py-spy"])
def test_a_hang_is_seen_and_the_rank_that_lags_is_named(run, write, cluster, options):
    script = write(
        "hangs.py",
        textwrap.dedent("""
            import os, signal
            from wingbeat import train
            def load_batch():
                while True:  # a signal that asks where it is ends `pause`
                    signal.pause()
            if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                load_batch()
            train.report({"x": 1})
        """),
    )
    watch = ("--hang-timeout", "4s", "--restart-on-hang", "--max-failures", "1")
    done = run("train", "-n", "2", *watch, *options, script, env=cluster)
    assert "rank 1 keeps the others waiting" in done.stderr
    assert "load_batch" in done.stderr and "waited" in done.stderr
    assert "attempt 2" in done.stderr


def test_the_exit_code_of_a_rank_is_the_run_s_unless_that_means_something_else(run, write, cluster):
    script = write("exits.py", "import sys\nsys.exit(int(sys.argv[1]))\n")
    run("train", script, "--", 7, env=cluster, code=7)
    assert "74" in run("train", script, "--", 74, env=cluster, code=1).stderr


def test_a_program_runs_where_it_says_whatever_context_is_in_use(python, environment, tmp_path):
    (tmp_path / "wingbeat").mkdir()
    (tmp_path / "wingbeat/config.toml").write_text('current = "away"\n[context.away]\naddress = "127.0.0.1:9"\n')
    env = {**environment, "XDG_CONFIG_HOME": str(tmp_path)}
    del env["WINGBEAT_CONTEXT"]
    done = python("""
        from wingbeat.torch import TorchDistributor
        print("sum", TorchDistributor(1, local_mode=True, use_gpu=False).run(sum, [1, 2]))
    """, env=env)
    assert "sum 3" in done.stdout


def test_a_rank_that_takes_all_memory_ends_and_no_other_that_was_forked_beside_it(run, write, own_cluster, binary):
    own_cluster.worker(cpus=2, WINGBEAT_MEMORY_LIMIT=str(4 << 30))
    small = write("small.py", "import sys\nprint('here', flush=True)\nsys.stdin.read()\n")
    hog = write("hog.py", "import time\ngrown = []\nwhile True:\n    grown.append(b'x' * (64 << 20))\n    time.sleep(0.02)\n")
    pipe = subprocess.PIPE
    beside = subprocess.Popen([binary, "train", small], env=own_cluster.env, stdin=pipe, stdout=pipe, text=True)
    assert beside.stdout.readline() == "[rank 0] here\n"
    done = run("train", hog, env=own_cluster.env, code=1)
    assert "memory ran out" in done.stderr and "_warm.py" not in done.stderr, done.stderr
    # Each process of a rank, its keeper included, counts as the rank's.
    used = re.findall(r"which wingbeat_train::(\S+) has started", done.stderr)
    assert used.count("rank::Rank") == 4, done.stderr
    # The warm Python may be trying in a child what it will import for the next ranks.
    assert [one for one in used if one != "rank::Rank"] in (["warm::WarmPython"], ["warm::WarmPython"] * 2), done.stderr
    beside.stdin.close()
    assert beside.wait(DEADLINE_SECONDS) == 0, beside.stdout.read()
    beside.stdout.close()


@pytest.mark.parametrize("options", [(), ("--cold", "--python", BASE)], ids=["py-spy", "faulthandler"])
def test_where_a_rank_is_can_be_asked_at_any_time(run, write, own_cluster, binary, options):
    own_cluster.worker(cpus=1)
    script = write("waits.py", """
        import threading
        def load_batch():
            print("waits", flush=True)
            threading.Event().wait()  # unlike signal.pause, it goes on when Python is asked by a signal
        load_batch()
    """)
    running = subprocess.Popen([binary, "train", *options, script], env=own_cluster.env, stdout=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "[rank 0] waits\n"
    rank = re.search(r"(actor-\w+) +Rank", run("list", "actors", env=own_cluster.env).stdout)[1]
    assert "wingbeat train waits.py" in run("list", "jobs", env=own_cluster.env).stdout
    said = run("stack", rank, env=own_cluster.env).stdout
    pid = re.search(r"rank 0 of 1: program (\d+), which it has started", said)[1]
    job = re.search(r"(job-\w+) +wingbeat train waits.py +running", run("list", "jobs", env=own_cluster.env).stdout)[1]
    for whose in (rank, pid, job):
        said = run("stack", whose, env=own_cluster.env).stdout
        assert "load_batch" in said and "WarmPython" not in said, (whose, said)
    running.send_signal(signal.SIGINT)
    assert running.wait(DEADLINE_SECONDS) == 128 + signal.SIGINT
    running.stdout.close()
    # Its warm Python is left, if it had one. The rank's process may take a moment to end.
    expected = r"no jobs" if options else r"waits.py +ended"
    until = time.monotonic() + DEADLINE_SECONDS
    while not re.search(expected, left := run("list", "jobs", env=own_cluster.env).stdout):
        assert time.monotonic() < until, left


def test_a_metric_that_no_checkpoint_has_is_named_once_and_to_keep_none_is_refused(run, write, cluster, tmp_path):
    script = write("reports.py", """
        import pathlib
        from wingbeat import train
        kept = pathlib.Path(__file__).with_name("kept")
        kept.mkdir(exist_ok=True)
        for step in range(3):
            train.report({"loss": step, "step": step}, checkpoint=kept)
    """)
    done = run("train", "--storage", tmp_path / "runs", "--keep-best", "los:min", script, env=cluster)
    assert done.stderr.count("no checkpoint has the metric `los`: they have loss, step") == 1, done.stderr
    for wrong in (("--keep", 0), ("--keep-best", "loss", "--keep-best-count", 0)):
        assert "1 or more" in run("train", *wrong, script, env=cluster, code=2).stderr


def test_who_is_no_python_is_not_ended_by_the_question_where_it_is(run, write, own_cluster, binary):
    own_cluster.worker(cpus=1)
    script = write("waits.sh", "#!/bin/sh\necho waits\nread answer\necho $answer\n")
    script.chmod(0o700)
    pipe = subprocess.PIPE
    command = [binary, "torchrun", "--no-python", script]
    running = subprocess.Popen(command, env=own_cluster.env, stdin=pipe, stdout=pipe, text=True)
    assert "waits" in running.stdout.readline()
    rank = re.search(r"(actor-\w+) +Rank", run("list", "actors", env=own_cluster.env).stdout)[1]
    assert "it is not Python" in run("stack", rank, env=own_cluster.env).stdout
    assert running.communicate("goes on\n", DEADLINE_SECONDS)[0].endswith("goes on\n")
    assert running.returncode == 0


def test_a_port_that_is_lost_to_a_race_is_no_failure(run, write, cluster, tmp_path):
    script = write(
        "loses.py",
        textwrap.dedent("""
            import os, pathlib, socket
            import torch.distributed as dist
            lost = pathlib.Path("lost")
            if not lost.exists():
                # Somebody is faster than torch's store.
                taken = socket.create_server(("0.0.0.0", int(os.environ["MASTER_PORT"])))
                lost.write_text(os.environ["MASTER_PORT"])
            dist.init_process_group("gloo")
            other = lost.read_text() != os.environ["MASTER_PORT"]
            print("restarts", os.environ["TORCHELASTIC_RESTART_COUNT"], "other port", other)
            dist.destroy_process_group()
        """),
    )
    done = run("train", script, env=cluster, cwd=tmp_path)
    assert "trying another port" in done.stderr
    assert "restarts 0 other port True" in done.stdout


def test_a_run_whose_nccl_goes_on_does_not_hang_however_quiet_it_is(run, write, cluster):
    script = write(
        "quiet.py",
        textwrap.dedent("""
            import json, os, socket
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
                raise SystemExit
            # The port that NCCL would listen on: three times it has done more, and then no more.
            host, port = os.environ["NCCL_RAS_ADDR"].split(":")
            server = socket.create_server((host, int(port)))
            print("listens", flush=True)  # from here on it is quiet
            for count in (1, 2, 3, 3):
                client, _ = server.accept()
                lines = client.makefile("r")
                for answer in ("SERVER PROTOCOL 2", "OK", "OK"):
                    lines.readline()
                    client.sendall(answer.encode() + b"\\n")
                assert lines.readline() == "STATUS\\n"
                rank = {"rank": 0, "collective_counts": {"AllReduce": count}}
                client.sendall(json.dumps({"communicators": [{"size": 1, "ranks": [rank]}]}).encode())
                lines.close()
                client.close()
            server.accept()
        """),
    )
    options = ("--backend", "nccl", "--hang-timeout", "2s", "--restart-on-hang", "--max-failures", "1")
    done = run("train", *options, script, env=cluster)
    assert done.stderr.count("no rank has printed or reported anything") == 1
    assert "group of 1: rank 0 began 3 AllReduce" in done.stderr
    assert "attempt 2" in done.stderr


def test_a_run_that_is_stopped_lets_scripts_save(write, binary, cluster, tmp_path):
    import signal
    import subprocess

    script = write(
        "saves.py",
        textwrap.dedent("""
            import signal, sys, time
            def save(*_):
                open("saved", "w").close()
                sys.exit(0)
            signal.signal(signal.SIGTERM, save)
            print("ready", flush=True)
            while True:  # a signal just before `pause` would be missed
                time.sleep(0.01)
        """),
    )
    run = subprocess.Popen([binary, "train", script], env=cluster, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert "ready" in run.stdout.readline()
    run.send_signal(signal.SIGTERM)
    run.stdout.read()
    assert run.wait() == 143 and (tmp_path / "saved").exists()
    run.stdout.close()


CHECKPOINTS = textwrap.dedent("""
    import json, os, signal
    from wingbeat import train
    context = train.get_context()
    start = 0
    if checkpoint := train.get_checkpoint():
        start = json.load(open(os.path.join(checkpoint, "state.json")))["step"] + 1
        assert "rank-0" in os.listdir(checkpoint), os.listdir(checkpoint)
    print("starts at", start, flush=True)
    for step in range(start, 4):
        folder = f"work-{context.world_rank}"
        os.makedirs(f"{folder}", exist_ok=True)
        open(f"{folder}/rank-{context.world_rank}", "w").close()
        if context.world_rank == 0:
            json.dump({"step": step}, open(f"{folder}/state.json", "w"))
        if step == 2 and context.restart_count == 0 and context.world_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train.report({"step": step, "loss": abs(step - 1)}, checkpoint=folder)
""")


def test_a_restart_goes_on_from_the_newest_complete_checkpoint(run, write, cluster, tmp_path):
    script = write("saves.py", CHECKPOINTS)
    options = ("-n", "2", "--max-failures", "1", "--storage", "store", "--keep", "1", "--keep-best", "loss:min")
    done = run("train", *options, script, env=cluster, cwd=tmp_path)
    assert done.stdout.count("starts at 0") == 2 and done.stdout.count("starts at 2") == 2
    kept = {path.name: sorted(file.name for file in path.iterdir()) for path in (tmp_path / "store").iterdir() if path.is_dir()}
    files = [".wingbeat-complete.json", ".wingbeat-made-in", "rank-0", "rank-1", "state.json"]
    assert kept == {"checkpoint_000002": files, "checkpoint_000004": files}
    metrics = [json.loads(line) for line in (tmp_path / "store/metrics.jsonl").read_text().splitlines()]
    assert [(line["attempt"], line["step"]) for line in metrics] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert "the newest checkpoint is" in done.stderr and "the best is" in done.stderr
    done = run("train", *options, script, env=cluster, cwd=tmp_path)
    assert done.stdout.count("starts at 4") == 2, "the next run goes on, too"


def test_one_run_at_a_time_uses_a_storage_and_leaves_there_what_others_made(run, write, binary, cluster, tmp_path):
    for folder in ("checkpoint_0", "checkpoint_000000", "checkpoint_500"):
        (tmp_path / "store" / folder).mkdir(parents=True)
        (tmp_path / "store" / folder / "model.pt").write_text("precious")
    env = {**cluster, "WINGBEAT_STORAGE_STALE_MS": "6000"}
    end = tmp_path / "end"
    script = write(
        "waits.py",
        "import os\nfrom wingbeat import train\nprint('began', flush=True)\n"
        f"while not os.path.exists({str(end)!r}):\n    os.sched_yield()\n"
        "open('complete.json', 'w').write('mine')\ntrain.report({}, checkpoint='complete.json')\n",
    )
    options = ("train", "--storage", "store", "--keep", "1", script)
    with subprocess.Popen([binary, *options], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as first:
        assert "began" in first.stdout.readline()
        second = run(*options, env=env, cwd=tmp_path, code=1)
        assert "is used by the run" in second.stderr and "wait for its end" in second.stderr, second.stderr
        end.write_text("")
        first.stdout.read()
        assert first.wait() == 0
    run(*options, env=env, cwd=tmp_path)
    kept = {str(path.relative_to(tmp_path / "store")) for path in (tmp_path / "store").glob("checkpoint_*/[!.]*")}
    theirs = {f"checkpoint_{name}/model.pt" for name in ("0", "000000", "500")}
    assert kept == theirs | {"checkpoint_000502/complete.json"}
    assert (tmp_path / "store/checkpoint_000502/complete.json").read_text() == "mine"


def test_a_storage_that_cannot_be_written_is_found_before_training(run, write, cluster, tmp_path):
    script = write("never.py", "print('trained')\n")
    done = run("train", "--storage", "/proc/nowhere", script, env=cluster, code=1)
    assert "cannot make /proc/nowhere" in done.stderr and "trained" not in done.stdout
    script = write("reports.py", "from wingbeat import train\ntrain.report({}, checkpoint=__file__)\n")
    # Without a home, what the command keeps lies in the folder for temporary files.
    homeless = {**cluster, "HOME": "", "XDG_DATA_HOME": "", "TMPDIR": str(tmp_path)}
    assert "name a storage" in run("train", script, env=homeless, code=1).stderr


def test_a_checkpoint_that_nobody_waits_for_is_there_at_the_end(run, write, cluster, tmp_path):
    script = write(
        "later.py",
        textwrap.dedent("""
            import os
            from wingbeat import train
            rank = train.get_context().world_rank
            for step in range(3):
                os.makedirs(f"part-{rank}-{step}")
                with open(f"part-{rank}-{step}/{rank}.bin", "wb") as file:
                    file.write(bytes(1 << 20))
                train.report({"step": step}, checkpoint=f"part-{rank}-{step}", wait=False)
        """),
    )
    run("train", "-n", "2", "--storage", "store", "--keep", "5", script, env=cluster, cwd=tmp_path)
    stored = sorted(path.name for path in (tmp_path / "store").glob("checkpoint_*"))
    assert stored == ["checkpoint_000001", "checkpoint_000002", "checkpoint_000003"]
    for name in stored:
        files = {path.name: path.stat().st_size for path in (tmp_path / "store" / name).iterdir()}
        assert (files["0.bin"], files["1.bin"], ".wingbeat-complete.json" in files) == (1 << 20, 1 << 20, True)


def test_an_exception_may_be_final(run, write, cluster):
    script = write("raises.py", "raise ValueError('always')\n")
    done = run("train", "--max-failures", "5", "--fail-on-exception", script, env=cluster, code=1)
    assert "trying again" not in done.stderr and "ValueError: always" in done.stderr


def test_a_syntax_error_is_shown_with_its_line(run, write, cluster):
    script = write("typo.py", "x = (1,\ny = 2\n")
    done = run("train", script, env=cluster, code=1)
    assert "SyntaxError" in done.stderr and "typo.py" in done.stderr


def test_the_newest_checkpoint_is_that_of_the_last_report(run, write, cluster, tmp_path):
    script = write("newest.py", """
        import os, pathlib, tempfile
        from wingbeat import train
        rank = train.get_context().world_rank
        assert train.get_checkpoint() is None
        for step in range(3):
            with tempfile.TemporaryDirectory() as folder:
                pathlib.Path(folder, f"of-{rank}").write_text(str(step))
                train.report({"step": step}, checkpoint=folder)
            newest = pathlib.Path(train.get_checkpoint().path)
            assert [newest.joinpath(f"of-{one}").read_text() for one in (0, 1)] == [str(step)] * 2, newest
    """)
    run("train", "-n", "2", "--storage", tmp_path / "stored", script, env=cluster)


def test_a_checkpoint_is_kept_with_links_modes_and_empty_folders(run, write, cluster, tmp_path):
    script = write("shapes.py", """
        import os, pathlib
        from wingbeat import train
        made = pathlib.Path("made")
        (made / "step-5" / "none").mkdir(parents=True)
        (made / "step-5" / "run.sh").write_text("exit 0")
        (made / "step-5" / "run.sh").chmod(0o750)
        (made / "latest").symlink_to("step-5")
        train.report({}, checkpoint=made)
        again = pathlib.Path(train.get_checkpoint().path)
        # A checkpoint that was read may be reported as it is.
        train.report({"again": 1}, checkpoint=again)
    """)
    run("train", "--storage", tmp_path / "stored", script, env=cluster, cwd=tmp_path)
    for number in (1, 2):
        kept = tmp_path / "stored" / f"checkpoint_00000{number}"
        assert os.readlink(kept / "latest") == "step-5"
        assert (kept / "latest" / "run.sh").stat().st_mode & 0o777 == 0o750
        assert (kept / "step-5" / "none").is_dir()
        complete = json.loads((kept / ".wingbeat-complete.json").read_text())
        assert complete["files"] == ["step-5/run.sh"]
        assert complete["metrics"] == ({"again": "1"} if number == 2 else {})


def test_what_cannot_be_kept_of_a_checkpoint_is_refused_by_name(run, write, cluster, tmp_path):
    script = write("refused.py", """
        import pathlib
        from wingbeat import train
        made = pathlib.Path("made")
        made.mkdir()
        (made / "data").symlink_to("/usr")
        train.report({}, checkpoint=made)
    """)
    done = run("train", "--storage", tmp_path / "stored", script, env=cluster, cwd=tmp_path, code=1)
    assert "made/data is a link to /usr" in done.stderr and "leave it out" in done.stderr


def test_room_is_made_before_the_first_checkpoint_and_what_is_left_of_one_that_failed_is_removed(run, write, cluster, tmp_path):
    script = write("room.py", """
        import os, pathlib, sys
        from wingbeat import train
        made = pathlib.Path("made")
        made.mkdir(exist_ok=True)
        for step in range(int(sys.argv[1])):
            train.report({"step": step}, checkpoint=made)
        (made / "data").symlink_to("/usr")
        try:
            train.report({}, checkpoint=made)
        except train.ReportError:
            (made / "data").unlink()
    """)
    stored = lambda: sorted(path.name for path in (tmp_path / "stored").glob("checkpoint_*"))  # noqa: E731
    run("train", "--storage", "stored", "--keep", "9", script, "--", "4", env=cluster, cwd=tmp_path)
    assert stored() == [f"checkpoint_00000{number}" for number in (1, 2, 3, 4)]
    run("train", "--storage", "stored", "--keep", "2", script, "--", "0", env=cluster, cwd=tmp_path)
    assert stored() == ["checkpoint_000003", "checkpoint_000004"]


def test_many_checkpoints_that_nobody_waits_for_are_stored_one_after_the_other(run, write, cluster, tmp_path):
    script = write("eager.py", """
        import pathlib
        from wingbeat import train
        for step in range(40):
            made = pathlib.Path(f"made-{step}")
            made.mkdir()
            (made / "step").write_text(str(step))
            train.report({"step": step}, checkpoint=made, wait=False)
    """)
    run("train", "--storage", tmp_path / "stored", "--keep", "40", script, env=cluster, cwd=tmp_path)
    kept = sorted((tmp_path / "stored").glob("checkpoint_*"))
    assert [int((one / "step").read_text()) for one in kept] == list(range(40))


def test_runs_do_not_share_the_folder_that_was_shipped(run, write, cluster, tmp_path):
    code = tmp_path / "code"
    (code / "target").mkdir(parents=True)
    (code / "target" / "labels.py").write_text("labels = 3\n")
    (code / ".gitignore").write_text("*.log\n")
    (code / "old.log").write_text("")
    (code / "writes.py").write_text(textwrap.dedent("""
        import os
        from target.labels import labels
        from wingbeat import train
        if train.get_context().world_rank == 0:
            open("written", "x").close()
        train.report({})
        print(labels, sorted(os.listdir()))
    """))
    for _ in range(2):
        done = run("train", "-n", "2", "--working-dir", code, "writes.py", env=cluster)
        assert done.stdout.count("3 ['.gitignore', 'target', 'writes.py', 'written']") == 2, done.stdout
    assert not (code / "written").exists()


def stopped(binary, cluster, script, *options, cwd):
    """A run that was told to stop when it said `begun`: its exit code, and what it printed after that."""
    running = subprocess.Popen(
        [binary, "train", "--unprefixed", *map(str, options), script], env=cluster, cwd=cwd, stdout=subprocess.PIPE, text=True
    )
    assert running.stdout.readline() == "begun\n"
    running.terminate()
    out, _ = running.communicate(timeout=300)
    return running.returncode, out


def test_what_is_reported_in_the_grace_is_stored_and_answered(binary, write, cluster, tmp_path):
    script = write("grace.py", """
        import os, pathlib, signal, sys, time
        from wingbeat import train
        def save(*_):
            last = pathlib.Path("last")
            last.mkdir()
            (last / "step").write_text("99")
            train.report({"step": 99}, checkpoint=last)
            assert pathlib.Path(train.get_checkpoint().path, "step").read_text() == "99"
            os.write(1, b"saved\\n")
            os._exit(0)
        signal.signal(signal.SIGTERM, save)
        large = pathlib.Path("large")
        large.mkdir()
        with open(large / "model", "wb") as file:
            file.truncate(200 << 20)
        train.report({"step": 1}, checkpoint=large, wait=False)
        os.write(1, b"begun\\n")
        while True:
            time.sleep(0.01)
    """)
    code, out = stopped(binary, cluster, script, "--storage", "stored", "--keep", "9", cwd=tmp_path)
    assert (code, out) == (128 + 15, "saved\n")
    assert (tmp_path / "stored" / "checkpoint_000002" / "step").read_text() == "99"


def test_a_report_that_a_signal_has_interrupted_is_answered_to_nobody(run, write, cluster, tmp_path):
    script = write("interrupted.py", """
        import os, pathlib, signal
        from wingbeat import train
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGALRM, lambda *_: exec("raise KeyboardInterrupt"))
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                train.report({"step": 1})
            except KeyboardInterrupt:
                pathlib.Path("final").mkdir()
                pathlib.Path("final", "step").write_text("99")
                train.report({"step": 99}, checkpoint="final")
            assert pathlib.Path(train.get_checkpoint().path, "step").read_text() == "99"
            open("stored-by-now", "x").close()
        else:
            while not os.path.exists("final"):
                os.sched_yield()
            # Whether the first report or the last of rank 0 is there by now, nobody can see.
            while not os.path.exists("stored-by-now"):
                try:
                    train.report({"step": 1})
                except train.ReportError:  # rank 0 is done
                    break
    """)
    run("train", "-n", "2", "--storage", "stored", script, env=cluster, cwd=tmp_path)
    assert (tmp_path / "stored-by-now").exists()


def test_of_two_processes_of_a_rank_that_report_one_is_told_why_not(run, write, cluster):
    script = write("twice.py", """
        import os
        from wingbeat import train
        if os.environ["RANK"] == "1":
            while not os.path.exists("refused"):
                os.sched_yield()
            train.report({"x": 1})
        else:
            child = os.fork()
            try:
                train.report({"x": 1})
            except train.ReportError as error:  # whichever came first
                assert "one process" in str(error), error
                open("refused", "x").close()
            if child:
                assert os.waitpid(child, 0)[1] == 0
            else:
                os._exit(0)
    """)
    run("train", "-n", "2", "--unprefixed", script, env=cluster, cwd=script.parent)


def test_the_next_attempt_finds_what_the_last_has_written_into_the_shipped_folder(run, write, own_cluster, tmp_path):
    own_cluster.env["HOME"] = str(tmp_path / "home")
    own_cluster.worker(cpus=1)
    code = tmp_path / "code"
    code.mkdir()
    (code / "snapshots.py").write_text(textwrap.dedent("""
        import os
        print("found", os.path.exists("snapshot.pt"))
        open("snapshot.pt", "a").close()
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    """))
    done = run("train", "--unprefixed", "--max-failures", "1", "--working-dir", code, "snapshots.py", env=own_cluster.env)
    assert done.stdout.split() == ["found", "False", "found", "True"]
    assert list((tmp_path / "home" / ".cache" / "wingbeat").glob("run-*")) == [], "nothing of it is left"


def test_metrics_lie_beside_checkpoints_of_no_named_storage(run, write, cluster, tmp_path):
    script = write("metrics.py", """
        import pathlib
        from wingbeat import train
        train.report({"loss": 3})
        pathlib.Path("made").mkdir()
        train.report({"loss": 2}, checkpoint="made")
        train.report({"loss": 1})
    """)
    env = {**cluster, "XDG_DATA_HOME": str(tmp_path / "data")}
    run("train", script, env=env, cwd=tmp_path)
    (metrics,) = (tmp_path / "data").glob("wingbeat/runs/*/metrics.jsonl")
    assert [json.loads(line)["loss"] for line in metrics.read_text().splitlines()] == [3, 2, 1]


def test_nodes_that_share_a_disk_have_folders_of_their_own(run, own_cluster, tmp_path):
    for _ in range(2):
        own_cluster.worker(cpus=1)
    code = tmp_path / "code"
    code.mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").write_text("3")
    (code / "data").symlink_to("../data")
    (code / "writes.py").write_text('open("written", "x").close()\nprint("wrote", open("data/rows").read())\n')
    options = ("--nodes", "2", "--cold", "--unprefixed", "--working-dir", code)
    done = run("train", *options, "writes.py", env=own_cluster.env)
    assert done.stdout == "wrote 3\n" * 2


def test_a_signal_s_handler_reports_in_the_middle_of_a_report(binary, write, cluster, tmp_path):
    script = write("nested.py", """
        import os, pathlib, signal, threading, time
        from wingbeat import train
        rank = os.environ["RANK"]
        def report(name, step):
            own = pathlib.Path(name)
            own.mkdir()
            (own / rank).write_text(step)
            train.report({"step": int(step)}, checkpoint=own)
        def save(*_):
            report(f"last-{rank}", "99")
            os.write(1, b"saved\\n")
            if rank == "1":
                # The first was the other's 99, or its 1 that was waiting: whichever is heard first.
                try:
                    report("once-more", "99")
                except train.ReportError as error:
                    assert "rank 0 ended" in str(error), error
            os._exit(0)
        signal.signal(signal.SIGTERM, save)
        if rank == "0":
            while not os.path.exists("ready"):
                os.sched_yield()
            threading.Timer(0.5, os.write, (1, b"begun\\n")).start()
            report("first", "1")
        else:
            open("ready", "x").close()
            while True:
                time.sleep(0.01)
    """)
    code, out = stopped(binary, cluster, script, "-n", "2", "--storage", "stored", "--keep", "9", cwd=tmp_path)
    assert (code, out) == (128 + 15, "saved\nsaved\n")
    stored = [{rank: (checkpoint / rank).read_text() for rank in "01"} for checkpoint in (tmp_path / "stored").glob("checkpoint_*")]
    assert {"0": "99", "1": "99"} in stored, stored


# A checkpoint of one step, of which each rank gives a file.
REPORTS_STEPS = """
        import os, pathlib, signal, time
        from wingbeat import train
        rank = os.environ["RANK"]
        def report(step):
            own = pathlib.Path(f"{rank}-{step}")
            own.mkdir()
            (own / rank).write_text(str(step))
            train.report({"step": step}, checkpoint=own)"""


def test_what_a_rank_reported_and_gave_up_is_no_part_of_what_comes_next(run, write, cluster, tmp_path):
    script = write("given_up.py", REPORTS_STEPS + """
        if rank == "0":
            signal.signal(signal.SIGALRM, lambda *_: exec("raise KeyboardInterrupt"))
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                report(1)
            except KeyboardInterrupt:
                open("given-up", "x").close()
            while not os.path.exists("1-2"):
                time.sleep(0.01)
            time.sleep(2)  # by then the other waits
            report(2)
        else:
            while not os.path.exists("given-up"):
                time.sleep(0.01)
            time.sleep(2)  # by then it is heard that the first was given up
            report(2)
    """)
    run("train", "-n", "2", "--storage", "stored", script, env=cluster, cwd=tmp_path)
    [checkpoint] = (tmp_path / "stored").glob("checkpoint_*")
    assert {rank: (checkpoint / rank).read_text() for rank in "01"} == {"0": "2", "1": "2"}


def test_a_process_that_a_rank_has_started_gets_the_newest_checkpoint(run, write, cluster, tmp_path):
    script = write("helpers.py", """
        import pathlib, subprocess, sys
        from wingbeat import train
        for step in range(1, 4):
            own = pathlib.Path(f"step-{step}")
            own.mkdir()
            (own / "step").write_text(str(step))
            train.report({"step": step}, checkpoint=own)
        ask = "from wingbeat import train; print(open(train.get_checkpoint().path + '/step').read())"
        assert subprocess.check_output([sys.executable, "-c", ask], text=True) == "3\\n"
    """)
    run("train", "--storage", "stored", "--keep", "1", script, env=cluster, cwd=tmp_path)
    run("train", "--storage", "stored", "--keep", "1", write("next.py", """
        from wingbeat import train
        assert open(train.get_checkpoint().path + '/step').read() == "3"
    """), env=cluster, cwd=tmp_path)


def test_a_folder_with_the_storage_in_it_is_no_checkpoint(run, write, cluster, tmp_path):
    script = write("within.py", "from wingbeat import train\ntrain.report({'x': 1}, checkpoint='out')\n")
    done = run("train", "--storage", "out", script, env=cluster, cwd=tmp_path, code=1)
    assert "the storage" in done.stderr and "lies in it" in done.stderr, done.stderr
    assert "wingbeat_train" not in done.stderr, done.stderr


def test_a_storage_that_does_not_answer_keeps_nobody_from_stopping(binary, write, cluster, tmp_path):
    (tmp_path / "stored").mkdir()
    os.mkfifo(tmp_path / "stored" / "metrics.jsonl")  # whoever opens it waits
    script = write("waits.py", """
        import os, signal, time
        from wingbeat import train
        def save(*_):
            os.write(1, b"saved\\n")
            os._exit(0)
        signal.signal(signal.SIGTERM, save)
        train.report({"step": 1})
        os.write(1, b"begun\\n")
        while True:
            time.sleep(0.01)
    """)
    process = subprocess.Popen(
        [binary, "train", "--unprefixed", "--storage", "stored", script],
        env=cluster, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    assert process.stdout.readline() == "begun\n"
    process.terminate()
    assert process.stdout.readline() == "saved\n"
    process.stdout.close()
    # It waits a while for the storage; a second signal that is not a part of the first ends that.
    while True:
        try:
            assert process.wait(1.5) == 128 + 15
            break
        except subprocess.TimeoutExpired:
            process.terminate()


def test_a_run_ends_without_a_storage_that_does_not_answer(run, write, cluster, tmp_path):
    (tmp_path / "stored").mkdir()
    os.mkfifo(tmp_path / "stored" / "metrics.jsonl")  # whoever opens it waits
    script = write("reports.py", "from wingbeat import train\ntrain.report({'step': 1})\n")
    env = {**cluster, "WINGBEAT_STORAGE_LIMIT_MS": "500"}
    done = run("train", "--storage", "stored", script, env=env, cwd=tmp_path)
    assert "the last metrics could not be stored in time" in done.stderr, done.stderr


# What stores the checkpoint waits until somebody reads.
STALLS = """
        import os
        from wingbeat import train
        os.makedirs("stored/checkpoint_000001")
        os.mkfifo("stored/checkpoint_000001/.wingbeat-complete.json.new")
        open("made", "w").close()
"""


def test_a_run_says_that_its_last_checkpoint_is_still_being_stored(binary, write, cluster, tmp_path):
    script = write("ends.py", STALLS + """
        train.report({"step": 1}, checkpoint="made", wait=False)
    """)
    process = subprocess.Popen(
        [binary, "train", "--storage", "stored", script],
        env={**cluster, "WINGBEAT_STORAGE_LIMIT_MS": "200"}, cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )
    said = next(line for line in process.stderr if "all ranks have ended" in line)
    assert f"waiting for the storage file://{tmp_path}/stored/ to store the last checkpoint" in said
    process.terminate()
    left = process.communicate(timeout=DEADLINE_SECONDS)[1]
    assert "the run was stopped: waiting up to" in left and process.returncode == 128 + 15, left


def test_a_checkpoint_that_takes_longer_than_the_hang_timeout_is_no_hang(binary, write, cluster, tmp_path):
    script = write("saves.py", STALLS + """
        try:
            train.report({"step": 1}, checkpoint="made")
        except train.ReportError:
            print("answered", flush=True)
    """)
    process = subprocess.Popen(
        [binary, "train", "--unprefixed", "--storage", "stored", "--hang-timeout", "4s", "--restart-on-hang", script],
        env=cluster, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    said = next((line for line in process.stderr if "has taken" in line or "Traceback" in line or "hang" in line), "")
    assert f"the storage file://{tmp_path}/stored/ has taken" in said and "so far to store a checkpoint" in said, said
    # It is read now; what is no file cannot be kept, which the report says.
    with open(tmp_path / "stored/checkpoint_000001/.wingbeat-complete.json.new") as fifo:
        fifo.read()
    out, left = process.communicate(timeout=DEADLINE_SECONDS)
    assert (out, process.returncode) == ("answered\n", 0), left


def test_a_hang_timeout_of_nothing_is_refused(run, write, cluster, tmp_path):
    done = run("train", "--hang-timeout", "0s", write("none.py", ""), env=cluster, cwd=tmp_path, code=1)
    assert "a hang timeout of 0" in done.stderr and "10m" in done.stderr, done.stderr


def test_who_keeps_others_waiting_in_a_report_is_named_and_waited_for(binary, write, cluster, tmp_path):
    script = write("late.py", """
        import os
        from wingbeat import train
        while os.environ["RANK"] == "1" and not os.path.exists("go"):
            os.sched_yield()
        train.report({"step": 1})
    """)
    env = {**cluster, "WINGBEAT_REPORT_LIMIT_MS": "200"}
    running = subprocess.Popen([binary, "train", "-n", "2", script], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    said = next(line for line in running.stderr if "have waited" in line)
    assert "for the report of rank 1" in said
    (tmp_path / "go").touch()
    running.communicate(timeout=DEADLINE_SECONDS)
    assert running.returncode == 0


def test_a_report_goes_on_after_a_signal_s_handler_has_reported(run, write, cluster, tmp_path):
    script = write("returns.py", REPORTS_STEPS + """
        signal.signal(signal.SIGALRM, lambda *_: report(99))
        if rank == "0":
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        else:
            while not os.path.exists("0-99"):  # the other reports 1 and, in the middle of it, 99
                time.sleep(0.01)
            time.sleep(2)
            report(99)
        report(1)
        report(2)
    """)
    run("train", "-n", "2", "--storage", "stored", "--keep", "9", script, env=cluster, cwd=tmp_path)
    stored = sorted((tmp_path / "stored").glob("checkpoint_*"))
    assert [[(checkpoint / rank).read_text() for rank in "01"] for checkpoint in stored] == [["99"] * 2, ["1"] * 2, ["2"] * 2]


def test_all_that_is_reported_while_a_checkpoint_is_stored_is_stored(run, write, cluster, tmp_path):
    script = write("three.py", """
        import os, pathlib, signal
        from wingbeat import train
        def report(step, size, **more):
            own = pathlib.Path(str(step))
            own.mkdir()
            (own / "step").write_text(str(step))
            with open(own / "model", "wb") as file:
                file.truncate(size)
            train.report({"step": step}, checkpoint=own, **more)
        signal.signal(signal.SIGALRM, lambda *_: report(3, 0))
        report(1, 500 << 20, wait=False)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        report(2, 0)
    """)
    run("train", "--storage", "stored", "--keep", "9", script, env=cluster, cwd=tmp_path)
    stored = sorted((tmp_path / "stored").glob("checkpoint_*"))
    assert sorted((checkpoint / "step").read_text() for checkpoint in stored) == ["1", "2", "3"]


def test_what_was_reported_in_the_grace_and_is_not_stored_is_said(binary, write, cluster, tmp_path):
    script = write("unstored.py", """
        import os, signal, time
        from wingbeat import train
        def save(*_):
            os.mkdir("last")
            os.mkfifo("last/pipe")
            train.report({"step": 1}, checkpoint="last", wait=False)
            os._exit(0)
        signal.signal(signal.SIGTERM, save)
        os.write(1, b"begun\\n")
        while True:
            time.sleep(0.01)
    """)
    process = subprocess.Popen(
        [binary, "train", "--unprefixed", "--storage", "stored", script],
        env=cluster, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    assert process.stdout.readline() == "begun\n"
    process.terminate()
    said = process.communicate()[1]
    assert process.returncode == 128 + 15 and "what ranks reported last is not stored" in said and "pipe" in said, said
