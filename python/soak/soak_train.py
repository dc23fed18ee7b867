"""A mixed load of training runs on a small cluster, for as long as it is told: `cargo xtask soak --train`.

Runs of many kinds and lengths go on beside each other while packages change, nodes come and go, and ranks, warm Pythons
and whole commands are killed. Every run must end as its kind says, with what it was to compute. At the end the cluster
must hold what it held after the first tenth: memory, descriptors, threads, processes, files and sockets.
"""

import argparse
import contextlib
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
# A run takes up to half a minute, and is started again when what it runs on is killed. Only one that hangs takes so long.
RUN_LIMIT_SECONDS = 300
# Worker processes that nobody needs retire after some 20 s, and warm Pythons after the time below.
SETTLE_SECONDS = 120
WARM_IDLE_SECONDS = 15
# Allocators keep some of what was freed: so much more, and a quarter, is no leak.
SLACK_KIB = 8 << 10
AT_A_TIME = 3

SCRIPTS = {
    # Prints so many lines, which all must arrive.
    "lines": """
        import os, sys
        import changing
        for number in range(int(sys.argv[1])):
            print(os.environ["RANK"], number)
    """,
    # Works for so many seconds, and says how far it is.
    "works": """
        import sys, time
        import changing
        from wingbeat import train
        for step in range(20 * int(sys.argv[1])):
            time.sleep(0.05)
            train.report({"step": step})
        print("worked")
    """,
    # Reduces over all ranks.
    "reduces": """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for _ in range(20):
            sums = torch.full((1000,), float(dist.get_rank() + 1))
            dist.all_reduce(sums)
        print("sum", float(sums[0]))
    """,
    # Counts to a number with a checkpoint at each step, from where the last attempt was.
    "counts": """
        import os, pathlib, sys, tempfile, time
        from wingbeat import train
        last = int(sys.argv[1])
        checkpoint = train.get_checkpoint()
        begin = int(pathlib.Path(checkpoint.path, "step").read_text()) + 1 if checkpoint else 0
        for step in range(begin, last):
            time.sleep(0.1)
            # What a rank that is killed leaves there is its own.
            with tempfile.TemporaryDirectory(dir=os.environ["SOAK_OWN"]) as folder:
                pathlib.Path(folder, "step").write_text(str(step))
                train.report({"step": step}, checkpoint=folder)
        print("counted", last)
    """,
    "fails": """
        import sys
        sys.exit(3)
    """,
    # Saves what it has when it is asked to end.
    "stops": """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"saved\\n"), sys.exit(0)))
        print("begun", flush=True)
        while True:
            time.sleep(0.05)
    """,
    # Leaves children of children, and much output.
    "leaves": """
        import os, subprocess, sys
        subprocess.run("sleep 1000 & setsid sleep 1000 &", shell=True)
        sys.stdout.buffer.write(bytes(range(256)) * 40_000)
    """,
    "function": """
        import sys
        from wingbeat.torch import TorchDistributor
        def work(rate):
            import os
            return rate * int(os.environ["WORLD_SIZE"])
        print("returned", TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(work, 21))
    """,
}


class Failed(Exception):
    """What must not be."""


def said(errors):
    """The end of what a run has said."""
    return errors.decode(errors="replace")[-4000:]


class Cluster:
    def __init__(self, binary, folder):
        self.binary, self.folder, self.nodes, self.lock = binary, folder, [], threading.Lock()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("WINGBEAT_", "PYTHON", "TORCHELASTIC"))}
        token = folder / "token"
        token.write_text("of this soak alone, and not short\n")
        token.chmod(0o600)
        for name in ("tmp", "home", "packages", "own"):
            (folder / name).mkdir()
        (folder / "packages" / "changing").mkdir()
        (folder / "packages" / "changing" / "__init__.py").write_text("")
        self.env = {
            **inherited,
            "PYTHONPATH": f"{PACKAGE}:{folder / 'packages'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "SOAK_OWN": str(folder / "own"),
            "WINGBEAT_BIN": binary,
            "WINGBEAT_PYTHON": sys.executable,
            "WINGBEAT_TOKEN_FILE": str(token),
            "WINGBEAT_WARM_IDLE": str(WARM_IDLE_SECONDS),
        }
        self.head, said = self.daemon("head", "--port", "0")
        self.address = re.search(r"listening at (\S+)", said)[1]
        self.env["WINGBEAT_ADDRESS"] = self.address
        self.first = self.add_node(4)

    def daemon(self, *arguments):
        log = open(self.folder / "daemons.log", "a")
        daemon = subprocess.Popen([self.binary, *arguments], env=self.env, stdout=subprocess.PIPE, stderr=log, text=True)
        return daemon, daemon.stdout.readline()

    def add_node(self, cpus):
        node, said = self.daemon("worker", "--head", self.address, "--num-cpus", str(cpus))
        if "joined" not in said:
            raise Failed(f"a node did not join: {said!r}")
        self.nodes.append(node)
        return node

    def end_node(self, node, number):
        self.nodes.remove(node)
        node.send_signal(number)
        node.wait(60)
        node.stdout.close()

    def end(self):
        for node in list(self.nodes):
            self.end_node(node, signal.SIGTERM)
        self.head.terminate()
        self.head.wait(60)
        self.head.stdout.close()


def processes():
    """The parents and command lines of all processes."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found[int(pid)] = (int(stat[1]), stat[0], command)
    return found


def below(roots):
    """What these processes have started, and what that has."""
    known, found = processes(), set(roots)
    while True:
        more = {pid for pid, (parent, _, _) in known.items() if parent in found} - found
        if not more:
            return {pid: known[pid] for pid in found - set(roots) if pid in known}
        found |= more


def of_process(pid):
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kib = int(status["RssAnon"].split()[0])
    return {"KiB": kib, "threads": int(status["Threads"]), "descriptors": len(os.listdir(f"/proc/{pid}/fd"))}


def sample(cluster):
    """What the cluster holds while nothing runs."""
    started = below([cluster.head.pid, *(node.pid for node in cluster.nodes), os.getpid()])
    daemons = {cluster.head.pid, *(node.pid for node in cluster.nodes)}
    started = {pid: one for pid, one in started.items() if pid not in daemons}
    sockets = Path("/proc/net/unix").read_text().count("@wingbeat-rank-")
    files = [os.path.join(at, name) for folder in ("tmp", "home") for at, _, names in os.walk(cluster.folder / folder) for name in names]
    held = {"head": of_process(cluster.head.pid), "node": of_process(cluster.first.pid)}
    shared = len([name for name in os.listdir("/dev/shm") if name.startswith("wingbeat")])
    zombies = sum(state == "Z" for _, state, _ in started.values())
    counts = {"processes": len(started), "zombies": zombies, "rank sockets": sockets, "files": len(files), "shared": shared}
    names = {"files": files, "processes": [f"{pid} {state} {command}" for pid, (_, state, command) in started.items()]}
    return held, counts, names


def more_than(now, before):
    (held, counts, names), (held_before, counts_before, _) = now, before
    more = [f"{name}: {counts[name]}, {counts_before[name]} before" for name in counts if counts[name] > counts_before[name]]
    more += [name for what, all_names in names.items() if counts[what] > counts_before[what] for name in all_names]
    for who, usage in held.items():
        was = held_before[who]
        allowed = {"KiB": was["KiB"] * 5 // 4 + SLACK_KIB, "threads": was["threads"] + 4, "descriptors": was["descriptors"] + 3}
        more += [f"{who}, {what}: {usage[what]}, {was[what]} before" for what in usage if usage[what] > allowed[what]]
    return more


def settled(cluster):
    """What it holds once nothing goes away any more."""
    last, since, begun = None, time.monotonic(), time.monotonic()
    while time.monotonic() - since < WARM_IDLE_SECONDS + 15 and time.monotonic() - begun < SETTLE_SECONDS:
        time.sleep(1)
        now = sample(cluster)[1]
        if now != last:
            last, since = now, time.monotonic()
    return sample(cluster)


class Load:
    """Runs beside each other, and what happens to them."""

    def __init__(self, cluster, folder, seed):
        self.cluster, self.folder, self.chance = cluster, folder, random.Random(seed)
        self.lock, self.failures, self.counts = threading.Lock(), [], {}
        self.scripts = {}
        for name, text in SCRIPTS.items():
            self.scripts[name] = folder / f"{name}.py"
            self.scripts[name].write_text("\n".join(line[8:] for line in text.splitlines()))

    def start(self, *command, **streams):
        return subprocess.Popen(
            list(map(str, command)), env=self.cluster.env, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **streams
        )

    def train(self, *arguments):
        binary = self.cluster.binary
        return self.start(binary, "train", "--unprefixed", "--max-failures", "100", *arguments)

    def finish(self, running, code=0):
        """What it has printed and what it said; it must end with this code."""
        try:
            out, errors = running.communicate(timeout=RUN_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = subprocess.run([self.cluster.binary, "status"], env=self.cluster.env, capture_output=True, text=True)
            running.kill()
            out, errors = running.communicate()
            raise Failed(f"{running.args} hangs:\n{said(errors)}\n{status.stdout}") from None
        if code is not None and running.returncode != code:
            raise Failed(f"{running.args} ended with {running.returncode}:\n{out[-2000:]!r}\n{said(errors)}")
        return out, errors

    def expect(self, running, is_right):
        out, errors = self.finish(running)
        if not is_right(out):
            raise Failed(f"{running.args} printed {out[:500]!r}…{out[-500:]!r}\n{said(errors)}")

    def one(self, kind, chance):
        """Runs one of this kind to its end."""
        ranks, script = chance.choice([1, 2]), self.scripts[kind]
        attempt_may_repeat = 100  # what was printed before a restart is printed again
        match kind:
            case "lines":
                count = chance.choice([0, 10, 10_000])
                wanted = {f"{rank} {number}".encode() for rank in range(ranks) for number in range(count)}
                self.expect(self.train("-n", ranks, script, "--", count), lambda out: wanted <= set(out.splitlines()))  # an attempt may be killed in a line
            case "works":
                running = self.train("-n", ranks, script, "--", chance.choice([1, 5, 15]))
                self.expect(running, lambda out: ranks <= out.count(b"worked") <= ranks * attempt_may_repeat)
            case "reduces":
                self.expect(self.train("-n", 2, script), lambda out: set(out.splitlines()) == {b"sum 3.0"})
            case "counts":
                last = chance.choice([3, 30, 100])
                storage = self.folder / f"storage-{chance.getrandbits(64):x}"
                running = self.train("-n", ranks, "--storage", storage, script, "--", last)
                self.expect(running, lambda out: set(out.splitlines()) == {f"counted {last}".encode()})
                steps = sorted(storage.glob("checkpoint_*/step"))
                if not steps or steps[-1].read_text() != str(last - 1):
                    raise Failed(f"the newest checkpoint of {storage} is not of step {last - 1}")
                subprocess.run(["rm", "-r", storage], check=True)
            case "fails":
                running = self.start(self.cluster.binary, "train", "-n", ranks, script)
                self.finish(running, code=None)
                if running.returncode == 0:
                    raise Failed("a run that fails has succeeded")
            case "stops":
                running = self.train("-n", ranks, script)
                if chance.random() < 0.5:
                    running.stdout.readline()
                    running.terminate()
                    out, errors = self.finish(running, code=128 + signal.SIGTERM)
                    was_disturbed = any(sign in errors for sign in (b"trying again", b"signal 9", b"is gone", b"lost"))
                    if b"saved" not in out and not was_disturbed:
                        raise Failed(f"a rank that was asked to end had no time to save: {out!r}\n{said(errors)}")
                else:
                    running.stdout.readline()
                    running.kill()  # its ranks end with it: there is nobody below at the end
                    self.finish(running, code=-signal.SIGKILL)
            case "leaves":
                digest = hashlib.sha256(bytes(range(256)) * 40_000).digest()
                running = self.start(self.cluster.binary, "torchrun", "--max-restarts", 100, script)
                self.expect(running, lambda out: hashlib.sha256(out[-10_240_000:]).digest() == digest)
            case "function":
                running = self.start(sys.executable, script)
                out, _ = self.finish(running, code=None)
                if running.returncode == 0 and out != b"returned 42\n":
                    raise Failed(f"a function returned {out!r}")

    def work(self, until, number):
        chance = random.Random(self.chance.getrandbits(64) + number)
        while time.monotonic() < until and not self.failures:
            kind = chance.choice(list(SCRIPTS))
            try:
                self.one(kind, chance)
            except Exception as error:
                with self.lock:
                    self.failures.append(f"{kind}: {error}")
            with self.lock:
                self.counts[kind] = self.counts.get(kind, 0) + 1

    def disturb(self, until):
        """Things happen, one every few seconds."""
        chance, second = random.Random(self.chance.getrandbits(64)), None
        while time.monotonic() < until and not self.failures:
            time.sleep(chance.uniform(3, 12))
            what = chance.choice(["package", "rank", "warm", "node", "nothing"])
            try:
                match what:
                    case "package":
                        (self.cluster.folder / "packages" / "changing" / f"new_{chance.getrandbits(32):x}.py").write_text("")
                    case "rank" | "warm":
                        started = below([node.pid for node in self.cluster.nodes])
                        is_rank = lambda command: any(f"/{name}.py" in command for name in SCRIPTS)
                        is_warm = lambda command: "_warm.py" in command
                        wanted = is_rank if what == "rank" else is_warm
                        pids = [pid for pid, (_, _, command) in started.items() if wanted(command)]
                        if pids:
                            with contextlib.suppress(ProcessLookupError):
                                os.kill(chance.choice(pids), signal.SIGKILL)
                    case "node" if second is None:
                        second = self.cluster.add_node(2)
                    case "node":
                        self.cluster.end_node(second, chance.choice([signal.SIGKILL, signal.SIGTERM]))
                        second = None
            except Exception as error:
                with self.lock:
                    self.failures.append(f"{what}: {error!r}")
            with self.lock:
                self.counts[what] = self.counts.get(what, 0) + 1
        if second is not None:
            self.cluster.end_node(second, signal.SIGTERM)

    def go_on_for(self, seconds):
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=self.work, args=(until, number)) for number in range(AT_A_TIME)]
        threads.append(threading.Thread(target=self.disturb, args=(until,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"soak: {self.counts}", file=sys.stderr, flush=True)
        if self.failures:
            raise Failed("\n".join(self.failures))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1, help="the same seed chooses the same runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wingbeat-soak-") as folder:
        folder = Path(folder)
        cluster = Cluster(os.environ["WINGBEAT_BIN"], folder)
        try:
            load = Load(cluster, folder, args.seed)
            load.go_on_for(args.minutes * 6)
            before = settled(cluster)
            print(f"soak: after the first tenth: {before[:2]}", file=sys.stderr, flush=True)
            load.go_on_for(args.minutes * 54)
            begun = time.monotonic()
            while more := more_than(now := sample(cluster), before):
                if time.monotonic() - begun > SETTLE_SECONDS:
                    raise Failed("there is more than after the first tenth:\n" + "\n".join(more))
                time.sleep(1)
            print(f"soak: at the end: {now[:2]}", file=sys.stderr, flush=True)
        except Failed as error:
            sys.exit(f"soak: {error}\n--- daemons\n{(folder / 'daemons.log').read_text()[-4000:]}")
        finally:
            cluster.end()
    print("soak: ok")


if __name__ == "__main__":
    main()
