"""What tests of the whole system share: the `wingbeat` command, and a cluster of one node."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# Whoever runs tests in the background may have them ignore signals (nohup does), and so all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(_number, signal.SIG_DFL)

PACKAGE = Path(__file__).resolve().parents[1]
# Only a hang reaches it: every wait is for an event.
DEADLINE_SECONDS = 300


def _environment(**more):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("WINGBEAT_", "PYTHON", "TORCHELASTIC"))}
    return {**inherited, "PYTHONPATH": str(PACKAGE), "WINGBEAT_CONTEXT": "none", **more}


def free_port():
    """A port for torchrun, which else takes 29500 as any other does on this machine."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture(scope="session")
def binary():
    built = os.environ.get("WINGBEAT_BIN") or str(PACKAGE.parent / "target/debug/wingbeat")
    if not os.path.exists(built):
        pytest.fail(f"{built} is not there: `cargo xtask test` builds it, or `cargo build -p wingbeat-cli`")
    return built


@pytest.fixture(scope="session")
def environment(binary):
    """The environment of a user who has Wingbeat, and no cluster."""
    return _environment(WINGBEAT_BIN=binary, WINGBEAT_PYTHON=sys.executable)


class Cluster:
    """A head, and the workers that are added to it."""

    def __init__(self, binary, environment, folder):
        token = folder / "token"
        token.write_text("of these tests alone, and not short\n")
        token.chmod(0o600)
        self.binary, self.daemons = binary, []
        self.env = {**environment, "WINGBEAT_TOKEN_FILE": str(token)}
        self.address = re.search(r"listening at (\S+)", self.start("head", "--port", "0"))[1]
        self.env["WINGBEAT_ADDRESS"] = self.address

    def start(self, *arguments, **more):
        daemon = subprocess.Popen(
            [self.binary, *arguments], env={**self.env, **more}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.daemons.append(daemon)
        return daemon.stdout.readline()

    def worker(self, *options, cpus=4, **more):
        """Adds a node: its id, and its daemon."""
        said = self.start("worker", "--head", self.address, "--num-cpus", str(cpus), *options, **more)
        assert "joined" in said
        return re.search(r"node-\w+", said)[0], self.daemons[-1]

    def end(self):
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait()
            daemon.stdout.close()


@contextlib.contextmanager
def one_node(binary, environment, folder, *options, **worker):
    """The environment of a user of a cluster with one node of 4 CPUs; with more options and variables for its worker."""
    cluster = Cluster(binary, environment, folder)
    try:
        cluster.worker(*options, **worker)
        yield cluster.env
    finally:
        cluster.end()


@pytest.fixture
def own_cluster(binary, environment, tmp_path):
    """A cluster without nodes, of one test."""
    cluster = Cluster(binary, environment, tmp_path)
    yield cluster
    cluster.end()


@pytest.fixture(scope="session")
def cluster(binary, environment, tmp_path_factory):
    """A cluster of one node: its warm Python serves all tests."""
    with one_node(binary, environment, tmp_path_factory.mktemp("cluster")) as env:
        yield env


@pytest.fixture(scope="session")
def gpu_cluster(binary, environment, tmp_path_factory):
    """One whose node may use three of a machine's GPUs, which are pretended."""
    folder = tmp_path_factory.mktemp("gpus")
    with one_node(binary, environment, folder, "--num-gpus", "3", CUDA_VISIBLE_DEVICES="5,GPU-aa,7") as env:
        yield env


@pytest.fixture
def write(tmp_path):
    """Writes a file into the test's folder."""

    def write(name, text):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


@pytest.fixture
def run(binary):
    """Runs the `wingbeat` command to its end."""

    def run(*arguments, env, cwd=None, code=0):
        done = subprocess.run(
            [binary, *map(str, arguments)], env=env, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_SECONDS
        )
        if code is not None:
            assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def python(tmp_path):
    """Runs a program as a user would."""

    def python(text, env, code=0):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, path], env=env, capture_output=True, text=True, timeout=DEADLINE_SECONDS
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return python
