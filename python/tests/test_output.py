"""What ranks print: bars, bytes that are no text, lines without end, and readers that do not read."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from conftest import DEADLINE_SECONDS

from wingbeat import _command

# Draws a bar over itself, and waits in the middle until a file is there.
BAR = """
    import os, sys, time
    for done in range(0, 101, 10):
        sys.stderr.write(f"\\r{done:3}%|{'#' * (done // 10)}")
        sys.stderr.flush()
        while done == 50 and len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
    sys.stderr.write("\\n")
"""


def test_where_nobody_watches_a_bar_is_its_last_state(run, write, cluster):
    done = run("train", "--workers", "2", write("bar.py", BAR), env=cluster)
    shown = sorted(line for line in done.stderr.splitlines() if "%" in line)
    assert shown == ["[rank 0] 100%|##########", "[rank 1] 100%|##########"]


def test_bytes_are_torchrun_s_whatever_they_are(binary, write, cluster):
    script = write("bytes.py", """
        import sys
        text = bytes(range(256)) * 8192 + b"\\r 1%\\r 2%\\n" + b"no end"
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
        sys.stderr.buffer.write(b"\\xff\\r\\n\\r\\n")
    """)
    expected = bytes(range(256)) * 8192 + b"\r 1%\r 2%\n" + b"no end"
    done = subprocess.run([binary, "torchrun", script], env=cluster, capture_output=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected
    assert done.stderr == b"\xff\r\n\r\n"


def test_a_bar_is_life_longer_than_the_time_that_makes_a_hang(run, write, cluster):
    script = write("slow.py", """
        import sys, time
        end = time.monotonic() + 6
        while time.monotonic() < end:
            sys.stderr.write("\\r some state")
            sys.stderr.flush()
            time.sleep(0.05)
    """)
    done = run("train", "--hang-timeout", "3s", "--restart-on-hang", script, env=cluster)
    assert "nothing" not in done.stderr and "no rank has printed" not in done.stderr


def test_a_terminal_shows_a_bar_while_it_grows(binary, write, cluster, tmp_path):
    ours, theirs = pty.openpty()
    go = tmp_path / "go"
    command = [binary, "train", write("bar.py", BAR), "--", str(go)]
    running = subprocess.Popen(command, env={**cluster, "TERM": "xterm"}, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while b"[rank 0]  50%|#####" not in seen:
            seen += os.read(ours, 4096)
        go.touch()
        while True:
            seen += os.read(ours, 4096)
    except OSError:  # how a terminal ends
        pass
    finally:
        go.touch()
        os.close(ours)
        assert running.wait(DEADLINE_SECONDS) == 0, seen
    assert b"[rank 0] 100%|##########\r\n" in seen, seen


def test_a_prompt_without_an_end_is_shown(binary, write, cluster, tmp_path):
    go = tmp_path / "go"
    script = write("prompt.py", """
        import os, sys, time
        print("and now? ", end="", flush=True)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
    """)
    running = subprocess.Popen([binary, "torchrun", script, str(go)], env=cluster, stdout=subprocess.PIPE)
    assert running.stdout.read(9) == b"and now? "
    go.touch()
    assert running.communicate(timeout=DEADLINE_SECONDS)[0] == b""
    assert running.returncode == 0


def test_who_does_not_read_can_still_stop_the_run(binary, write, cluster):
    script = write("endless.py", "while True: print('x' * 1000)\n")
    command = [binary, "train", "--workers", "2", script]
    running = subprocess.Popen(command, env=cluster, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout.read(1) == b"["
    running.send_signal(signal.SIGTERM)
    # Its standard output is never read.
    assert running.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
    running.stdout.close()
    assert b"stopped" in running.stderr.read()
    running.stderr.close()


def test_who_reads_nothing_at_all_can_still_stop_the_run(binary, write, cluster):
    script = write("endless.py", "import sys\nwhile True:\n    print('x' * 1000)\n    print('y' * 1000, file=sys.stderr)\n")
    command = [binary, "train", "--grace", "1s", script]
    running = subprocess.Popen(command, env=cluster, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert running.stdout.read(1) == b"["
    # Its last words do not find a reader either, so that it is told again, until that is no part of the first time.
    while running.poll() is None:
        running.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(1.2)
    assert running.returncode == 128 + signal.SIGTERM
    running.stdout.close()


def test_a_hang_up_that_comes_twice_is_one(binary, write, cluster):
    script = write("saves.py", """
        import os, signal, sys, time
        def save(*_):
            time.sleep(1.5)
            os.write(1, b"saved\\\\n")
            sys.exit(0)
        signal.signal(signal.SIGHUP, save)
        print("begun", flush=True)
        while True:
            time.sleep(0.01)
    """)
    running = subprocess.Popen([binary, "train", script], env=cluster, stdout=subprocess.PIPE)
    assert running.stdout.readline() == b"[rank 0] begun\n"
    running.send_signal(signal.SIGHUP)
    running.send_signal(signal.SIGHUP)
    assert b"saved" in running.stdout.read()
    running.stdout.close()
    assert running.wait(DEADLINE_SECONDS) == 128 + signal.SIGHUP


def test_output_that_cannot_be_written_is_said_and_is_no_success(binary, write, cluster):
    script = write("prints.py", "print('something')\n")
    for command in ("torchrun", "train"):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([binary, command, script], env=cluster, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 74, done.stderr
        assert "cannot be written, and the run goes on: standard output: No space left" in done.stderr, done.stderr
        assert "error: the output of ranks is not complete" in done.stderr, done.stderr


def test_output_that_does_not_wait_is_waited_for(binary, write, cluster):
    script = write("prints.py", "for number in range(40000):\n    print(number, 'x' * 20)\n")
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    process = subprocess.Popen([binary, "torchrun", script], env=cluster, stdout=writes, stderr=subprocess.PIPE, text=True)
    while select.select([], [writes], [], 0)[1]:  # until it is full
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    os.close(writes)
    with open(reads) as lines:
        assert sum(1 for _ in lines) == 40000
    assert process.wait(DEADLINE_SECONDS) == 0, process.stderr.read()
    process.stderr.close()


STUB = """
import signal, sys, time

began = None

def told(number, frame):
    global began
    if began is None:
        began = time.monotonic()
        print("first", flush=True)
    else:
        print("second after a second:", time.monotonic() - began > 1, flush=True)
        sys.exit(3)

signal.signal(signal.SIGINT, told)
signal.signal(signal.SIGTERM, told)
print("ready", flush=True)
while True:  # a signal just before `pause` would be missed
    time.sleep(0.01)
"""


def test_a_second_ctrl_c_is_sent_when_the_command_takes_it_for_one(write, environment):
    program = write("asks.py", f"""
        import os, signal, sys
        from wingbeat import _command
        signal.siginterrupt(signal.SIGINT, False)  # as `import polars` does
        _command.run([sys.executable, "-c", {STUB!r}], os.environ)
    """)
    running = subprocess.Popen(
        [sys.executable, program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGINT)
    assert running.stdout.readline() == "first\n"
    running.send_signal(signal.SIGINT)
    assert running.stdout.readline() == "second after a second: True\n"
    running.stdout.close()
    assert running.wait(DEADLINE_SECONDS) in (1, 130, -signal.SIGINT)


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """What a program shows of a command, and the exit code, with a standard output of some encoding."""

    def shown(script, encoding="utf-8"):
        path = tmp_path / "out"
        with open(path, "w", encoding=encoding, newline="") as out:
            monkeypatch.setattr(sys, "stdout", out)
            code = _command.run(["sh", "-c", script], dict(os.environ))
        return path.read_bytes(), code

    return shown


def test_what_a_stream_cannot_encode_is_escaped_and_all_that_follows_is_shown(shown):
    text, code = shown("echo '5 \u20ac'; seq 20000", "latin-1")
    lines = text.split(b"\n")
    assert lines[0] == b"5 \\u20ac" and lines[1:-1] == [str(number).encode() for number in range(1, 20001)] and code == 0


def test_in_a_notebook_a_bar_stays_a_bar(shown):
    assert shown(r"printf '10%%\r20%%\r30%%\n\r\nend'") == (b"10%\r20%\r30%\n\r\nend", 0)


def test_a_stream_that_takes_nothing_ends_no_command_and_is_told(monkeypatch):
    class Full:
        encoding = "utf-8"

        def write(self, text):
            if text != "2\n":
                raise OSError(28, "No space left on device")
            written.append(text)

        def flush(self):
            pass

    written = []
    monkeypatch.setattr(sys, "stdout", Full())
    assert _command.run(["sh", "-c", "seq 20000"], dict(os.environ)) == _command.OUTPUT_IS_MISSING == 74
    assert written == ["2\n"]
    assert _command.run(["sh", "-c", "seq 20000; exit 3"], dict(os.environ)) == 3


def test_where_a_program_shows_output_that_cannot_be_encoded_the_rest_is_shown(python, cluster, tmp_path):
    program = """
        import sys, warnings
        from wingbeat.torch import TorchDistributor

        def speak():
            print("5 \\u20ac", flush=True)
            for number in range(2000):
                print("line", number)
            return 7

        warnings.simplefilter("always")
        shown = sys.stdout
        with open("{}", "w", encoding="latin-1") as sys.stdout:
            assert TorchDistributor(1, local_mode=False, use_gpu=False).run(speak) == 7
        sys.stdout = open("{}", "w")
        sys.stdout.fileno = lambda: 99
        sys.stdout.close()
        assert TorchDistributor(1, local_mode=False, use_gpu=False).run(speak) == 7
        sys.stdout = shown
    """
    done = python(program.format(tmp_path / "log", tmp_path / "other"), cluster)
    lines = (tmp_path / "log").read_bytes().splitlines()
    assert lines[0] == b"5 \\u20ac" and lines[-1] == b"line 1999" and len(lines) == 2001
    assert "Traceback" not in done.stderr
