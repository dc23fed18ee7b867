"""`_rank_main` in each of the ways a rank actor may run it, beside what Python itself does."""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest
from conftest import DEADLINE_SECONDS, PACKAGE

FILE = PACKAGE / "wingbeat" / "_rank_main.py"
PYTHON = [sys.executable]
STARTS = {
    "module": [*PYTHON, "-m", "wingbeat._rank_main"],
    "file": [*PYTHON, str(FILE)],
    "text": [*PYTHON, "-c", FILE.read_text(encoding="utf-8")],
}


@pytest.fixture(params=STARTS.values(), ids=STARTS.keys())
def start(request):
    return request.param


@pytest.fixture
def error_file(tmp_path):
    return tmp_path / "errors" / "error.json"


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "scripts" / "script.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def environment(**more):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TORCHELASTIC"))}
    return {**inherited, "PYTHONPATH": str(PACKAGE), **more}


def run(command, *arguments, cwd=None, **env):
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=cwd,
        env=environment(**{key: str(value) for key, value in env.items()}),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )


def test_a_script_cannot_tell_it_from_python(start, script, tmp_path):
    path = script(
        """
        import json, pickle, sys, __main__
        class Mine: pass
        pickle.dumps(Mine())
        import beside
        print(json.dumps([
            __name__, __file__, __package__, __spec__, sys.argv, sys.path, beside.__file__,
            sorted(set(globals()) - {"__annotations__"}), __main__.Mine is Mine,
            type(__loader__).__name__, __builtins__ is sys.modules["builtins"],
        ]))
        """
    )
    path.with_name("beside.py").touch()
    relative = path.relative_to(tmp_path)
    arguments = [relative, "--flag", "a b", "-m", "--"]
    expected = run(PYTHON, *arguments, cwd=tmp_path)
    actual = run(start, *arguments, cwd=tmp_path)
    assert expected.returncode == 0, expected.stderr
    assert (actual.returncode, actual.stderr) == (0, "")
    assert json.loads(actual.stdout) == json.loads(expected.stdout)


def test_a_linked_script_imports_from_beside_its_target(start, script, tmp_path):
    path = script("import beside")
    path.with_name("beside.py").touch()
    link = tmp_path / "link.py"
    link.symlink_to(path)
    assert run(start, link).returncode == 0


def test_safe_path_puts_no_folder_first(script):
    path = script("import json, sys; print(json.dumps(sys.path))")
    expected = run([*PYTHON, "-I"], path)
    actual = run([*PYTHON, "-I", str(FILE)], path)
    # `wingbeat` itself is found, after everything else.
    assert json.loads(actual.stdout) == [*json.loads(expected.stdout), str(PACKAGE)]


def test_an_exception_prints_pythons_traceback_and_leaves_it_as_json(start, script, error_file):
    path = script(
        """
        import os
        class Spill(ValueError): pass
        def pour(): raise Spill("zu voll: ü")
        try:
            {}["cup"]
        except KeyError:
            pour()
        """
    )
    expected = run(PYTHON, path)
    actual = run(start, path, TORCHELASTIC_ERROR_FILE=error_file)
    assert (actual.returncode, actual.stderr) == (1, expected.stderr)
    report = json.loads(error_file.read_text(encoding="utf-8"))
    assert report["type"] == "Spill"
    assert report["message"]["message"] == "Spill: zu voll: ü"
    extra = report["message"]["extraInfo"]
    assert extra["py_callstack"] == expected.stderr
    assert int(extra["timestamp"]) > 0
    assert os.listdir(error_file.parent) == [error_file.name]


def test_a_module_cannot_tell_it_from_python_m(start, tmp_path, error_file):
    package = tmp_path / "pouring"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "cup.py").write_text("SIZE = 3")
    (package / "fill.py").write_text(
        "import sys\n"
        "from . import cup\n"
        "print(__name__, __spec__.name, sys.argv[1:], cup.SIZE, sys.path[0], sys.modules['__main__'].cup is cup)\n"
        "if sys.argv[1] == 'spill': raise ValueError('too full')\n"
    )
    for argument, code in [("well", 0), ("spill", 1)]:
        expected = run(PYTHON, "-m", "pouring.fill", argument, cwd=tmp_path)
        actual = run(start, "-m", "pouring.fill", argument, cwd=tmp_path, TORCHELASTIC_ERROR_FILE=error_file)
        assert (actual.returncode, actual.stdout, actual.stderr) == (code, expected.stdout, expected.stderr)
    assert json.loads(error_file.read_text(encoding="utf-8"))["type"] == "ValueError"


def test_a_missing_module_is_named(start, tmp_path):
    actual = run(start, "-m", "no.such.module", cwd=tmp_path)
    assert actual.returncode == 1
    assert "No module named" in actual.stderr and "no" in actual.stderr


def test_the_type_is_named_with_its_module(script, error_file):
    run(STARTS["file"], script("import json; json.loads('{')"), TORCHELASTIC_ERROR_FILE=error_file)
    assert json.loads(error_file.read_text())["type"] == "json.decoder.JSONDecodeError"


def test_torchelastic_reads_the_error_file(script, error_file):
    api = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    run(STARTS["file"], script("raise OSError('no')"), TORCHELASTIC_ERROR_FILE=error_file)
    failure = api.ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(error_file))
    assert failure.message["message"] == "OSError: no"
    assert failure.timestamp > 0


def test_a_syntax_error_looks_as_in_python(start, script, error_file):
    path = script("def broken(:")
    actual = run(start, path, TORCHELASTIC_ERROR_FILE=error_file)
    assert (actual.returncode, actual.stderr) == (1, run(PYTHON, path).stderr)
    assert json.loads(error_file.read_text())["type"] == "SyntaxError"


def test_a_missing_script_is_named(start, tmp_path, error_file):
    actual = run(start, tmp_path / "nowhere.py", TORCHELASTIC_ERROR_FILE=error_file)
    assert actual.returncode == 1
    assert "nowhere.py" in actual.stderr
    assert json.loads(error_file.read_text())["type"] == "FileNotFoundError"


def test_an_error_file_of_the_scripts_own_stays(script, error_file):
    path = script(
        """
        import os, pathlib
        pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text("mine")
        raise ValueError
        """
    )
    error_file.parent.mkdir()
    error_file.write_text("from the attempt before")
    assert run(STARTS["file"], path, TORCHELASTIC_ERROR_FILE=error_file).returncode == 1
    assert error_file.read_text() == "mine"


def test_an_error_file_from_before_is_replaced(script, error_file):
    error_file.parent.mkdir()
    error_file.write_text("from the attempt before")
    run(STARTS["file"], script("raise ValueError"), TORCHELASTIC_ERROR_FILE=error_file)
    assert json.loads(error_file.read_text())["type"] == "ValueError"


def test_an_unwritable_error_file_is_said_and_changes_no_code(script):
    path = script("raise ValueError")
    actual = run(STARTS["file"], path, TORCHELASTIC_ERROR_FILE="/dev/null/error.json")
    assert actual.returncode == 1
    assert "ValueError" in actual.stderr
    assert "cannot write TORCHELASTIC_ERROR_FILE" in actual.stderr


@pytest.mark.parametrize("torch", ["", "import sys; sys.modules['torch'] = sys\n"], ids=["", "torch"])
@pytest.mark.parametrize(
    ("ending", "code", "stderr"),
    [
        ("", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(0)", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit(True)", 1, ""),
        ("raise SystemExit(-1)", 255, ""),
        ("raise SystemExit('told why')", 1, "told why\n"),
        ("import os; os._exit(9)", 9, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_exit_codes_are_pythons(script, error_file, torch, ending, code, stderr):
    path = script(torch + ending)
    expected = run(PYTHON, path)
    actual = run(STARTS["file"], path, TORCHELASTIC_ERROR_FILE=error_file)
    assert (expected.returncode, expected.stderr) == (code, stderr)
    assert (actual.returncode, actual.stderr) == (code, stderr)
    assert not error_file.exists()


def test_an_interrupt_exits_with_130(script, error_file):
    path = script("import signal; signal.raise_signal(signal.SIGINT)")
    actual = run(STARTS["file"], path, TORCHELASTIC_ERROR_FILE=error_file)
    assert actual.returncode == 130
    assert "KeyboardInterrupt" in actual.stderr
    assert not error_file.exists()


@pytest.mark.parametrize("torch", ["", "sys.modules['torch'] = sys"], ids=["", "torch"])
def test_threads_are_awaited_then_exit_handlers_run_then_output_is_flushed(script, torch):
    path = script(
        f"""
        import atexit, sys, threading
        {torch}
        atexit.register(lambda: print("handler", sys.modules["__main__"].__file__ == __file__))
        threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
        print("script")
        """
    )
    actual = run(STARTS["file"], path)
    assert (actual.stdout, actual.returncode) == ("script\nthread\nhandler True\n", 0)


def test_with_torch_python_is_not_finalized(script):
    # What torch's threads would trip over: the last object of the interpreter to be let go of.
    path = script(
        """
        import os, sys
        class Last:
            def __del__(self, exit=os._exit): exit(99)
        last = Last()
        sys.modules["torch"] = sys
        """
    )
    assert run(PYTHON, path).returncode == 99
    assert run(STARTS["file"], path).returncode == 0


def test_torchs_operators_are_not_taken_back_at_the_end_and_other_finalizers_run(script):
    path = script("""
        import atexit
        atexit.register(lambda: print("alive:", sum(one.alive for one in theirs) == len(theirs) > 100, flush=True))  # the last
        import torch, weakref

        class Mine:
            pass

        theirs = [one for one in weakref.finalize._registry if one.peek()[1] is torch.library._del_library]
        mine = Mine()
        weakref.finalize(mine, print, "mine")
    """)
    done = run(STARTS["file"], path)
    assert (done.returncode, done.stdout) == (0, "mine\nalive: True\n"), done.stderr


def test_no_script_says_how_to_use_it(start):
    actual = run(start)
    assert actual.returncode == 1
    assert actual.stderr.startswith("usage: ")


def test_it_imports_nothing_heavy(script):
    path = script("import sys; print(*sys.modules)")
    with_it = set(run(STARTS["file"], path, WINGBEAT_RANK_PARENT=os.getpid()).stdout.split())
    without = set(run(PYTHON, path).stdout.split())
    heavy = {name.partition(".")[0] for name in with_it - without}
    assert heavy <= {"ctypes", "_ctypes", "struct", "_struct", "types", "importlib", "_weakref", "warnings"}


def test_a_rank_whose_parent_is_gone_never_starts(start, script, tmp_path):
    ran = tmp_path / "ran"
    path = script(f"open({str(ran)!r}, 'w')")
    not_its_parent = 1
    actual = run(start, path, WINGBEAT_RANK_PARENT=not_its_parent)
    assert actual.returncode == -signal.SIGKILL
    assert not ran.exists()


def test_the_scripts_children_do_not_inherit_the_parent(script):
    path = script("import os; print('WINGBEAT_RANK_PARENT' in os.environ)")
    assert run(STARTS["file"], path, WINGBEAT_RANK_PARENT=os.getpid()).stdout == "False\n"


def test_a_rank_dies_with_its_parent(start, script):
    path = script(
        """
        import os, signal
        print(os.getpid(), flush=True)
        while True:
            signal.pause()
        """
    )
    # The parent hands its stdout to the rank: the pipe ends when both are gone.
    parent = subprocess.Popen(
        [*PYTHON, "-c", PARENT_OF_A_RANK, *start, str(path)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        rank = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            assert select.select([rank], [], [], DEADLINE_SECONDS)[0], "the rank outlived its parent"
            assert parent.stdout.read() == ""
        finally:
            os.close(rank)


PARENT_OF_A_RANK = """
import os, subprocess, sys
subprocess.run(sys.argv[1:], env={**os.environ, "WINGBEAT_RANK_PARENT": str(os.getpid())})
"""
