"""A forked rank cannot tell itself from a new Python."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import DEADLINE_SECONDS

WARM = Path(__file__).resolve().parents[1] / "wingbeat" / "_warm.py"

FACTS = textwrap.dedent("""
    import atexit, json, multiprocessing, os, signal, sys, threading
    import numpy, torch
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return index

    if __name__ == "__main__":
        ours = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "WINGBEAT_RANK_SOCKET", "WINGBEAT_PROCESS")
        with open("/proc/self/status") as file:
            status = dict(line.split(":", 1) for line in file)
        facts = {
            "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "file": __file__, "flags": str(sys.flags),
            "is_main": sys.modules["__main__"].__dict__ is globals(), "cwd": os.getcwd(), "umask": os.umask(0o22),
            "environment": {name: value for name, value in os.environ.items() if name not in ours},
            "threads": torch.get_num_threads(), "interop_threads": torch.get_num_interop_threads(),
            "running": threading.active_count(), "has_cuda": torch.cuda.is_initialized(),
            "encodings": [sys.stdout.encoding, sys.stdin.encoding, sys.getfilesystemencoding()],
            "buffering": [sys.stdout.line_buffering, sys.stdout.write_through],
            "leads_its_group": os.getpgid(0) == os.getpid(),
            "ignored": status["SigIgn"], "blocked": status["SigBlk"],
            "handlers": {number: str(signal.getsignal(number)) for number in (2, 13, 15, 17)},
        }
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            facts["spawned_cwd"] = pool.apply(os.getcwd)
        loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")
        facts["loaded"] = [int(number) for number in loader]
        seeds = [torch.initial_seed(), int(numpy.random.randint(1 << 30)), os.urandom(4).hex()]
        atexit.register(lambda: print("left", flush=True))
        with open(f"{sys.argv[1]}-{os.environ['RANK']}", "w") as file:
            json.dump([facts, seeds], file)
""")


def test_what_a_script_sees_is_the_same_warm_and_cold(run, write, cluster, tmp_path):
    script = write("facts.py", FACTS)
    told = {}
    for start, options in (("warm", []), ("cold", ["--cold"])):
        done = run("train", "-n", "2", *options, script, "--", "told", env=cluster, cwd=tmp_path)
        assert done.stdout.count("left") == 2, "exit handlers run"
        told[start] = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in (0, 1)]
    for rank in (0, 1):
        assert told["warm"][rank][0] == told["cold"][rank][0]
    for start in told:
        for mine, theirs in zip(told[start][0][1], told[start][1][1]):
            assert mine != theirs, f"{start} ranks have seeds of their own"


def test_results_do_not_differ(run, write, cluster, tmp_path):
    script = write(
        "learns.py",
        textwrap.dedent("""
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            torch.manual_seed(dist.get_rank())
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            for _ in range(20):
                optimizer.zero_grad()
                model(torch.randn(16, 8)).square().mean().backward()
                optimizer.step()
            print(dist.get_rank(), [value.item().hex() for value in model.module.weight[0]])
            dist.destroy_process_group()
        """),
    )
    warm = run("train", "-n", "2", script, env=cluster)
    cold = run("train", "-n", "2", "--cold", script, env=cluster)
    assert sorted(warm.stdout.splitlines()) == sorted(cold.stdout.splitlines())


def test_settings_that_are_read_at_import_get_a_parent_of_their_own(run, write, cluster):
    script = write("debug.py", "import torch.distributed as dist\nprint(dist.get_debug_level())\n")
    assert "OFF" in run("train", script, env=cluster).stdout
    assert "DETAIL" in run("train", "--env", "TORCH_DISTRIBUTED_DEBUG=DETAIL", script, env=cluster).stdout


def test_thread_counts_are_the_rank_s_own(run, write, cluster):
    script = write(
        "threads.py",
        "import numpy, threadpoolctl, torch\n"
        "counts = {info['num_threads'] for info in threadpoolctl.threadpool_info()}\n"
        "print(torch.get_num_threads(), sorted(counts))\n",
    )
    assert "3 [3]" in run("train", "--env", "OMP_NUM_THREADS=3", script, env=cluster).stdout
    assert "1 [1]" in run("train", "-n", "2", script, env=cluster).stdout


def test_what_a_rank_leaves_behind_ends_with_it(run, write, cluster, tmp_path):
    script = write(
        "leaves.py",
        "import os, subprocess\n"
        "lock = os.open('lock', os.O_CREAT | os.O_RDWR)\n"
        "subprocess.Popen(['flock', 'lock', 'sleep', '1000'], start_new_session=True)\n",
    )
    run("train", script, env=cluster, cwd=tmp_path)
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits, if anybody has it


def test_a_parent_that_cannot_fork_safely_says_why_and_ranks_start_cold(run, write, cluster, tmp_path):
    write("spins.py", "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='spins').start()\n")
    script = write("runs.py", "print('ran')\n")
    more = {"WINGBEAT_WARM_IMPORTS": "spins", "PYTHONPATH": f"{tmp_path}:{cluster['PYTHONPATH']}"}
    options = [part for name, value in more.items() for part in ("--env", f"{name}={value}")]
    done = run("train", *options, script, env=cluster)
    assert "ran" in done.stdout
    assert "this rank starts cold: an imported module has started threads" in done.stdout + done.stderr


def test_a_run_outlives_the_idle_time_of_its_warm_python_and_a_change_of_its_packages(run, write, binary, cluster, tmp_path):
    folder = tmp_path / "installed"
    folder.mkdir()
    (folder / "mine.py").write_text("")
    more = {"WINGBEAT_WARM_IMPORTS": "mine", "WINGBEAT_WARM_IDLE": "1.5", "PYTHONPATH": f"{folder}:{cluster['PYTHONPATH']}"}
    options = [part for name, value in more.items() for part in ("--env", f"{name}={value}")]
    long = write(
        "long.py",
        "import os, time\ntime.sleep(4)\nprint('started', flush=True)\n"
        f"while not os.path.exists({str(tmp_path / 'end')!r}):\n    time.sleep(0.01)\nprint('ended')\n",
    )
    short = write("short.py", "print('short')\n")
    command = [binary, "train", "-n", "2", *options, long]
    with subprocess.Popen(command, env=cluster, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        for line in running.stdout:
            if "started" in line:
                break
        for file in ("new.py", "newer.py"):
            (folder / file).write_text("")
            done = run("train", *options, short, env=cluster)
            assert "short" in done.stdout and "cold" not in done.stdout + done.stderr
        (tmp_path / "end").write_text("")
        told = running.communicate(timeout=DEADLINE_SECONDS)[0]
        assert running.returncode == 0 and told.count("ended") == 2, told


def test_ranks_that_end_with_their_warm_python_say_so(run, write, cluster):
    script = write(
        "kills.py",
        "import os, signal\n"
        "parent_of = lambda pid: int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])\n"
        "os.kill(parent_of(os.getppid()), signal.SIGKILL)\nsignal.pause()\n",
    )
    done = run("train", "--env", "WINGBEAT_WARM_IMPORTS=this", script, env=cluster, code=1)
    assert "was killed with what looks after it, its warm Python or its keeper" in done.stderr, done.stderr


@contextlib.contextmanager
def parent(name, idle="60", modules=(), stderr=None, **env):
    """A parent of its own, and how to greet it."""
    name = f"wingbeat-test-{os.getpid()}-{name}"
    env = {**os.environ, "WINGBEAT_RANK_PARENT": str(os.getpid()), **env}
    command = [sys.executable, WARM, name, idle, *modules]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            assert process.stdout.readline() == "listening\n"

            @contextlib.contextmanager
            def greet():
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
                    stream.connect("\0" + name)
                    with stream.makefile("r") as answers:
                        yield stream, json.loads(answers.readline())

            yield process, greet
        finally:
            process.kill()


def test_a_parent_that_nobody_needs_ends():
    with parent("idle", idle="0.1") as (process, _):
        assert process.wait(DEADLINE_SECONDS) == 0


def test_requests_that_make_no_sense_harm_nobody():
    with parent("bad") as (_, greet):
        with greet() as (_, answer):  # and no more than that
            assert "python" in answer
        with greet() as (stream, _):
            read, write = os.pipe()
            socket.send_fds(stream, [b"no JSON\n"], [write] * 3)
            os.close(write)
            assert os.read(read, 1) == b"", "the streams of a bad request are closed"
            os.close(read)
        with greet() as (_, answer):
            assert "python" in answer, "and the next is served"


@pytest.mark.parametrize("which", ["keeper", "rank"])
def test_a_parent_that_cannot_fork_says_so_and_keeps_no_streams(tmp_path, which):
    (tmp_path / "no_fork.py").write_text(textwrap.dedent(f"""
        import errno, os
        parent, forked = os.getpid(), os.fork
        def fork():
            if (os.getpid() == parent) == {which == "keeper"}:
                raise OSError(errno.EAGAIN, "no processes are left")
            return forked()
        os.fork = fork
    """))
    with parent(f"no-fork-{which}", modules=["no_fork"], PYTHONPATH=str(tmp_path)) as (process, greet):
        opened = []
        for _ in range(3):
            with greet() as (stream, answer), stream.makefile("r") as said, open(os.devnull, "w") as nothing:
                assert "python" in answer
                request = {"args": ["x.py"], "env": {}, "cwd": str(tmp_path)}
                socket.send_fds(stream, [json.dumps(request).encode() + b"\n"], [nothing.fileno()] * 3)
                told = json.loads(said.readline())
                assert "could not be forked: [Errno 11] no processes are left" in told["refused"] and not told["retires"]
                assert said.readline() == "", "the connection is closed"
                opened.append(len(os.listdir(f"/proc/{process.pid}/fd")))
        assert opened[0] == opened[-1], opened


def test_a_parent_without_descriptors_serves_again_once_there_are_some(tmp_path):
    (tmp_path / "full.py").write_text(textwrap.dedent("""
        import os, resource, signal
        opened = []
        def fill(*_):
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            try:
                while True:
                    opened.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                print("full", flush=True)
        def free(*_):
            while opened:
                os.close(opened.pop())
        signal.signal(signal.SIGUSR1, fill)
        signal.signal(signal.SIGUSR2, free)
    """))
    script = tmp_path / "runs.py"
    script.write_text("")
    with parent("full", modules=["full"], stderr=subprocess.PIPE, PYTHONPATH=str(tmp_path)) as (process, greet):
        with greet() as (stream, answer):  # it has imported its modules, and closes the connection
            assert "python" in answer
            stream.shutdown(socket.SHUT_WR)
            assert stream.recv(1) == b""
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "full\n"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.connect(f"\0wingbeat-test-{os.getpid()}-full")
            assert "a request failed: [Errno 24]" in process.stderr.readline()
            process.send_signal(signal.SIGUSR2)
            with stream.makefile("r") as answers:
                assert "python" in json.loads(answers.readline())
        with rank(greet, script) as said:
            assert json.loads(said.readline())["status"] == 0


@contextlib.contextmanager
def rank(greet, script, *args, **env):
    """A forked rank, and what its keeper says."""
    with greet() as (stream, answer), stream.makefile("r") as said, open(os.devnull, "w") as nothing:
        assert "python" in answer
        request = {"args": [str(script), *args], "env": {**os.environ, **env}, "cwd": str(script.parent)}
        socket.send_fds(stream, [json.dumps(request, ensure_ascii=False).encode() + b"\n"], [nothing.fileno()] * 3)
        assert json.loads(said.readline())["pid"] > 0
        yield said


def test_a_rank_that_takes_longer_than_its_parent_may_be_idle_comes_to_its_end(tmp_path):
    (tmp_path / "notes.py").write_text(textwrap.dedent(f"""
        import os, select
        waits = select.select
        def note(reads, writes, errors, seconds):
            ready = waits(reads, writes, errors, seconds)
            if not any(ready):
                os.close(os.open({str(tmp_path / "was idle")!r}, os.O_CREAT))
            return ready
        select.select = note
    """))
    script = tmp_path / "long.py"
    script.write_text(f"import os\nwhile not os.path.exists({str(tmp_path / 'was idle')!r}):\n    os.sched_yield()\n")
    with parent("long", idle="2", modules=["notes"], PYTHONPATH=str(tmp_path)) as (process, greet):
        with rank(greet, script) as said:
            assert json.loads(said.readline())["status"] == 0
        assert process.wait(DEADLINE_SECONDS) == 0


@pytest.mark.parametrize("settings", [{}, {"PYTHONSAFEPATH": "1"}], ids=["", "safe path"])
def test_a_parent_retires_when_packages_change_and_its_ranks_go_on(tmp_path, settings):
    script, end = tmp_path / "waits.py", tmp_path / "end"
    script.write_text(f"import os\nwhile not os.path.exists({str(end)!r}):\n    os.sched_yield()\n")
    with parent("retires", PYTHONPATH=str(tmp_path), **settings) as (process, greet):
        with rank(greet, script) as said:
            (tmp_path / "log.txt").write_text("")  # nothing that is imported
            with greet() as (_, answer):
                assert "python" in answer
            (tmp_path / "json.py").write_text("")  # in place of the one that is imported
            with greet() as (_, answer):
                assert answer["retires"] and "have changed" in answer["refused"]
            assert process.stdout.readline() == "retired\n"
            with contextlib.suppress(ConnectionRefusedError), greet():
                raise AssertionError("its name is not free for the next")
            assert process.poll() is None, "its rank needs it"
            end.write_text("")
            assert json.loads(said.readline())["status"] == 0
        assert process.wait(DEADLINE_SECONDS) == 0


def test_ranks_go_on_when_what_is_imported_for_the_next_cannot_be(tmp_path):
    torch, tried = tmp_path / "packages" / "torch", tmp_path / "tried"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("class default_generator:\n    seed = staticmethod(lambda: 0)\n")
    script = tmp_path / "waits.py"
    script.write_text(f"import os\nwhile not os.path.exists({str(tried)!r}):\n    os.sched_yield()\n")
    for number, ending in enumerate(["raise KeyError('getpwuid')", "raise SystemExit(3)"]):
        (torch / "_dynamo.py").write_text(f"open({str(tried)!r}, 'w')\n{ending}\n")
        with parent(f"later-{number}", modules=["torch"], PYTHONPATH=str(torch.parent)) as (process, greet):
            with rank(greet, script) as said:
                assert json.loads(said.readline())["status"] == 0
            with rank(greet, script) as said:
                assert json.loads(said.readline())["status"] == 0, "and others are forked"
            assert process.poll() is None
        tried.unlink()


def test_nothing_is_half_imported_in_ranks_when_what_is_imported_for_them_lacks_something(tmp_path):
    torch, tried = tmp_path / "packages" / "torch", tmp_path / "tried"
    (torch / "_dynamo").mkdir(parents=True)
    (torch / "__init__.py").write_text("class default_generator:\n    seed = staticmethod(lambda: 0)\n")
    (torch / "_dynamo" / "config.py").write_text("")
    (torch / "_dynamo" / "__init__.py").write_text(f"import torch._dynamo.config\nopen({str(tried)!r}, 'w')\nimport of_the_script\n")
    waits, uses = tmp_path / "waits.py", tmp_path / "uses.py"
    waits.write_text(f"import os\nwhile not os.path.exists({str(tried)!r}):\n    os.sched_yield()\n")
    uses.write_text(
        "import sys, types\nassert not [name for name in sys.modules if 'dynamo' in name]\n"
        "sys.modules['of_the_script'] = types.ModuleType('of_the_script')\nimport torch._dynamo\ntorch._dynamo.config\n"
    )
    with parent("half", modules=["torch"], PYTHONPATH=str(torch.parent)) as (process, greet):
        for script in (waits, uses):
            with rank(greet, script) as said:
                assert json.loads(said.readline())["status"] == 0, script
        assert process.poll() is None


def test_what_would_keep_ranks_from_being_forked_is_not_imported_for_them(tmp_path):
    torch, tried = tmp_path / "packages" / "torch", tmp_path / "tried"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("")
    (torch / "_dynamo.py").write_text(
        f"import os, threading\nos.mkdir({str(tried)!r} + '-' + str(os.getpid()))\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    # It gives up what is tried for longer than that.
    with parent("threads", idle="5", modules=["torch"], PYTHONPATH=str(torch.parent)) as (process, _):
        assert process.wait(DEADLINE_SECONDS) == 0
        (child,) = tmp_path.glob("tried-*")
        assert child.name != f"tried-{process.pid}"


def test_what_nearly_every_script_needs_is_imported_while_nobody_asks(tmp_path):
    torch, tried = tmp_path / "packages" / "torch", tmp_path / "tried"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("class default_generator:\n    seed = staticmethod(lambda: 0)\n")
    (torch / "_dynamo.py").write_text(f"import os\nos.mkdir({str(tried)!r} + '-' + str(os.getpid()))\n")
    with parent("early", modules=["torch"], PYTHONPATH=str(torch.parent)) as (process, greet):
        script = tmp_path / "waits.py"
        script.write_text(f"import os\nwhile not os.path.exists('{tried}-{process.pid}'):\n    os.sched_yield()\n")
        uses = tmp_path / "uses.py"
        uses.write_text("import sys\nassert 'torch._dynamo' in sys.modules\n")
        for each in (script, uses):
            with rank(greet, each) as said:
                assert json.loads(said.readline())["status"] == 0, each


def test_ranks_are_forked_also_where_no_folder_is_put_into_the_path_and_where_not_all_text_is_known(tmp_path):
    script = tmp_path / "said.py"
    script.write_text("import os, sys\nsys.exit(os.fsencode(sys.argv[1]) != 'ü'.encode() or os.environb[b'TOLD'] != 'ö'.encode())\n")
    for number, settings in enumerate([{"PYTHONSAFEPATH": "1"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]):
        with parent(f"told-{number}", **settings) as (_, greet):
            with rank(greet, script, "ü", TOLD="ö") as said:
                assert json.loads(said.readline())["status"] == 0, settings


def test_a_module_beside_the_script_is_the_script_s_own(run, write, cluster):
    write("json.py", "mine = True\n")
    script = write("imports.py", "import json\nprint('mine', json.mine)\n")
    done = run("train", "-n", "2", script, env=cluster)
    assert done.stdout.count("mine True") == 2
    assert "starts cold: json.py beside the script" in done.stderr


def test_settings_of_folders_and_of_openmp_are_the_rank_s_own(run, write, cluster, tmp_path):
    script = write("settings.py", """
        import ctypes, tempfile, torch
        openmp = [line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line]
        print(tempfile.gettempdir(), ctypes.CDLL(openmp[0]).omp_get_proc_bind())
    """)
    for options in ([], ["--cold"]):
        more = ["--env", f"TMPDIR={tmp_path}", "--env", "OMP_PROC_BIND=true"]
        assert f"{tmp_path} 1" in run("train", *options, *more, script, env=cluster).stdout


def test_ps_shows_the_script(run, write, cluster):
    script = write("shows.py", """
        import os
        words = open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")
        print([os.path.basename(word) for word in words[1:]])
    """)
    assert "['shows.py', 'a']" in run("train", script, "--", "a", env=cluster).stdout


def test_what_a_rank_s_children_have_left_is_reaped_while_it_runs(run, write, cluster):
    script = write("orphans.py", """
        import os, select, subprocess
        # Each child ends before its own child, which nobody of this rank's waits for.
        pids = [int(subprocess.check_output("sleep 0.01 > /dev/null & echo $!", shell=True)) for _ in range(20)]
        for pid in pids:
            try:
                end = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            select.select([end], [], [])
            while os.path.exists(f"/proc/{pid}"):  # until it is reaped, which may be a moment later
                os.sched_yield()
        print("all are gone")
    """)
    done = run("train", script, env=cluster)
    assert "all are gone" in done.stdout


def test_a_hook_of_the_user_s_runs_in_each_rank(run, write, cluster, tmp_path):
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "sitecustomize.py").write_text("import os\nos.environ['SEEN'] = os.environ.get('RANK', 'none')\n")
    script = write("seen.py", "import os\nprint('seen', os.environ['SEEN'])\n")
    env = {**cluster, "PYTHONPATH": f"{cluster['PYTHONPATH']}:{tmp_path / 'hooks'}"}
    done = run("train", "-n", "2", "--unprefixed", script, env=env)
    assert sorted(done.stdout.splitlines()) == ["seen 0", "seen 1"]
    assert "starts cold" in done.stderr and "sitecustomize.py is to run" in done.stderr


def test_a_warm_python_that_stands_still_is_done_without(run, write, cluster, tmp_path):
    write("still.py", "import time\ntime.sleep(1000)\n")
    script = write("runs.py", "print('ran')\n")
    more = {"WINGBEAT_WARM_IMPORTS": "still", "PYTHONPATH": f"{tmp_path}:{cluster['PYTHONPATH']}"}
    options = [part for name, value in more.items() for part in ("--env", f"{name}={value}")]
    for how in ("which it starts", "which is there"):
        done = run("train", *options, script, env={**cluster, "WINGBEAT_WARM_ANSWER": "0.5"})
        assert "ran" in done.stdout, how
        assert done.stderr.count("start cold: no warm Python could be had: it says nothing") == 1, (how, done.stderr)


def test_the_error_of_a_script_with_a_json_of_its_own_is_its_own(run, write, cluster):
    write("json.py", "X = 1\n")
    done = run("train", write("raises.py", "raise ValueError('my own')\n"), env=cluster, code=1)
    assert done.stderr.count("ValueError: my own") <= 2 and "AttributeError" not in done.stderr, done.stderr
    assert "error: rank 0" in done.stderr and "ValueError: my own" in done.stderr.split("error: rank 0")[1], done.stderr
