"""The parent from which ranks are forked: a Python that has imported torch and waits.

    python path/to/wingbeat/_warm.py SOCKET IDLE_SECONDS [MODULE ...]

A MODULE that ends with ? need not be there. A node has one for each Python environment. It listens on the abstract unix
socket SOCKET. When it has had no rank and heard of nobody for IDLE_SECONDS, it ends. When its interpreter or what it has
imported changes, it retires: it stops listening, says `retired`, and ends with the last of its ranks, which are the
parent's children and live no longer than it. It answers each connection with one line of JSON, `{"python": "3.11"}` or
`{"refused": "why", "retires": false}`, and then takes one request: a line of JSON with

    args    what to run, as Python takes it: a script and its arguments, or -m, a module and its arguments
    env     its whole environment
    cwd     its working directory

and, with it, the descriptors of its standard input, output and error. A keeper process is forked, and from that the
rank. The keeper says `{"pid": …, "keeper": …}`, sends the rank's process group each signal that it reads as one byte (and 255
asks the rank for its stacks), and says `{"status": …, "ended_us": …}`, the wait status and when that was, when the rank has ended
and everything that the rank has started with it. A connection that closes ends the rank.

What a fork shares, a rank must not see: it gets its own environment, arguments, working directory, signals, streams,
seeds and thread counts, and a `__main__` that multiprocessing's children find again. What has been imported before
the fork has read its settings by then, so a parent serves only ranks that agree on those; that is the caller's to
see to. Nothing here runs a tensor operation, initializes CUDA or starts a thread, and before each fork that is checked.
"""

import errno
import json
import os
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False  # as of `typing`, which takes long to import
if TYPE_CHECKING:
    from typing import Any, BinaryIO, NoReturn

    Request = dict[str, Any]
    # The folders that modules come from, each with whether something was imported from it, and the modules' names.
    Origins = tuple[list[tuple[str, bool]], set[str]]

# What importing torch alone leaves for later, and nearly every script needs: imported while nobody waits.
LATER = ("torch._dynamo",)
# How long nobody must have asked for anything before that.
QUIET_SECONDS = 2.0
# How long to wait where there is no memory or no descriptor for whoever asks: the next try would find the same.
EXHAUSTED_SECONDS = 0.1
REQUEST_LIMIT = 64 << 20
ASK_STACKS = 255
# What CDLL(None).prctl takes, <linux/prctl.h>.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    own = os.path.dirname(os.path.abspath(__file__))
    is_safe = getattr(sys.flags, "safe_path", False)  # then it is not in the path, nor what ranks have in its place
    if is_safe:
        sys.path.insert(0, own)
    import _rank_main  # type: ignore[import-not-found]  # noqa: F401  before its folder, whose other files are no modules to be found, leaves the path

    sys.path[:1] = [] if is_safe else [os.path.dirname(own)]
    name, idle, modules = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    tie_to_parent(int(os.environ.pop("WINGBEAT_RANK_PARENT")))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind("\0" + name)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # another was started at the same time
            print("taken", flush=True)
            sys.exit(1)
        sys.exit(f"cannot listen: {error}")
    listener.listen(128)
    print("listening", flush=True)
    # Connections wait from here on: whoever is served first has waited for the imports, not for a way to ask.
    load(modules)
    serve(listener, idle)


def load(modules: "list[str] | tuple[str, ...]") -> None:
    import importlib

    for module in modules:
        name = module.rstrip("?")
        try:
            importlib.import_module(name)
        except ImportError as error:
            # A script that needs it says so itself, and one that does not runs.
            if name == module:
                print(f"not imported: {name}: {error}", file=sys.stderr, flush=True)


class Later:
    """Modules that are imported while nobody asks for ranks, which need them to begin sooner, and not to run. A child imports
    them first: what an import that fails leaves behind, no rank can be rid of, and with a thread none could be forked."""

    def __init__(self, modules: "tuple[str, ...]") -> None:
        self.modules = modules
        self.answer: BinaryIO | None = None  # of the child, while it tries: a byte, or an end
        self._child = 0
        self._is_tried = False

    def is_due(self) -> bool:
        return bool(self.modules) and self.answer is None

    def go_on(self, listener: socket.socket) -> bool:
        """Has a child try, or imports what it could import; whether something was imported."""
        import importlib

        if self._is_tried:
            for module in self.modules:
                importlib.import_module(module)
            self.modules = ()
            return True
        try:
            read, write = os.pipe()
            self.answer = os.fdopen(read, "rb", 0)
            try:
                self._child = self._try(listener, write)
            finally:
                os.close(write)
        except OSError:
            self.give_up()
        return False

    def take_answer(self) -> None:
        assert self.answer is not None
        self._child = 0  # it ends, and nobody keeps its id
        if self.answer.read(1):
            self.answer.close()
            self.answer = None
            self._is_tried = True
        else:
            self.give_up()

    def give_up(self) -> None:
        self.modules = ()
        if self.answer is not None:
            self.answer.close()
            self.answer = None
        if self._child:
            try:
                os.kill(self._child, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _try(self, listener: socket.socket, write: int) -> int:
        import importlib

        parent = os.getpid()
        child = os.fork()
        if child == 0:
            try:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                tie_to_parent(parent)
                for module in self.modules:
                    importlib.import_module(module)
                if why_not_fork() is None:
                    os.write(write, b"1")
            finally:
                os._exit(0)
        return child


def serve(listener: socket.socket, idle: float) -> None:
    import gc

    imported = origins()
    made_of = fingerprint(imported)
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, what it shares
    later = Later(LATER if "torch" in sys.modules else ())
    children = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are nobody's business when they end
    while True:
        own: list[Any] = [listener] if later.answer is None else [listener, later.answer]
        ready, _, _ = select.select(own, [], [], QUIET_SECONDS if later.is_due() else idle)
        if later.answer in ready:
            later.take_answer()
            continue
        if not ready and not later.is_due():
            later.give_up()
            if has_children():
                continue
            return
        if not ready:
            if fingerprint(imported) != made_of:
                break
            signal.signal(signal.SIGCHLD, children)
            try:
                has_imported = later.go_on(listener)
            except (Exception, SystemExit):
                break  # a child could import it: the next Python begins without what is left of this
            if has_imported:
                imported = origins()
                made_of = fingerprint(imported)
                gc.collect()
                gc.freeze()
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            continue
        changed = False
        try:
            connection, _ = listener.accept()
            with connection:
                if not is_ours(connection):
                    continue
                changed = fingerprint(imported) != made_of
                refused = "its interpreter or its packages have changed" if changed else why_not_fork()
                if refused:
                    say(connection, {"refused": refused, "retires": changed})
                else:
                    say(connection, {"python": ".".join(map(str, sys.version_info[:2]))})
                    serve_request(connection, own)
        except (OSError, ValueError, LookupError, TypeError) as error:
            # Whoever asked is gone, or has made no sense; others are not to suffer from it.
            print(f"a request failed: {error}", file=sys.stderr, flush=True)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                time.sleep(EXHAUSTED_SECONDS)
        if changed:
            break
    listener.close()
    later.give_up()
    print("retired", flush=True)
    while has_children(wait=True):
        pass


def serve_request(connection: socket.socket, own: "list[Any]") -> None:
    """Takes one request, and forks a rank for it or says why not; `own` is what no rank is to have of this process."""
    connection.settimeout(60)
    request, streams = receive(connection)
    connection.settimeout(None)
    if request is None:
        return
    answer = None
    try:
        refused = why_not_this_script(request)
        if refused is None:
            fork_keeper(own, connection, request, streams)
        else:
            answer = {"refused": refused, "retires": False}
    except OSError as error:
        answer = not_forked(error)
    finally:
        for stream in streams:
            os.close(stream)
    if answer is not None:
        say(connection, answer)


def not_forked(error: OSError) -> "dict[str, Any]":
    return {"refused": f"its process could not be forked: {error}", "retires": False}


def has_children(wait: bool = False) -> bool:
    """Whether a keeper lives; with `wait`, once one has ended. Nobody is told how: SIGCHLD is ignored."""
    try:
        os.waitpid(-1, 0 if wait else os.WNOHANG)
        return True
    except ChildProcessError:
        return False


def is_ours(connection: socket.socket) -> bool:
    """Whether the other side is this user's: anybody on the machine may connect."""
    ucred = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", ucred)[1] == os.geteuid())


def origins() -> "Origins":
    """The folders that modules come from, each with whether something was imported from it, and the names of those modules.
    They change only when something is imported: looking at every module again would copy the pages that forks share."""
    files = [file for file in (getattr(module, "__file__", None) for module in list(sys.modules.values())) if file]
    first = 0 if getattr(sys.flags, "safe_path", False) else 1  # after the script's folder
    below = [(path, os.path.join(path, "")) for path in sys.path[first:]]
    folders = [(path, any(file.startswith(prefix) for file in files)) for path, prefix in below]
    return folders, {name.partition(".")[0] for name in sys.modules}


def fingerprint(imported: "Origins") -> "list[tuple[Any, ...]]":
    """Changes with the interpreter, with the folders that something was imported from, and when a file that would be imported
    in place of that appears in another. Other files of a project come and go."""
    folders, modules = imported
    marks: list[tuple[Any, ...]] = []
    for path, has_imported in [(sys.executable, True), *folders]:
        try:
            if not has_imported and os.path.isdir(path):
                marks.append((path, sorted(name for name in os.listdir(path) if name.partition(".")[0] in modules)))
            else:
                stat = os.stat(path)
                marks.append((path, stat.st_ino, stat.st_mtime_ns))
        except OSError:
            marks.append((path, None))
    return marks


def why_not_fork() -> "str | None":
    """Why no rank can be forked from here: only the thread that forks goes on in the child, and a hook of the user's would
    have to run in each rank."""
    for name in ("sitecustomize", "usercustomize"):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and not is_system_s(file):
            return f"{file} is to run when a rank's Python starts"
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        names = [open(f"/proc/self/task/{thread}/comm").read().strip() for thread in threads]
        return f"an imported module has started threads ({', '.join(sorted(names))})"
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
            return f"an imported module has opened {path}"
    return None


def is_system_s(file: str) -> bool:
    """Whether a file came with Python or with the machine, and not with the user or an environment."""
    import sysconfig

    file, stdlib = os.path.realpath(file), os.path.realpath(sysconfig.get_path("stdlib"))
    return file.startswith(("/etc/", "/usr/lib/", os.path.join(stdlib, ""))) and "site-packages" not in file


def why_not_this_script(request: "Request") -> "str | None":
    """Why this script must start cold: beside it lies what it would import in place of what has been imported here."""
    if getattr(sys.flags, "safe_path", False) or sys.flags.isolated:
        return None
    script = request["args"][0] if request["args"] else "-m"
    if os.path.realpath(os.path.dirname(script)) == os.path.dirname(os.path.realpath(__file__)):
        return None  # this package's own: it looks for no modules beside itself
    script = request["cwd"] if script == "-m" else os.path.realpath(os.path.join(request["cwd"], script))
    folder = script if os.path.isdir(script) else os.path.dirname(script)
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return None
    for entry in entries:
        name, _, kind = entry.name.partition(".")
        module = sys.modules.get(name)
        if module is None or name in ("__main__", *sys.builtin_module_names):
            continue
        if kind != "py" and not os.path.exists(os.path.join(entry.path, "__init__.py")):
            continue
        file = getattr(module, "__file__", None)
        if file is None or not file.startswith(os.path.join(folder, "")):
            return f"{entry.name} beside the script stands for a module that the warm Python has imported already"
    return None


def say(connection: socket.socket, message: "dict[str, Any]") -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def as_here(told: "Any") -> "Any":
    """Its texts as Python decodes arguments and variables in this locale, which may not have all characters."""
    if isinstance(told, dict):
        return {as_here(key): as_here(value) for key, value in told.items()}
    if isinstance(told, list):
        return [as_here(value) for value in told]
    return os.fsdecode(told.encode("utf-8", "surrogateescape")) if isinstance(told, str) else told


def receive(connection: socket.socket) -> "tuple[Request | None, list[int]]":
    """The request and the three streams that came with it; None if the other side left."""
    data, streams = b"", []
    while not data.endswith(b"\n"):
        part, fds, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        streams += fds
        if not part:
            break
        data += part
        if len(data) > REQUEST_LIMIT:
            raise ValueError("a request is too large")
    try:
        if data.endswith(b"\n") and len(streams) == 3:
            return as_here(json.loads(data)), [streams.pop(0) for _ in range(3)]
        return None, []
    finally:  # those that nobody takes
        for stream in streams:
            os.close(stream)


def fork_keeper(own: "list[Any]", connection: socket.socket, request: "Request", streams: "list[int]") -> None:
    parent = os.getpid()
    if os.fork() != 0:
        return
    try:
        for descriptor in own:
            descriptor.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        tie_to_parent(parent)
        keeper = os.getpid()
        try:
            rank = os.fork()
        except OSError as error:
            say(connection, not_forked(error))
            return
        if rank == 0:
            connection.close()
            tie_to_parent(keeper)
            run(request, streams)  # does not return
        keep(connection, rank, streams, int(request["env"].get("WINGBEAT_STACKS", "0").split(":")[0]))
    finally:
        os._exit(70)


def prctl(option: int, value: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def tie_to_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl, which will then never fire
        os.kill(os.getpid(), signal.SIGKILL)


def keep(connection: socket.socket, rank: int, streams: "list[int]", stacks_signal: int) -> "NoReturn":
    """Supervises a rank to its end, and ends with it. Everything that the rank starts stays below this process."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(rank)
    say(connection, {"pid": rank, "keeper": os.getpid()})
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(ended, select.POLLIN)
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    poll.register(read, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if ended in ready:
            break
        if read in ready:
            os.read(read, 4096)
            reap_all_but(rank)
        if connection.fileno() in ready:
            try:
                signals = connection.recv(64)
            except OSError:
                signals = b""
            if not signals:
                poll.unregister(connection)
                signals = bytes([signal.SIGKILL])
            for number in signals:  # the rank is not reaped yet, so that nobody else has its id
                if number == ASK_STACKS:
                    os.kill(rank, stacks_signal)
                else:
                    signal_group(rank, number)
    ended_us = time.time_ns() // 1_000
    signal_group(rank, signal.SIGKILL)
    _, status = os.waitpid(rank, 0)
    while True:
        left = children()
        if not left:
            break
        for child in left:
            try:
                os.kill(child, signal.SIGKILL)
            except PermissionError:
                pass  # another user's, by a program with that right: it is awaited
            os.waitpid(child, 0)
    try:
        say(connection, {"status": status, "ended_us": ended_us})
    except OSError:
        pass  # whoever asked is gone
    os._exit(0)


def reap_all_but(rank: int) -> None:
    """Reaps what others have left here: a process whose parent has ended becomes this one's child."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == rank:
            return
        os.waitpid(ended.si_pid, 0)


def signal_group(rank: int, number: int) -> None:
    try:
        os.killpg(rank, number)
    except ProcessLookupError:  # it has not come as far as to lead one
        os.kill(rank, number)


def children() -> "list[int]":
    """What is below this process; nothing else reaps it."""
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == own]


def parent_of(pid: int) -> "int | None":
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])  # a name may hold anything, but ends there
    except OSError:
        return None  # it has ended


def run(request: "Request", streams: "list[int]") -> None:
    """Makes this process a fresh one, as far as a script can see, and runs what was asked for."""
    import _rank_main

    try:
        renew(request, streams)
        sys.modules.pop("_rank_main", None)
        sys.argv = list(request["args"])
        code = _rank_main.run()
    except BaseException as error:
        _rank_main.show(error)
        code = 1
    _rank_main.leave(code)


def renew(request: "Request", streams: "list[int]") -> None:
    import time

    os.setsid()  # also for the scheduler, which shares CPUs between sessions before it does within them
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    time.tzset()
    renew_seeds()
    renew_multiprocessing(request["cwd"])
    renew_threads()
    show_as([sys.executable, *request["args"]])


def show_as(words: "list[str]") -> None:
    """Has `ps` show what the rank runs, as far as it fits in place of the warm Python's own command line."""
    import ctypes

    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
    if 0 < begin < end:
        text = b"\0".join(os.fsencode(word) for word in words)[: end - begin - 1]
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def renew_seeds() -> None:
    """As in new processes, no two ranks have the same. Python's own generator has been seeded again by the fork."""
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # torch.seed() would look for devices


def renew_multiprocessing(cwd: str) -> None:
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]  # where its children look for a relative `__main__`
        process.current_process().authkey = os.urandom(32)


def renew_threads() -> None:
    """The libraries have read how many threads they are to use in the parent, where nothing is set but OpenBLAS's."""
    openmp = count_of("OMP_NUM_THREADS", None)
    wanted = count_of("MKL_NUM_THREADS", openmp)
    torch = sys.modules.get("torch")
    if torch is not None and wanted is not None:
        torch.set_num_threads(wanted)
    set_openblas(count_of("OPENBLAS_NUM_THREADS", openmp) or len(os.sched_getaffinity(0)))


def count_of(variable: str, default: "int | None") -> "int | None":
    text = os.environ.get(variable, "").split(",")[0].strip()
    return int(text) if text.isdigit() and int(text) > 0 else default


def set_openblas(count: int) -> None:
    """Each of numpy and scipy brings an OpenBLAS of its own, with names of its own."""
    import ctypes

    with open("/proc/self/maps") as maps:
        paths = {line.split(None, 5)[-1].strip() for line in maps if "openblas" in line}
    for path in paths:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for prefix in ("", "scipy_"):
            for suffix in ("", "64_", "_64", "64"):
                function = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
                if function is not None:
                    function(count)


if __name__ == "__main__":
    main()
