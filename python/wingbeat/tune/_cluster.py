"""The cluster that trials run on: the one at `$WINGBEAT_ADDRESS`, or one for the time of `Tuner.fit`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from wingbeat import _command
from wingbeat._own_folder import own_folder

# How long a head may take to answer, how often it is asked again, and how long another has to take its place: as long as nodes
# and programs wait for one.
_ANSWER_S, _AGAIN_S, _BACK_S = 10, 1, 30
# How long a daemon has to end by itself. A node waits for the processes of its ranks.
_END_S = 10
# How much of a daemon's log an error shows.
_LOG_BYTES = 2000


class ClusterLostError(RuntimeError):
    """The head or the node that `Tuner.fit` had started on this machine has ended, and the text has the end of its log; or the
    head at `$WINGBEAT_ADDRESS` does not answer any more."""

    __module__ = "wingbeat.tune"


class Cluster:
    """A cluster.

    Args:
        env: Variables for commands that run on it.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self.daemons: list[_Daemon] = []

    def answers(self) -> bool:
        """Whether its head answers."""
        command = [_command.binary(), "status", "--json"]
        try:
            done = subprocess.run(command, env={**os.environ, **self.env}, capture_output=True, timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def wait(self) -> None:
        """Waits until its head answers again: another may take its place.

        Raises:
            ClusterLostError: It does not.
        """
        until = time.monotonic() + _BACK_S
        while not self.answers():
            self.check()
            if time.monotonic() > until:
                raise ClusterLostError(
                    f"the head at {os.environ.get('WINGBEAT_ADDRESS', '')} has not answered for {_BACK_S} s, and trials fail; "
                    "go on with Tuner.restore when it is back"
                )
            time.sleep(_AGAIN_S)

    def check(self) -> None:
        """Checks that what was started here still runs.

        Raises:
            ClusterLostError: It does not.
        """
        for daemon in self.daemons:
            code = daemon.process.poll()
            if code is not None:
                end = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                log = daemon.log()[-_LOG_BYTES:]
                raise ClusterLostError(
                    f"`wingbeat {daemon.what}`, which this fit had started, {end}: "
                    f"{log or 'its log is empty'}; what trials stored is in their folders; go on with Tuner.restore"
                )


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Gives a cluster for the time of a `with`.

    One that is started here has a head and a node of this machine, listens at 127.0.0.1 and has a token of its own. It ends
    with this thread, however that ends. What a killed program has left of its own is removed.

    Yields:
        The cluster.

    Raises:
        RuntimeError: It does not start.
    """
    if os.environ.get("WINGBEAT_ADDRESS"):
        yield Cluster({})
        return
    with own_folder("wingbeat-tune-") as folder, contextlib.ExitStack() as daemons:
        token = Path(folder, "token")
        token.touch(0o600)
        token.write_text(secrets.token_hex(32) + "\n")
        made = Cluster({"WINGBEAT_TOKEN_FILE": str(token)})
        head = daemons.enter_context(_daemon(folder, made.env, "head", "--port", "0"))
        listening = re.search(r"listening at (\S+)", head.said)
        if listening is None:
            raise RuntimeError(f"`wingbeat head` does not start: {head.log() or head.said}")
        made.env["WINGBEAT_ADDRESS"] = listening[1]
        worker = daemons.enter_context(_daemon(folder, made.env, "worker"))
        if "joined" not in worker.said:
            raise RuntimeError(f"`wingbeat worker` does not start: {worker.log() or worker.said}")
        made.daemons += [worker, head]
        yield made


def slots(cluster: Mapping[str, str], cpus: float, gpus: float) -> int:
    """How many groups of ranks with these resources all nodes of a cluster hold.

    Args:
        cluster: Variables for commands that run on it.
        cpus: CPUs of each group.
        gpus: GPUs of each group.

    Returns:
        The number, at least 1.
    """
    command = [_command.binary(), "status", "--json"]
    done = subprocess.run(command, env={**os.environ, **cluster}, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the cluster does not answer: {done.stderr.strip()}")
    count = 0
    for node in json.loads(done.stdout)["nodes"]:
        there = node["info"]["resources"]
        fits = [int(there.get(name, 0) / amount + 1e-9) for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount > 0]
        count += min(fits, default=int(there.get("CPU", 1)))
    return max(1, count)


@dataclass(frozen=True)
class _Daemon:
    what: str
    process: subprocess.Popen[str]
    said: str  # its first line
    log_file: Path

    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace").strip()


@contextlib.contextmanager
def _daemon(folder: str, env: Mapping[str, str], what: str, *arguments: str) -> Iterator[_Daemon]:
    """Runs a daemon."""
    binary = shutil.which(_command.binary()) or _command.binary()
    tied = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_tied.py")), str(os.getpid())]
    log_file = Path(folder, f"{what}.log")
    with open(log_file, "wb") as log:
        process = subprocess.Popen(
            [*tied, binary, what, *arguments],
            env={**_command.environment(), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for the trials, which need the cluster to end well
        )
    assert process.stdout is not None
    try:
        yield _Daemon(what, process, process.stdout.readline(), log_file)
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
