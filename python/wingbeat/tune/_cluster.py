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
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from wingbeat import _command

# How long a daemon has to end by itself. A node waits for the processes of its ranks.
_END_S = 10


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Gives a cluster for the time of a `with`.

    One that is started here has a head and a node of this machine, listens at 127.0.0.1 and has a token of its own. It ends
    with this thread, however that ends.

    Yields:
        Variables for commands that run on it.

    Raises:
        RuntimeError: It does not start.
    """
    if os.environ.get("WINGBEAT_ADDRESS"):
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="wingbeat-tune-") as folder, contextlib.ExitStack() as daemons:
        token = Path(folder, "token")
        token.touch(0o600)
        token.write_text(secrets.token_hex(32) + "\n")
        env = {"WINGBEAT_TOKEN_FILE": str(token)}
        said = daemons.enter_context(_daemon(folder, env, "head", "--port", "0"))
        listening = re.search(r"listening at (\S+)", said)
        if listening is None:
            raise RuntimeError(f"`wingbeat head` does not start: {_errors(folder, 'head') or said}")
        env["WINGBEAT_ADDRESS"] = listening[1]
        said = daemons.enter_context(_daemon(folder, env, "worker", "--num-cpus", str(os.cpu_count() or 1)))
        if "joined" not in said:
            raise RuntimeError(f"`wingbeat worker` does not start: {_errors(folder, 'worker') or said}")
        yield env


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
        count += min(fits, default=os.cpu_count() or 1)
    return max(1, count)


@contextlib.contextmanager
def _daemon(folder: str, env: Mapping[str, str], what: str, *arguments: str) -> Iterator[str]:
    """Runs a daemon; gives its first line."""
    binary = shutil.which(_command.binary()) or _command.binary()
    tied = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_tied.py")), str(os.getpid())]
    with open(Path(folder, f"{what}.log"), "wb") as log:
        process = subprocess.Popen(
            [*tied, binary, what, *arguments],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for the trials, which need the cluster to end well
        )
    assert process.stdout is not None
    try:
        yield process.stdout.readline()
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _errors(folder: str, what: str) -> str:
    return Path(folder, f"{what}.log").read_text(encoding="utf-8", errors="replace").strip()
