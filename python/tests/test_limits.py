"""Time limits of training that are usually too long for a test, shortened, and outlived."""

import os
import signal
import subprocess

from conftest import DEADLINE_SECONDS, one_node


def test_a_storage_that_stands_still_at_the_beginning_keeps_nobody_from_stopping(binary, write, cluster, tmp_path):
    checkpoint = tmp_path / "stored" / "checkpoint_000001"
    checkpoint.mkdir(parents=True)
    os.mkfifo(tmp_path / "stored" / ".wingbeat-in-use")  # whoever opens it waits
    env = {**cluster, "WINGBEAT_STOPPED_LIMIT_MS": "300"}
    running = subprocess.Popen(
        [binary, "train", "--storage", "stored", write("never.py", "")], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    waited_for = opened_for_writing(tmp_path / "stored" / ".wingbeat-in-use", running)
    running.terminate()
    said = running.communicate(timeout=DEADLINE_SECONDS)[1]
    os.close(waited_for)
    assert running.returncode == 128 + signal.SIGTERM, said


def test_a_run_ends_without_the_ranks_of_a_machine_that_stands_still(binary, write, own_cluster, tmp_path):
    daemons = [own_cluster.worker(cpus=1)[1] for _ in range(2)]
    code = tmp_path / "code"
    code.mkdir()
    (code / "fails.py").write_text(
        "import os, pathlib, sys, time\n"
        "print(os.environ['RANK'], os.getppid(), flush=True)\n"
        "while not pathlib.Path(sys.argv[1], 'go').exists():\n"
        "    time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    limits = {f"WINGBEAT_{which}_LIMIT_MS": "300" for which in ("KILL", "CLEAN", "FORGET")}
    # What is left of it there, no run of this test removes.
    limits["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    options = ("--nodes", "2", "--cold", "--unprefixed", "--grace", "300ms", "--working-dir", str(code))
    running = subprocess.Popen(
        [binary, "train", *options, "fails.py", "--", str(tmp_path)],
        env={**own_cluster.env, **limits}, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    actors = dict(running.stdout.readline().split() for _ in range(2))
    stopped = [daemon_of(int(actors["1"]), daemons), int(actors["1"])]
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        said = running.communicate(timeout=DEADLINE_SECONDS)[1]
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert running.returncode == 3 and "rank 0 on " in said and "1 of 2 ranks" in said, said


def test_an_elastic_group_starts_with_what_is_free_after_a_while(run, binary, write, own_cluster, tmp_path):
    own_cluster.worker(cpus=2)
    waits = write("waits.py", "import os, time\nprint(flush=True)\nwhile not os.path.exists('go'):\n    time.sleep(0.01)\n")
    other = subprocess.Popen([binary, "train", waits], env=own_cluster.env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    other.stdout.readline()
    env = {**own_cluster.env, "WINGBEAT_ELASTIC_LIMIT_MS": "200"}
    ranks = write("ranks.py", "import os\nprint('ranks', os.environ['WORLD_SIZE'])\n")
    done = run("train", "-n", "1:2", "--unprefixed", ranks, env=env, cwd=tmp_path)
    (tmp_path / "go").touch()
    other.communicate(timeout=DEADLINE_SECONDS)
    assert done.stdout == "ranks 1\n", done.stdout


def test_shipped_code_that_no_run_has_used_for_a_month_is_removed(run, cluster, tmp_path, binary, environment):
    cache = tmp_path / "cache"
    (tmp_path / "nodes").mkdir()
    with one_node(binary, environment, tmp_path / "nodes", XDG_CACHE_HOME=str(cache)) as env:
        lie_there = lambda: {path.name for path in (cache / "wingbeat").iterdir() if path.name.startswith("work-")}  # noqa: E731
        for name in ("first", "second"):
            code = tmp_path / name
            code.mkdir()
            (code / "says.py").write_text(f"print('{name}')\n")
            run("train", "--working-dir", code, "says.py", env={**env, "XDG_CACHE_HOME": str(cache)})
            if name == "first":
                first = lie_there()
                assert len(first) == 1
                for path in (cache / "wingbeat").iterdir():
                    os.utime(path, (0, 0))
        assert len(lie_there()) == 1 and not first & lie_there()


def opened_for_writing(fifo, by):
    """Opened once somebody reads it, who waits then."""
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert by.poll() is None, by.stderr.read()
            os.sched_yield()


def daemon_of(pid, daemons):
    """That of them of which the process is a descendant."""
    pids = {daemon.pid for daemon in daemons}
    while pid not in pids:
        with open(f"/proc/{pid}/stat") as stat:
            pid = int(stat.read().rpartition(")")[2].split()[1])
    return pid


def test_metrics_are_written_also_when_nothing_more_is_heard_of_the_ranks(run, write, cluster, tmp_path):
    storage = tmp_path / "kept"
    script = write("reports.py", f"""
        import pathlib, time
        from wingbeat import train

        metrics = pathlib.Path({str(storage)!r}, "metrics.jsonl")
        for round in range(1, 41):
            for step in range(3):
                train.report({{"step": step}})
            while not metrics.exists() or metrics.read_text().count("\\n") < 3 * round:
                time.sleep(0.001)
    """)
    run("train", "--storage", str(storage), script, env=cluster)
