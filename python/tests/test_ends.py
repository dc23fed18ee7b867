"""How runs end, wait and move: signals, drained and lost nodes, a full cluster, and programs that are killed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import DEADLINE_SECONDS

# Says what it gets, as a script does that saves what it has.
SAVES = """
    import os, signal, sys, time

    def save(number, frame):
        os.write(1, f"got {signal.Signals(number).name}\\n".encode())  # print may be interrupted in the middle
        sys.exit(3)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, save)
    print("begun", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    print("done", flush=True)
"""


class Running:
    """A command that runs, and what it has said so far: each of its lines is waited for."""

    def __init__(self, command, env, **more):
        self.process = subprocess.Popen(
            list(map(str, command)), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more
        )
        self.said = ""

    def until(self, text):
        while text not in self.said:
            line = self.process.stdout.readline()
            assert line, self.said
            self.said += line

    def end(self):
        self.said += self.process.stdout.read()
        self.process.stdout.close()
        return self.process.wait(DEADLINE_SECONDS)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_ranks_get_the_signal_of_the_command_and_their_time(binary, write, cluster, tmp_path, name):
    running = Running([binary, "train", write("saves.py", SAVES), "--", tmp_path / "never"], cluster)
    running.until("begun")
    running.process.send_signal(signal.Signals[name])
    assert running.end() == 128 + signal.Signals[name], running.said
    assert f"got {name}" in running.said


@pytest.mark.parametrize("command", ["train", "torchrun"])
def test_a_second_signal_kills_ranks_that_do_not_end_and_the_code_is_the_signal_s(binary, write, cluster, command):
    script = write("goes_on.py", """
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"got it\\n"))
        print("begun", flush=True)
        while True:
            time.sleep(0.01)
    """)
    running = Running([binary, command, script], cluster)
    running.until("begun")
    running.process.send_signal(signal.SIGTERM)
    running.until("got it")
    begun = time.monotonic()
    while running.process.poll() is None:  # one that comes too early does not count
        running.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(0.2)
    assert running.end() == 128 + signal.SIGTERM, running.said
    assert time.monotonic() - begun < 25, "it is not the end of the grace"


def test_what_nohup_has_ignored_is_ignored(binary, write, cluster, tmp_path):
    go = tmp_path / "go"
    running = Running(["nohup", binary, "train", write("saves.py", SAVES), "--", go], cluster)
    running.until("begun")
    running.process.send_signal(signal.SIGHUP)
    go.touch()
    assert running.end() == 0, running.said
    assert "got" not in running.said


def test_a_run_that_waits_for_room_says_so_and_hears_that_it_is_to_stop(binary, run, write, own_cluster, tmp_path):
    own_cluster.worker(cpus=1)
    script, go = write("saves.py", SAVES), tmp_path / "go"
    first = Running([binary, "train", script, "--", go], own_cluster.env)
    first.until("begun")
    second = Running([binary, "train", script, "--", go], own_cluster.env)
    second.until("waiting for room")
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 128 + signal.SIGTERM
    late = run("train", "--wait-for-room", "100ms", script, "--", go, env=own_cluster.env, code=1)
    assert "could not all be placed within" in late.stderr
    third = Running([binary, "train", script, "--", go], own_cluster.env)
    third.until("waiting for room")
    go.touch()
    assert (first.end(), third.end()) == (0, 0), third.said


def test_a_run_leaves_a_drained_node_and_that_is_no_failure(binary, run, write, own_cluster, tmp_path):
    node, _ = own_cluster.worker(cpus=1)
    script, go = write("saves.py", SAVES), tmp_path / "go"
    running = Running([binary, "train", "--grace", "20s", script, "--", go], own_cluster.env)
    running.until("begun")
    own_cluster.worker(cpus=1)
    run("drain", node, "--within", "20s", "--reason", "a new kernel", env=own_cluster.env)
    running.until("starting again elsewhere")
    go.touch()
    assert running.end() == 0, running.said
    assert "got SIGTERM" in running.said and "(a new kernel)" in running.said and "done" in running.said


def test_a_run_leaves_a_drained_node_with_its_next_checkpoint(binary, run, write, own_cluster, tmp_path):
    node, _ = own_cluster.worker(cpus=1)
    script = write("steps.py", """
        import sys, tempfile, time
        from pathlib import Path
        from wingbeat import train

        before = train.get_checkpoint()
        begin = int((Path(before) / "step").read_text()) if before else 0
        print("begun at", begin, flush=True)
        for step in range(begin + 1, 4):
            while step == 2 and not Path(sys.argv[1]).exists():
                time.sleep(0.01)
            with tempfile.TemporaryDirectory(dir=Path(sys.argv[1]).parent) as folder:
                (Path(folder) / "step").write_text(str(step))
                train.report({"step": step}, checkpoint=folder)
    """)
    go = tmp_path / "go"
    storage = ["--storage", tmp_path / "storage"]
    running = Running([binary, "train", "--grace", "1s", *storage, script, "--", go], own_cluster.env)
    running.until("begun at 0")
    own_cluster.worker(cpus=1)
    # Only a hang takes so long.
    run("drain", node, "--within", "10min", env=own_cluster.env)
    running.until("with the next checkpoint")
    go.touch()
    assert running.end() == 0, running.said
    assert re.search(r"begun at [123]", running.said), running.said


def test_after_a_lost_node_a_run_waits_for_another(binary, write, own_cluster, tmp_path):
    _, daemon = own_cluster.worker(cpus=1)
    script, go = write("saves.py", SAVES), tmp_path / "go"
    running = Running([binary, "train", "--max-failures", "1", script, "--", go], own_cluster.env)
    running.until("begun")
    daemon.kill()
    running.until("waiting for room")
    own_cluster.worker(cpus=1)
    go.touch()
    assert running.end() == 0, running.said


PROGRAM = """
import os, signal, sys, time
from wingbeat.torch import TorchDistributor

def main():
    import os, signal, sys, time
    def save(number, frame):
        time.sleep(1)  # longer than nothing
        open(PATH + ".saved", "w").write(signal.Signals(number).name)
        sys.exit(1)
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
    open(PATH, "w").write(str(os.getpid()))
    while True:
        time.sleep(0.1)

PATH = sys.argv[1]
print("begins", flush=True)
try:
    TorchDistributor(1, True, False).run(main)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def wait_for(path, program=None):
    while not (path.exists() and path.read_text()):
        assert program is None or program.poll() is None, "it has ended before that"
        time.sleep(0.01)
    return path.read_text()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_ranks_of_a_program_that_ends_are_asked_to_end_and_do(write, environment, tmp_path, name):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {**environment, "TMPDIR": str(temporary)}
    path = tmp_path / "begun"
    program = subprocess.Popen([sys.executable, write("program.py", PROGRAM), path], env=env, stdout=subprocess.PIPE)
    rank = int(wait_for(path, program))
    program.send_signal(signal.Signals[name])
    assert wait_for(Path(f"{path}.saved")) == ("SIGINT" if name == "SIGINT" else "SIGTERM")
    said, _ = program.communicate(timeout=DEADLINE_SECONDS)
    assert (b"interrupted" in said) == (name == "SIGINT")
    while os.path.exists(f"/proc/{rank}"):
        time.sleep(0.01)
    while list(temporary.glob("wingbeat-run-*")):
        time.sleep(0.01)


def test_a_function_may_leave_by_sys_exit_and_its_secrets_are_not_in_the_command_line(python, environment):
    python("""
        import glob, os, sys
        from wingbeat.torch import TorchDistributor, TrainingError

        def leaves():
            import glob, os, sys
            if os.environ["SECRET"] != "hunter2":
                raise ValueError(os.environ["SECRET"])
            for path in glob.glob("/proc/[0-9]*/cmdline"):
                try:
                    assert b"hunter" + b"2" not in open(path, "rb").read(), path
                except OSError:
                    pass
            sys.exit(0)

        class Odd(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a}-{b}")
                self.a = a

        def raises():
            raise Odd(1, 2)

        def vanishes():
            import os
            os._exit(0)

        if __name__ == "__main__":
            distributor = TorchDistributor(2, True, False, env={"SECRET": "hunter2"})
            assert distributor.run(leaves) is None
            try:
                distributor.run(raises)
            except Odd as error:
                assert (str(error), error.a) == ("1-2", 1)
            else:
                raise AssertionError("it raises")
            try:
                distributor.run(vanishes)
            except TrainingError as error:
                assert "before its function returned" in str(error), error
            else:
                raise AssertionError("it vanishes")
            try:
                distributor.run(42)
            except TypeError as error:
                assert "a function, or the path of a script" in str(error), error
            else:
                raise AssertionError("it is neither")
    """, environment)


def test_a_function_s_checkpoints_are_stored(python, cluster, tmp_path):
    done = python(f"""
        from wingbeat.torch import TorchDistributor

        def main():
            import tempfile
            from pathlib import Path
            from wingbeat import train
            before = train.get_checkpoint()
            step = int((Path(before) / "step").read_text()) + 1 if before else 1
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "step").write_text(str(step))
                train.report({{"step": step}}, checkpoint=folder)
            return step

        if __name__ == "__main__":
            distributor = TorchDistributor(1, True, False, storage={str(tmp_path / "storage")!r})
            print([distributor.run(main) for _ in range(2)])
    """, cluster)
    assert "[1, 2]" in done.stdout


def test_a_script_that_closes_its_output_has_not_failed(run, write, cluster):
    run("train", write("closes.py", "import sys\nsys.stdout.close()\n"), env=cluster)


def test_without_a_storage_checkpoints_are_in_a_folder_of_the_user_s_own(run, write, environment, tmp_path):
    script = write("reports.py", """
        import tempfile
        from pathlib import Path
        from wingbeat import train

        for step in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "step").write_text(str(step))
                train.report({"step": step}, checkpoint=folder)
    """)
    done = run("train", script, env={**environment, "XDG_DATA_HOME": str(tmp_path / "data")})
    (folder,) = (tmp_path / "data/wingbeat/runs").iterdir()
    assert f"checkpoints are in file://{folder}" in done.stderr
    assert (folder / "checkpoint_000002/step").read_text() == "2"
    run("train", "--storage", folder, script, env=environment)
    assert (folder / "checkpoint_000004/step").read_text() == "2"


def test_when_a_rank_fails_the_others_have_their_time_to_save(run, write, cluster, tmp_path):
    script = write("fails.py", """
        import os, pathlib, signal, sys, time

        ready = pathlib.Path(sys.argv[1])

        def save(number, frame):
            time.sleep(1)
            os.write(1, b"saved\\n")
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)
        if os.environ["RANK"] == "1":
            while not ready.exists():
                time.sleep(0.01)
            raise ValueError("no luck")
        ready.touch()
        while True:
            time.sleep(0.01)
    """)
    done = run("train", "--workers", "2", script, "--", tmp_path / "ready", env=cluster, code=1)
    assert "saved" in done.stdout and "no luck" in done.stderr


def test_a_drain_that_is_taken_back_moves_nobody(binary, run, write, own_cluster, tmp_path):
    node, _ = own_cluster.worker(cpus=1)
    script, go = write("saves.py", SAVES), tmp_path / "go"
    running = Running([binary, "train", "--grace", "1s", script, "--", go], own_cluster.env)
    running.until("begun")
    run("drain", node, "--within", "10min", env=own_cluster.env)
    running.until("is drained")
    run("drain", node, "--undo", env=own_cluster.env)
    running.until("the run stays")
    go.touch()
    assert running.end() == 0, running.said
    assert "got" not in running.said, running.said


def test_the_nearest_deadline_of_a_drain_counts(binary, run, write, own_cluster, tmp_path):
    node, _ = own_cluster.worker(cpus=1)
    script, go = write("saves.py", SAVES), tmp_path / "go"
    running = Running([binary, "train", "--grace", "10s", script, "--", go], own_cluster.env)
    running.until("begun")
    own_cluster.worker(cpus=1)
    run("drain", node, "--within", "10min", env=own_cluster.env)
    running.until("is drained")
    run("drain", node, "--within", "10s", "--reason", "taken away", env=own_cluster.env)
    running.until("got SIGTERM")
    running.until("starting again elsewhere")
    go.touch()
    assert running.end() == 0, running.said


def test_a_drained_node_on_which_only_a_warm_python_is_left_ends(run, write, own_cluster):
    node, daemon = own_cluster.worker(cpus=1)
    run("train", write("ends.py", ""), env=own_cluster.env)
    run("drain", node, "--within", "1h", "--stop", env=own_cluster.env)
    assert daemon.wait(DEADLINE_SECONDS) == 0


def test_functions_find_modules_where_the_program_does(environment, tmp_path):
    (tmp_path / "train.py").write_text("def main():\n    import helper\n    return helper.WHERE\n")
    (tmp_path / "helper.py").write_text("WHERE = 'beside the program'\n")
    program = "from train import main; from wingbeat.torch import TorchDistributor; print(TorchDistributor(1, True, False).run(main))"
    (tmp_path / "program.py").write_text(program + "\n")
    for command in ([sys.executable, "program.py"], [sys.executable, "-c", program]):
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
        assert (done.returncode, done.stdout) == (0, "beside the program\n"), done.stderr


def test_a_folder_whose_name_is_not_utf_8_is_named(binary, write, environment, tmp_path):
    folder = os.path.join(os.fsencode(tmp_path), b"d\xff")
    os.mkdir(folder)
    done = subprocess.run(
        [binary, "torchrun", write("script.py", "")], env=environment, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert done.returncode == 1 and "is not UTF-8" in done.stderr, done.stderr


def test_without_its_cluster_a_run_is_not_tried_again(binary, write, own_cluster, tmp_path):
    own_cluster.worker(cpus=1)
    running = Running([binary, "train", "--max-failures", "5", write("saves.py", SAVES), "--", tmp_path / "never"], own_cluster.env)
    running.until("begun")
    own_cluster.daemons[0].kill()
    assert running.end() == 1, running.said
    assert "trying again" not in running.said, running.said


@pytest.mark.parametrize("how", ["fails", "leaves"])
def test_nothing_of_a_run_stays_where_an_attempt_was(binary, run, write, own_cluster, tmp_path, how):
    own_cluster.env["HOME"] = str(tmp_path / "home")
    node, _ = own_cluster.worker(cpus=1)
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "script.py").write_text("import os, sys, time\nprint('begun', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "while not os.path.exists(sys.argv[1]):\n    time.sleep(0.01)\nif 'fails' in sys.argv and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    sys.exit(7)\n")
    go = tmp_path / "go"
    running = Running(
        [binary, "train", "--grace", "3s", "--max-failures", "1", "--working-dir", folder, "script.py", "--", go, how], own_cluster.env
    )
    running.until("begun")
    copies = tmp_path / "home" / ".cache" / "wingbeat"
    assert list(copies.glob("run-*"))
    if how == "leaves":
        own_cluster.worker(cpus=1)
        run("drain", node, "--within", "4s", env=own_cluster.env)
        running.until("starting again elsewhere")
    go.touch()
    assert running.end() == 0, running.said
    assert not list(copies.glob("run-*"))


def test_a_run_whose_errors_nobody_reads_ends_after_one_signal(binary, write, cluster):
    script = write("floods.py", """
        import os, signal, sys

        def save(number, frame):
            for _ in range(64):  # more than a pipe holds, and more than waits on its way
                os.write(2, b"x" * (1 << 16))
            os.write(1, b"saved\\n")
            sys.exit(3)

        signal.signal(signal.SIGTERM, save)
        os.write(1, b"begun\\n")
        signal.pause()
    """)
    command = [binary, "train", "--unprefixed", "--grace", "5min", script]
    running = subprocess.Popen(list(map(str, command)), env=cluster, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "begun\n"
    running.send_signal(signal.SIGTERM)
    assert running.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
    running.stdout.close()
    running.stderr.close()
