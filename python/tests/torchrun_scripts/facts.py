"""Reports what a script can see of how it was started."""

import sys

_modules = set(sys.modules)
_names = set(globals())

import ctypes
import faulthandler
import gc
import os
import resource
import signal
import stat
import tempfile
import threading

import tell


def kind(descriptor):
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return "closed"
    if os.isatty(descriptor):
        return "terminal"
    if stat.S_ISFIFO(mode):
        return "pipe"
    if stat.S_ISCHR(mode):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return "file" if stat.S_ISREG(mode) else "socket" if stat.S_ISSOCK(mode) else "other"


def status(name):
    with open("/proc/self/status") as file:
        return next(line.split(None, 1)[1].strip() for line in file if line.startswith(name + ":"))


def signals(mask):
    # The C library has 32 and 33 to itself.
    number = int(status(mask), 16)
    return [signal.Signals(bit + 1).name if bit < 31 else str(bit + 1) for bit in range(64) if number >> bit & 1 and bit not in (31, 32)]


def words(path):
    with open(path, "rb") as file:
        return os.fsdecode(file.read()).rstrip("\0").split("\0")


def first_line(path):
    with open(path) as file:
        return file.readline().strip()


def has_terminal():
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
        return True
    except OSError:
        return False


def depth():
    frame, count = sys._getframe(), 0
    while frame.f_back is not None:
        frame, count = frame.f_back, count + 1
    return count


def death_signal():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))
    return number.value


def stream(one):
    if one is None:
        return None
    return [type(one).__name__, one.encoding, one.errors, one.line_buffering, one.write_through, one.isatty()]


def facts():
    main = sys.modules["__main__"]
    spec = main.__spec__
    mask = os.umask(0)
    os.umask(mask)
    # Of those that another started, the child's own files are open as well.
    others = [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2 and kind(number) != "closed"]
    others = [os.readlink(f"/proc/self/fd/{number}").split(":")[0] for number in others]
    told = {
        "sys.argv": sys.argv,
        "sys.orig_argv": sys.orig_argv,
        "command line": words("/proc/self/cmdline"),
        "process name": first_line("/proc/self/comm"),
        "sys.executable": sys.executable,
        "sys.path": sys.path,
        "sys.flags": {name: getattr(sys.flags, name) for name in dir(sys.flags) if isinstance(getattr(sys.flags, name), int)},
        "sys.warnoptions": sys.warnoptions,
        "sys._xoptions": sys._xoptions,
        "imported before": sorted({name.split(".")[0] for name in _modules}),
        "__main__ is the script": main.__dict__ is globals(),
        "names in __main__": sorted(_names),
        "__name__": __name__,
        "__file__": __file__,
        "__package__": __package__,
        "__spec__": spec and [spec.name, spec.origin],
        "__loader__": type(__loader__).__name__,
        "frames below": depth(),
        "recursion limit": sys.getrecursionlimit(),
        "hooks": [
            sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__,
            sys.breakpointhook is sys.__breakpointhook__, sys.unraisablehook is sys.__unraisablehook__,
            sys.gettrace() is None, sys.getprofile() is None,
        ],
        "fault handler": faulthandler.is_enabled(),
        "garbage collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0],
        "threads": [threading.active_count(), threading.current_thread() is threading.main_thread()],
        "working directory": os.getcwd(),
        "temporary folder": tempfile.gettempdir(),
        "umask": oct(mask),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")},
        "niceness": os.nice(0),
        "CPUs": sorted(os.sched_getaffinity(0)),
        "out-of-memory score": first_line("/proc/self/oom_score_adj"),
        "no new privileges": status("NoNewPrivs"),
        "capabilities": status("CapEff"),
        "signals ignored": signals("SigIgn"),
        "signals blocked": signals("SigBlk"),
        "signals caught": signals("SigCgt"),
        "signal at the parent's end": death_signal(),
        "leads a session": os.getsid(0) == os.getpid(),
        "leads a process group": os.getpgid(0) == os.getpid(),
        "controlling terminal": has_terminal(),
        "stdin": kind(0),
        "stdout": kind(1),
        "stderr": kind(2),
        "open besides": sorted(name for name in others if not name.startswith("/proc")),
        "sys.stdin": stream(sys.stdin),
        "sys.stdout": stream(sys.stdout),
        "sys.stderr": stream(sys.stderr),
        "file system encoding": [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
    }
    for name, value in os.environ.items():
        told["env " + name] = value
    return told


if __name__ == "__main__":
    tell.tell(facts=facts())
