"""What a rank actor runs: one Python script or module, as `python script.py args...` or
`python -m module args...` would run it.

    python -m wingbeat._rank_main script.py args...
    python -m wingbeat._rank_main -m module args...
    python path/to/_rank_main.py script.py args...
    python -c "<this file>" script.py args...

It adds to plain Python what a rank's supervisor needs:

- A script that raises leaves its traceback as JSON at TORCHELASTIC_ERROR_FILE, in torchelastic's
  format. A file that the script has written there itself (torchelastic's `@record`) stays.
- The process is killed when its rank actor ends. WINGBEAT_RANK_PARENT holds the actor's process id.
  What the script has started is not in its hands: the node's guard process ends that.
- It writes the stacks of all its threads to WINGBEAT_STACKS when the signal comes that this names.
- It exits with 1 after an exception, with what SystemExit says, and with 130 after
  KeyboardInterrupt, also where torch would abort while Python finalizes (see `leave`).

It imports the standard library alone, and late, since every cold start pays for it. `_warm` runs a forked rank
with it.
"""

import os
import sys
import time

TYPE_CHECKING = False  # as of `typing`, which takes long to import
if TYPE_CHECKING:
    from typing import NoReturn

PARENT = "WINGBEAT_RANK_PARENT"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
INTERRUPTED = 128 + 2  # what a shell calls SIGINT
STACKS = "WINGBEAT_STACKS"  # SIGNAL:PATH
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
SIGKILL = 9


def main() -> None:
    tie_to_parent()
    if len(sys.argv) < 2:
        sys.exit("usage: python -m wingbeat._rank_main (script.py | -m module) [argument ...]")
    del sys.argv[0]
    code = run()
    if "torch" not in sys.modules:
        sys.exit(code)
    leave(code)


def run() -> int:
    """Runs what sys.argv says, and answers with the exit code."""
    sys.orig_argv = [sys.executable, *(["-u"] if getattr(sys.stdout, "write_through", False) else []), *sys.argv]
    before = error_file_state()
    try:
        find_package()
        tell_stacks()
        if sys.argv[0] == "-m" and len(sys.argv) > 1:
            run_module_as_main(sys.argv.pop(1))
        else:
            run_as_main(sys.argv[0])
        code = 0
    except SystemExit as error:
        code = code_of(error)
    except KeyboardInterrupt as error:
        show(error)
        code = INTERRUPTED
    except BaseException as error:
        raised = time.time_ns()
        show(error)
        if error_file_state() == before:
            write_error_file(error, raised)
        code = 1
    return code


def find_package() -> None:
    """Lets the script import `wingbeat` from where this file is, unless another one is installed."""
    own = globals().get("__file__")
    if own is not None:
        root = os.path.dirname(os.path.dirname(os.path.abspath(own)))
        # The first is the script's folder, or is about to be.
        if root not in sys.path[0 if keeps_path() else 1 :]:
            sys.path.append(root)


def tell_stacks() -> None:
    """Makes a signal write the stacks of all threads, also while one is stuck outside of Python."""
    stacks = os.environ.pop(STACKS, None)
    if stacks is None:
        return
    import faulthandler

    number, path = stacks.split(":", 1)
    faulthandler.register(int(number), file=os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))


def tie_to_parent() -> None:
    """Has the kernel kill this process when the thread that spawned it ends."""
    parent = os.environ.pop(PARENT, None)  # or the script's own children would believe it of theirs
    if parent is None:
        return
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # it ended before prctl, which will then never fire
        os.kill(os.getpid(), SIGKILL)


def run_as_main(script: str) -> None:
    # Not runpy.run_path: it changes sys.argv[0] to the full path, and takes the module out of
    # sys.modules at the script's end, where its threads and exit handlers may still look for it.
    from importlib.machinery import SourceFileLoader
    from types import ModuleType

    path = os.path.join(os.getcwd(), script)  # and no more: what follows a link and .. is elsewhere
    if not keeps_path():
        # The script's folder, in place of what -m, -c or this file's own path has put there.
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    loader = SourceFileLoader("__main__", path)
    module = ModuleType("__main__")
    module.__file__ = path
    module.__cached__ = None  # type: ignore[attr-defined]
    module.__loader__ = loader
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def run_module_as_main(name: str) -> None:
    import runpy
    from types import ModuleType

    if not keeps_path():
        sys.path[0] = os.getcwd()
    # What `python -m` calls. It runs the module in the namespace of `__main__`, which must not be this one.
    sys.modules["__main__"] = ModuleType("__main__")
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def keeps_path() -> bool:
    """Whether Python was told to look in no folder of the script's."""
    return bool(sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def code_of(error: SystemExit) -> int:
    """The exit code that Python itself gives to a SystemExit."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def show(error: BaseException) -> None:
    """Prints the traceback as Python would, without this file's frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    error.__traceback__ = frames
    try:
        sys.stdout.flush()  # the traceback comes after what the script printed
    except Exception:
        pass  # `leave` tells
    try:
        sys.excepthook(type(error), error, frames)
    except BaseException:  # the script's own hook, and broken
        sys.__excepthook__(type(error), error, frames)


def error_file_state() -> "tuple[int, int, int] | None":
    """Changes when somebody writes the error file."""
    try:
        stat = os.stat(os.environ[ERROR_FILE])
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
    except (KeyError, OSError):
        return None


def write_error_file(error: BaseException, raised: int) -> None:
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        text = str(error)
    except Exception:
        text = "<its str() raised>"
    message = f"{kind.__name__}: {text}"
    try:
        import traceback

        stack = "".join(traceback.format_exception(kind, error, error.__traceback__))
    except Exception:  # the script has a module that is called as one of the standard library
        stack = message
    extra = f'{{"py_callstack": {quoted(stack)}, "timestamp": "{raised // 1_000_000_000}"}}'
    report = f'{{"message": {{"message": {quoted(message)}, "extraInfo": {extra}}}, '
    report += f'"type": {quoted(name)}, "raised_us": {raised // 1_000}}}'
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "w", encoding="ascii") as file:
            file.write(report)
    except OSError as problem:
        print(f"wingbeat: cannot write {ERROR_FILE}: {problem}", file=sys.stderr)


def quoted(text: str) -> str:
    """A string as JSON has it. Not by the module `json`, of which the script may have one of its own."""
    escaped = {unit: f"\\u{unit:04x}" for unit in [*range(0x20), ord('"'), ord("\\"), 0x7F]}
    if not text.isascii():
        utf16 = text.encode("utf-16-be", "surrogatepass")
        # Half a pair, as of a name that is not UTF-8, is nothing that JSON may have.
        utf16 = utf16.decode("utf-16-be", "replace").encode("utf-16-be")
        units = [utf16[at] << 8 | utf16[at + 1] for at in range(0, len(utf16), 2)]
        escaped.update((unit, f"\\u{unit:04x}") for unit in units if unit > 0x7F)
        text = "".join(map(chr, units))
    return f'"{text.translate(escaped)}"'


def leave(code: int) -> "NoReturn":
    """Ends the process as Python would: waits for threads, runs exit handlers, flushes; but before Python finalizes.

    A gloo thread that lets go of the last collective's tensor asks for the interpreter, and if that is finalizing the
    process aborts: a finished rank then looks crashed (pytorch/pytorch#190489). And a forked process would go on in
    what called it.
    """
    import atexit
    import threading

    keep_kernels()
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException as error:
            show(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            code = code or 120  # as Python
    os._exit(code)


def keep_kernels() -> None:
    """Has torch not take back the operators that it has registered in this process, which ends anyway.

    It takes longer than all else at the end of a rank, and in a fork it writes to what is shared with the others.
    """
    try:
        import weakref

        taken_back = sys.modules["torch.library"]._del_library
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            told = finalizer.peek()
            if told is not None and told[1] is taken_back:
                finalizer.atexit = False
    except Exception:
        pass  # of another torch or Python: then they are taken back


if __name__ == "__main__":
    main()
