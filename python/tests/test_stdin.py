"""What ranks read: rank 0 what the command is given, and the others nothing."""

import fcntl
import os
import pty
import subprocess
import termios
import zlib

import pytest
from conftest import DEADLINE_SECONDS

READS = """
    import os, sys, zlib
    print(os.environ["RANK"], sys.stdin.isatty(), repr(sys.stdin.read()), flush=True)
"""


@pytest.fixture
def lines(binary, cluster):
    """The lines of a run with this standard input."""

    def lines(*arguments, **stdin):
        command = [binary, "torchrun", *map(str, arguments)]
        done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=DEADLINE_SECONDS, **stdin)
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.splitlines())

    return lines


@pytest.mark.parametrize("options", [(), ("--cold",)], ids=["forked", "cold"])
def test_rank_0_reads_what_is_piped_into_the_command(lines, write, options):
    # A line of more than 64 KiB may have those of others in it.
    script = write("reads.py", READS.replace("repr(sys.stdin.read())", "zlib.crc32(sys.stdin.buffer.read())"))
    text = "line\n" * 100_000
    expected = [f"0 False {zlib.crc32(text.encode())}", "1 False 0"]
    assert lines("--nproc-per-node", 2, *options, script, input=text) == expected


def test_a_file_is_read_from_where_it_was_left(lines, write, tmp_path):
    (tmp_path / "data").write_text("first\nsecond\n")
    with open(tmp_path / "data") as file:
        os.lseek(file.fileno(), len("first\n"), os.SEEK_SET)
        assert lines(write("reads.py", READS), stdin=file) == ["0 False 'second\\n'"]


def test_a_named_pipe_to_which_nobody_writes_holds_up_nobody(lines, write, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert lines(write("nothing.py", "print('done')\n"), stdin=end) == ["done"]
    finally:
        os.close(end)


def test_nobody_reads_of_a_script_that_does_not(binary, write, cluster):
    """What the ranks leave, the shell's next command finds."""
    script = write("nothing.py", "print('done')\n")
    both = subprocess.run(
        ["sh", "-c", '"$0" torchrun "$1" && cat', binary, script],
        env=cluster, input="left\n", capture_output=True, text=True, timeout=DEADLINE_SECONDS,
    )
    assert both.stdout == "done\nleft\n", both.stderr


def test_a_debugger_is_spoken_to_on_a_terminal(binary, write, cluster):
    script = write("debugged.py", "x = 5\nbreakpoint()\nprint('x is', x)\n")
    ours, theirs = pty.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    running = subprocess.Popen(
        [binary, "torchrun", script], env=cluster, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal
    )
    os.close(theirs)
    seen = b""
    try:
        for answer in (b"x = 7\n", b"continue\n"):
            while not seen.endswith(b"(Pdb) "):
                seen += os.read(ours, 4096)
            os.write(ours, answer)
            seen += b"|"
        while True:
            seen += os.read(ours, 4096)
    except OSError:  # how a terminal ends
        pass
    finally:
        os.close(ours)
        assert running.wait(DEADLINE_SECONDS) == 0, seen
    assert b"x is 7" in seen, seen
