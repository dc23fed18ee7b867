"""Launches a small script as torchrun or `wingbeat torchrun`, and says what was to be seen of it."""

import contextlib
import hashlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import termios
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from conftest import DEADLINE_SECONDS, PACKAGE

SCRIPTS = Path(__file__).resolve().parent / "torchrun_scripts"
PYTHON = os.path.abspath(sys.executable)


@dataclass(frozen=True)
class Case:
    """A script, and how it is launched. Words of its command may have DIR for the folder that it runs in."""

    name: str
    tries: str
    command: tuple
    options: tuple = ()
    ranks: int = 1
    # Bytes come by a pipe; None is /dev/null; "file", "closed" and "terminal" are what they say.
    stdin: object = None
    # What to send to the launcher when all ranks have begun.
    signal: str = ""
    # Variables that are set, or unset by None.
    env: tuple = ()
    # What the launcher is started with: see STARTS.
    starts: str = ""
    # The reader of stdout leaves after a line.
    leaves: bool = False
    # It is tried with forked ranks, too.
    forked: bool = False
    # It is also run by Python alone, and only what differs from that is looked at.
    plain: bool = False
    # A child of it prints after the launcher's end.
    ends_late: bool = False


# What the launcher is started with. It is set by a program that then becomes the launcher.
STARTS = {
    "odd": """
os.umask(0o27)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.nice(5)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.set_inheritable(os.pipe()[0], True)
""",
    "no core": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n",
    "nohup": "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n",
    "closed": "os.close(0)\n",
    "terminal": "os.setsid()\nimport fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n",
}
# Whoever runs tests in the background may have them ignore signals.
STARTER = """import os, resource, signal, sys
for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
{}os.execvp(sys.argv[1], sys.argv[1:])
"""


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes_of(folder):
    """Those that have the folder in their environment."""
    mark = b"\0TELL=" + os.fsencode(folder) + b"\0"
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if mark in b"\0" + file.read() and is_alive(entry):
                    found.add(int(entry))
    return found


class Launch:
    """One launch of a case, in a folder of its own, and what it showed."""

    def __init__(self, case, launcher, env, folder, shared=None):
        self.case, self.folder, self.shares = case, folder, shared is not None
        self.work, self.temporary, self.home = folder / "work", (shared or folder) / "tmp", (shared or folder) / "home"
        shutil.copytree(SCRIPTS, self.work, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("a folder", "sub", "link"):
            (self.work / name).mkdir()
        for name in ("facts.py", "tell.py"):
            shutil.copy(self.work / name, self.work / "a folder" / name)
        (self.work / "link/facts.py").symlink_to("../facts.py")
        for new in (self.temporary, self.home):
            new.mkdir(exist_ok=True)
        folders = {"HOME": str(self.home), "TMPDIR": str(self.temporary), "TELL": str(self.work)}
        given = {**env, **folders, "PYTHONDONTWRITEBYTECODE": "1"}
        for name, value in case.env:
            given.pop(name, None)
            if value is not None:
                given[name] = self.placed(value)
        self.env = given
        ranks = ["--nproc-per-node", str(case.ranks)] if case.ranks > 1 else []
        self.command = [*map(str, launcher), *ranks, *map(self.placed, (*case.options, *case.command))]
        self.python = self.facts_of_python() if case.plain else {}

    def placed(self, word):
        return word.replace("DIR", str(self.work))

    def start(self, command):
        stdin = self.case.stdin
        starts = STARTS.get(self.case.starts, "") + (STARTS.get(stdin, "") if isinstance(stdin, str) else "")
        command = [PYTHON, "-I", "-S", "-c", STARTER.format(starts), *command]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ours = theirs = None
        if isinstance(stdin, bytes):
            read, write = os.pipe()
            os.write(write, stdin)  # less than a pipe holds
            os.close(write)
            streams["stdin"] = read
        elif stdin == "file":
            path = self.folder / "stdin"
            path.write_bytes(b"of a file\nto its end\n")
            streams["stdin"] = os.open(path, os.O_RDONLY)
        elif stdin == "terminal":
            ours, theirs = pty.openpty()
            mode = termios.tcgetattr(theirs)
            mode[1] &= ~termios.OPOST
            termios.tcsetattr(theirs, termios.TCSANOW, mode)
            streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        process = subprocess.Popen(command, env=self.env, cwd=self.work, **streams)
        if isinstance(streams["stdin"], int) and streams["stdin"] >= 0:
            os.close(streams["stdin"])
        return process, ours

    def run(self):
        """Runs it to its end, and answers with what was seen, by property."""
        process, terminal = self.start(self.command)
        outputs = {"stdout": [], "stderr": []}

        def read(name, descriptor):
            with contextlib.suppress(OSError):  # how a terminal ends
                while data := os.read(descriptor, 1 << 20):
                    outputs[name].append(data)
                    if self.case.leaves and name == "stdout":
                        return process.stdout.close()

        sources = {"stdout": terminal} if terminal else {name: getattr(process, name).fileno() for name in outputs}
        readers = [threading.Thread(target=read, args=source) for source in sources.items()]
        try:
            for reader in readers:
                reader.start()
            for name in self.case.signal.split():
                self.wait_until_begun(process)
                process.send_signal(signal.Signals[name])
                if name != self.case.signal.split()[-1]:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(4)
            code = process.wait(DEADLINE_SECONDS)
            survivors = {} if self.case.ends_late else self.survivors()
            end(survivors)
            for reader in readers:
                reader.join(DEADLINE_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            end(self.survivors_now())
            for reader in readers:
                reader.join()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            if terminal:
                os.close(terminal)
        if self.case.leaves:
            outputs["stdout"] = [b"".join(outputs["stdout"]).split(b"\n")[0]]
        return self.seen(code, survivors, {name: b"".join(output) for name, output in outputs.items()})

    def wait_until_begun(self, process):
        begun = [self.work / f"begun-{rank}" for rank in range(self.case.ranks)]
        limit = time.monotonic() + DEADLINE_SECONDS
        while not all(path.exists() for path in begun) and process.poll() is None:
            assert time.monotonic() < limit, f"not all ranks of {self.case.name} have begun"
            time.sleep(0.01)

    def told(self):
        """What ranks have told: by rank, the lines."""
        files = sorted(self.work.glob("told-*"))
        return {file.name[5:]: [json.loads(line) for line in file.read_text().splitlines()] for file in files}

    def survivors(self):
        """What lives on, by process id. What is about to end has a moment for it."""
        limit = time.monotonic() + 10
        while (alive := self.survivors_now()) and time.monotonic() < limit:
            time.sleep(0.02)
        return alive

    def survivors_now(self):
        told = {line["pid"] for lines in self.told().values() for line in lines}
        # Of a cluster, those with this environment are the ranks and what they are forked from, which the next ones need.
        others = set() if self.shares else processes_of(self.work)
        return {pid: command_of(pid) for pid in told | others if is_alive(pid)}

    def facts_of_python(self):
        """What a script sees that is started by nothing but Python."""
        flags = ["-u", self.placed(self.case.command[0]), *map(self.placed, self.case.command[1:])]
        process, terminal = self.start([PYTHON, *flags])
        if terminal:
            with contextlib.suppress(OSError):
                while os.read(terminal, 1 << 16):
                    pass
            os.close(terminal)
            process.wait(DEADLINE_SECONDS)
        else:
            process.communicate(timeout=DEADLINE_SECONDS)
        told = self.work / "told-plain"
        facts = json.loads(told.read_text())["facts"]
        told.unlink()
        return facts

    def seen(self, code, survivors, outputs):
        seen = {"exit code": code}
        for name, output in outputs.items():
            if name == "stderr" or self.case.stdin == "terminal":
                output = without_launcher(output)
            seen[name] = self.shown(output, self.case.ranks > 1)
        python = self.python if self.case.plain else {}
        for rank, lines in self.told().items():
            told = []
            for line in lines:
                line.pop("pid")
                facts = line.pop("facts", {})
                for name in sorted({*facts, *python}):
                    if (fact := facts.get(name)) != (usual := python.get(name)) and facts:
                        seen[f"rank {rank}: {name}"] = self.without_plain(name, fact, usual)
                if line:
                    told.append(self.without_plain("told", line, None))
            if told:
                seen[f"rank {rank}: told"] = told
        known = {*map(str, SCRIPTS.rglob("*"))}
        for path in sorted(self.work.rglob("*")):
            name = path.relative_to(self.work)
            is_given = str(SCRIPTS / name) in known or name.parts[0] in ("a folder", "sub", "link")
            if not is_given and path.is_file() and not re.match("told-|begun-", name.name):
                seen["file " + self.normal(str(name))] = self.content(path)
        for name, folder in () if self.shares else (("TMPDIR", self.temporary), ("HOME", self.home)):
            left = (path.relative_to(folder).parts[:2] for path in folder.rglob("*") if path.is_file())
            seen["left in " + name] = sorted({self.normal("/".join(parts)) for parts in left})
        seen["lives on"] = sorted(survivors.values())
        return seen

    def content(self, path):
        if path.suffix == ".json":  # the times in it differ
            return self.normal(json.loads(path.read_text())["message"]["message"])
        return self.shown(path.read_bytes(), False)

    def shown(self, output, sort):
        if len(output) > 4000:
            return f"{len(output)} bytes, SHA-256 {hashlib.sha256(output).hexdigest()}"
        text = self.normal(output.decode("utf-8", "backslashreplace"))
        return sorted(text.split("\n")) if sort else text

    def without_plain(self, name, value, usual):
        if name in ("imported before", "frames below"):  # how much of it is the runner's own affair
            return "more than in Python alone"
        if name in ("sys.path", "names in __main__"):
            value = {"more": [one for one in value if one not in usual], "less": [one for one in usual if one not in value]}
        if name in ("limits", "sys.flags"):
            return sorted(key for key, one in value.items() if one != usual[key])
        if name.endswith("PORT") and str(value).isdigit():
            return "a port"
        return json.loads(self.normal(json.dumps(value)))

    def normal(self, text):
        """Without what differs from launch to launch, and from machine to machine."""
        for value, name in self.names:
            text = text.replace(value, name)
        text = re.sub(r"\btorchelastic_\w+", "torchelastic_RANDOM", text)
        text = re.sub(r"\bpytorch-errorfile-\w+", "pytorch-errorfile-RANDOM", text)
        text = re.sub(r"\bjob_\w+", "job_RANDOM", text)
        text = re.sub(r"\bnone_\w+", "none_RANDOM", text)
        text = re.sub(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "UUID", text)
        text = re.sub(r"\b0000[0-9a-f]{12}\b", "NUMBER", text)
        text = re.sub(r"\bwingbeat-rank-[0-9a-f-]+\b", "wingbeat-rank-ID", text)
        text = re.sub(r"\bprocess-[0-9a-f]+\b", "process-ID", text)
        text = re.sub(r"\b(wingbeat(?:-cache-\d+)?/python-)[0-9a-f]+\b", r"\1ID", text)
        return re.sub(r"/proc/\d+/fd/\d+", "/proc/PID/fd/N", text)

    @property
    def names(self):
        found = {
            str(self.work): "DIR",
            str(self.temporary): "TMPDIR",
            str(self.home): "HOME",
            PYTHON: "PYTHON",
            sys.prefix: "VENV",
            sysconfig.get_path("stdlib"): "LIB",
            str(PACKAGE): "PACKAGE",
        }
        return sorted(found.items(), key=lambda pair: -len(pair[0]))


def end(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def command_of(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return " ".join(os.path.basename(word) for word in os.fsdecode(file.read()).rstrip("\0").split("\0"))
    return "?"


def without_launcher(stderr):
    """What ranks have printed: without the launcher's own words, which are its own."""
    own = rb'^(Traceback \(most recent call last\):\r?\n  File "[^"]*(/torchrun|/torch/distributed/[^"]*)"|error: )'
    end = re.search(own, stderr, re.MULTILINE)
    stderr = stderr[: end.start()] if end else stderr
    stderr = re.sub(rb"[DIWEC]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ torch/.*\r?\n", b"", stderr)
    return re.sub(rb"^wingbeat( torchrun)?: .*\r?\n", b"", stderr, flags=re.MULTILINE)
