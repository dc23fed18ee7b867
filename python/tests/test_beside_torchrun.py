"""Small scripts under torchrun and under `wingbeat torchrun`, and what differs.

What torchrun does is recorded in beside_torchrun.json, with the version of torch. A test runs each script with `wingbeat
torchrun` alone and compares. `docs/torchrun.md` is the table that this makes; it is checked, too.

    WINGBEAT_RECORD_TORCHRUN=1 pytest tests/test_beside_torchrun.py        runs torchrun as well, writes the recording and the table
    WINGBEAT_WRITE_TORCHRUN_TABLE=1 pytest tests/test_beside_torchrun.py   writes the table

To try a script by hand: TELL=FOLDER wingbeat torchrun --cold python/tests/torchrun_scripts/prints.py
"""

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
from beside_torchrun import PYTHON, Case, Launch
from conftest import PACKAGE, free_port

RECORDING = Path(__file__).resolve().with_name("beside_torchrun.json")
TABLE = PACKAGE.parent / "docs/torchrun.md"
RECORDS = os.environ.get("WINGBEAT_RECORD_TORCHRUN") == "1"
WRITES = RECORDS or os.environ.get("WINGBEAT_WRITE_TORCHRUN_TABLE") == "1"
TORCHRUN = Path(PYTHON).with_name("torchrun")


def case(name, tries, command, *options, **more):
    return Case(name, tries, tuple(command.split() if isinstance(command, str) else command), options, **more)


def facts(name, tries, command="facts.py", *options, **more):
    return case(name, tries, command, *options, plain=True, **more)


LOGS = ("--log-dir", "DIR/logs", "--rdzv-id", "job")
CASES = [
    # What a script sees of its start.
    facts("facts", "What a script sees of its process", "facts.py a --b", forked=True),
    facts("facts-2", "The same of two ranks, with a role, an id and restarts", "facts.py", "--role", "trainer", "--rdzv-id", "job",
          "--max-restarts", "3", ranks=2, forked=True),
    facts("standalone", "`--standalone`", "facts.py", "--standalone"),
    case("run-path", "`--run-path`", "DIR/prints.py a", "--run-path"),
    facts("relative", "A relative path through a folder with a space", ["sub/../a folder/facts.py"]),
    facts("link", "A symbolic link to a script in another folder", "link/facts.py"),
    facts("inherits", "umask 027, 256 open files, no core dumps, niceness 5, CPU 0, SIGUSR1 blocked, SIGUSR2 and SIGHUP ignored, a "
          "pipe open", starts="odd"),
    facts("variables", "HOME unset, an empty variable, one that is not UTF-8, PYTHONPATH, PYTHONWARNINGS, PYTHONOPTIMIZE", env=(
        ("HOME", None), ("EMPTY", ""), ("BYTES", os.fsdecode(b"\xff\xfe")), ("PYTHONPATH", "DIR/pack"),
        ("PYTHONWARNINGS", "error"), ("PYTHONOPTIMIZE", "1"))),
    case("module", "`-m` and a module", "as_module -m x --y", "-m", forked=True),
    case("package", "`-m` and a package, which imports from itself", "pack a", "-m"),
    case("program", "`--no-python` and a shell script", ["./program.sh", "a b", ""], "--no-python", ranks=2),
    facts("arguments", "Empty arguments, spaces, no ASCII, and what looks like a flag",
          ["facts.py", "", "a b", "ü日本", "--", "-m", "--nproc-per-node", "*", "a\nb", ""]),
    facts("bytes-argument", "An argument that is not UTF-8", ["facts.py", os.fsdecode(b"\xff\xfe")]),
    # What it reads.
    case("stdin-pipe", "Reads a pipe to its end", "reads.py", stdin=b"one\ntwo, without its end", forked=True),
    case("stdin-file", "Reads a file to its end", "reads.py", stdin="file"),
    case("stdin-null", "Reads /dev/null", "reads.py"),
    case("stdin-closed", "Reads where nothing is open", "reads.py", stdin="closed"),
    case("debugger", "`input()` and `breakpoint()`, with answers in a pipe", "asks.py", stdin=b"Ada\np name\nc\n", forked=True),
    facts("stdin-2", "What two ranks have for a standard input", "facts.py", ranks=2, stdin=b"x\n"),
    facts("terminal", "At a terminal", "facts.py", stdin="terminal"),
    # What it prints.
    case("prints", "Prints on both streams, with a warning and a system call", "prints.py", forked=True),
    case("prints-2", "The same of two ranks", "prints.py", ranks=2),
    case("large", "Prints 100 MB", "large.py", forked=True),
    case("bar", "A bar that is drawn over itself", "bar.py", forked=True),
    case("octets", "Bytes that are not UTF-8, a zero, colours", "octets.py", forked=True),
    case("no-end", "A last line without its end", "no_end.py"),
    case("unflushed", "Ends at once, without a flush", "unflushed.py", forked=True),
    case("closes", "Closes its output", "closes.py", forked=True),
    case("unread", "The reader of its output leaves after a line", "unread.py", leaves=True),
    # Where that goes.
    case("redirects", "`--redirects 3` of two ranks", "prints.py", *LOGS, "--redirects", "3", ranks=2),
    case("silent", "`--redirects 3` of a script that prints nothing", "silent.py", *LOGS, "--redirects", "3"),
    case("tee", "`--tee 3` of two ranks", "prints.py", *LOGS, "--tee", "3", ranks=2, forked=True),
    case("mixed", "`-r 0:1,1:3 -t 0:2`", "prints.py", *LOGS, "-r", "0:1,1:3", "-t", "0:2", ranks=2),
    case("tee-bar", "`--tee 3` of a bar, drawn at once", "bar.py at-once", *LOGS, "--tee", "3"),
    case("tee-octets", "`--tee 3` of bytes that are not UTF-8", "octets.py", *LOGS, "--tee", "3"),
    case("tee-no-end", "`--tee 3` of a line without its end", "no_end.py", *LOGS, "--tee", "3"),
    case("filter", "`--local-ranks-filter 1`, with `--tee 3`", "prints.py", *LOGS, "--tee", "3", "--local-ranks-filter", "1", ranks=2),
    case("template", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, with `--tee 3`", "prints.py", *LOGS, "--tee", "3", "--role", "trainer",
         ranks=2, env=(("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${role_name} ${rank} ${local_rank}> "),)),
    case("temporary", "`--redirects 3` without `--log-dir`", "prints.py", "--redirects", "3"),
    # How it ends.
    case("fails", "Raises at once, from another exception", "fails.py", forked=True),
    case("no-syntax", "Is no Python", "no_syntax.py", forked=True),
    case("no-module", "Imports what is not there", "no_module.py"),
    case("no-script", "Is not there itself", "no_such_script.py"),
    case("fails-late", "Rank 1 fails late, and rank 0 saves on SIGTERM", "fails_late.py", ranks=2, forked=True),
    case("early", "Rank 0 is done long before rank 1", "early.py", ranks=2),
    case("exit-0", "`sys.exit(0)`", "exits.py 0"),
    case("exit-3", "`sys.exit(3)`", "exits.py 3", forked=True),
    case("exit-256", "`sys.exit(256)`, of which the kernel keeps 0", "exits.py 256"),
    case("exit-text", "`sys.exit(\"the reason\")`", "exits.py text", forked=True),
    case("_exit", "`os._exit(7)`", "exits.py _exit 7"),
    case("sigkill", "Kills itself", "exits.py signal SIGKILL", forked=True),
    case("sigterm-self", "Ends itself by SIGTERM", "exits.py signal SIGTERM"),
    case("sigabrt", "Aborts", "exits.py signal SIGABRT", starts="no core"),
    case("interrupt", "Raises KeyboardInterrupt", "exits.py interrupt", forked=True),
    case("at-exit", "A thread and an exit handler outlive its last line", "at_exit.py", forked=True),
    case("restarts", "`--max-restarts 1`: rank 1 fails the first time", "second_try.py", "--max-restarts", "1", *LOGS,
         "--redirects", "3", ranks=2, forked=True),
    case("no-restart", "The same without a restart", "second_try.py", ranks=2),
    # Signals to the launcher.
    case("sigterm", "SIGTERM to the launcher: ranks save", "handles.py", ranks=2, signal="SIGTERM", forked=True),
    case("sigint", "SIGINT to the launcher: ranks save", "handles.py", ranks=2, signal="SIGINT", forked=True),
    case("sighup", "SIGHUP to the launcher: ranks save", "handles.py", ranks=2, signal="SIGHUP"),
    case("sigquit", "SIGQUIT to the launcher: ranks save", "handles.py", signal="SIGQUIT"),
    case("sigterm-plain", "SIGTERM to the launcher: a rank has no handler", "waits.py", signal="SIGTERM"),
    case("sigint-plain", "SIGINT to the launcher: a rank has no handler", "waits.py", signal="SIGINT", forked=True),
    case("ignores", "SIGTERM to the launcher: a rank ignores it", "ignores.py", signal="SIGTERM"),
    case("sigusr1", "SIGUSR1 to the launcher, which passes it on only if told to", "handles.py", signal="SIGUSR1"),
    case("nohup", "SIGHUP to the launcher, which was to ignore it, and then SIGTERM", "handles.py", signal="SIGHUP SIGTERM",
         starts="nohup"),
    case("killed", "SIGKILL to the launcher", "waits.py", signal="SIGKILL"),
    # Children.
    case("forks", "Forks a child", "forks.py", forked=True),
    case("spawns", "Pools of multiprocessing: fork, spawn, forkserver", "spawns.py", forked=True),
    case("daemon", "Leaves a process in a session of its own", "leaves.py daemon", forked=True),
    case("background", "Leaves a process in the rank's session", "leaves.py background"),
    case("late-child", "Leaves a child that prints after the rank's end", "late_child.py", ends_late=True),
    # Error files.
    case("record", "torch's `@record`", "records.py", *LOGS, "--redirects", "3"),
    case("error-file", "Writes the error file itself; the launcher has one, too", "error_file.py",
         env=(("TORCHELASTIC_ERROR_FILE", "DIR/error-of-launcher.json"),)),
]
NAMES = [one.name for one in CASES]

# Differences that are meant: case, property, why. Regular expressions, which match the whole.
DELIBERATE = [
    (".*", r"rank \d: (sys.orig_argv|command line|frames below|imported before)",
     "A script is run by Wingbeat's runner, not by `python -u`; forked ranks have `python SCRIPT` for a command line."),
    (".*", r"rank \d: env (NODE_RANK|WINGBEAT_\w+)", "Variables of Wingbeat's own; NODE_RANK is what some programs ask for."),
    (".*", r"rank \d: env CUDA_VISIBLE_DEVICES", "A rank that has no GPU of its own is told that it sees none."),
    (".*", r"rank \d: env TORCHELASTIC_USE_AGENT_STORE", "Rank 0 hosts the store of `init_process_group`: there is no agent that would."),
    ("standalone", "rank 0: env MASTER_ADDR", "Another name of the same address."),
    (".*", r"rank \d: env TORCHELASTIC_RUN_ID", "Without `--rdzv-id`, each run has an id of its own."),
    (".*", r"rank \d: env TORCHELASTIC_ERROR_FILE", "The error file is in memory, and is copied to the folder of logs if there is one."),
    (".*", r"rank \d: open besides", "The error file, which is in memory."),
    (".*", r"rank \d: signal at the parent's end", "The kernel kills a rank whose launcher is gone."),
    (".*", r"rank \d: signals caught", "Signal 61 writes the stacks of all threads, when a rank hangs."),
    (".*", r"rank \d: sys.path", "The last folder of `sys.path` has the module `wingbeat`, for scripts that import it."),
    (".*", r"rank \d: garbage collector", "What a forked rank's parent has imported is frozen, so that the pages stay shared."),
    ("(?!temporary).*", "left in HOME", "The Python files that ranks need are unpacked into `~/.cache/wingbeat` once."),
    ("variables", "left in TMPDIR", "They are unpacked there when HOME is unset."),
    ("temporary", "left in (HOME|TMPDIR)", "Without `--log-dir`, logs are in the user's state folder, which outlives a cleaning of `/tmp`."),
    ("error-file", "left in TMPDIR", "torchrun leaves an error file behind."),
    ("run-path", "stdout", "`--run-path` runs a script as without it; torchrun runs it in a child of multiprocessing, which holds lines back."),
    ("inherits", "rank 0: signals blocked", "A rank begins with no signal blocked."),
    ("bytes-argument", ".*", "Arguments are UTF-8."),
    ("inherits", "rank 0: signals ignored", "A SIGHUP that the launcher was to ignore is ignored in ranks, too."),
    ("unflushed", "stderr", "What the launcher says begins on a line of its own."),
    ("nohup", ".*", "A SIGHUP that the launcher was to ignore, as under `nohup`, ends nothing."),
    ("stdin-closed", "rank 0: told", "Where no standard input is open, ranks have /dev/null."),
    ("stdin-2", "rank 1: stdin", "Only rank 0 reads the launcher's standard input: two readers would take it from each other."),
    ("terminal", r"rank 0: (sys\.)?(stdout|stderr)", "Ranks print into pipes, so that lines of several ranks stay whole."),
    ("unread", "exit code|rank 0: told", "Training goes on when nobody reads its output any more."),
    ("tee-(bar|octets)", "stdout|stderr", "With `--tee`, of what is drawn over itself with `\\r` the last state is a line; torchrun makes a line of each."),
    ("tee-no-end", "stdout|stderr", "With `--tee`, each line has an end, so that the next rank's begins at the left."),
    ("no-script", "stderr", "The launcher says that the script is not there."),
    ("killed|sigusr1|daemon|background", "lives on", "What a rank has started ends with it, and a rank with its launcher."),
    ("late-child", "stdout", "What a rank has started ends with it."),
]


def why_meant(name, key):
    """The number of the first reason for which this may differ."""
    return next((at for at, (case, key_, _) in enumerate(DELIBERATE) if re.fullmatch(case, name) and re.fullmatch(key_, key)), None)


def difference(theirs, ours):
    """What differs between two launches: by property, both values. None is for what is not there."""
    keys = [key for key in {**theirs, **ours} if key in ours or not key.startswith("left in")]
    return {key: (theirs.get(key), ours.get(key)) for key in keys if theirs.get(key) != ours.get(key)}


@pytest.fixture(scope="module")
def launches(binary, cluster, tmp_path_factory):
    """All launches, as futures by how they start and the case's name. Most wait, so that two cores do for several."""
    env = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    ours = {**env, "WINGBEAT_BIN": binary, "WINGBEAT_PYTHON": PYTHON}
    on_cluster = {**ours, **{name: cluster[name] for name in ("WINGBEAT_ADDRESS", "WINGBEAT_TOKEN_FILE")}}
    ways = {"new": ([binary, "torchrun", "--cold"], ours), "forked": ([binary, "torchrun"], on_cluster)}
    if RECORDS:
        ways["torchrun"] = ([TORCHRUN], env)

    folders = tmp_path_factory.mktemp("shared")

    def launch(way, case):
        launcher, env = ways[way]
        # Several torchruns would all listen at 29500.
        launcher = [*launcher, "--master-port", free_port()] if way == "torchrun" else launcher
        # With another HOME or TMPDIR, ranks would be forked from another Python.
        shared = folders if way == "forked" else None
        return Launch(case, launcher, env, tmp_path_factory.mktemp(f"{way}-{case.name}"), shared).run()

    slow = [case for case in CASES if case.name == "ignores"]
    with ThreadPoolExecutor(len(slow) * len(ways)) as waiting, ThreadPoolExecutor(3) as pool:
        futures = {}
        for way in ways:
            for case in CASES:
                if way != "forked" or case.forked:
                    futures[way, case.name] = (waiting if case in slow else pool).submit(launch, way, case)
        yield futures


@pytest.fixture(scope="module")
def recording(launches):
    """What torchrun does: by case, by property."""
    if not RECORDS:
        return json.loads(RECORDING.read_text())
    cases = {case.name: launches["torchrun", case.name].result() for case in CASES}
    told = {"torch": version("torch"), "python": "%d.%d" % sys.version_info[:2], "cases": cases}
    RECORDING.write_text(json.dumps(told, indent=1) + "\n")
    return json.loads(RECORDING.read_text())


@pytest.fixture(scope="module")
def differences(launches, recording):
    """By way and case."""
    theirs = recording["cases"]
    return {
        (way, name): difference(theirs[name], json.loads(json.dumps(future.result())))
        for (way, name), future in launches.items()
        if way != "torchrun"
    }


@pytest.mark.parametrize("way, name", [("new", case.name) for case in CASES] + [("forked", case.name) for case in CASES if case.forked])
def test_a_script_cannot_tell_it_from_torchrun(way, name, launches, recording):
    found = difference(recording["cases"][name], json.loads(json.dumps(launches[way, name].result())))
    unmeant = {key: values for key, values in found.items() if why_meant(name, key) is None}
    text = "\n".join(f"{key}\n    torchrun  {theirs!r}\n    wingbeat  {ours!r}" for key, (theirs, ours) in unmeant.items())
    assert not unmeant, f"{name}, {way}:\n{text}"


def test_every_deliberate_difference_is_one(differences):
    used = {why_meant(name, key) for (_, name), found in differences.items() for key in found}
    assert [DELIBERATE[at] for at in range(len(DELIBERATE)) if at not in used] == []


def test_the_table_is_what_was_found(recording, differences):
    table = "".join(line + "\n" for line in lines_of_table(recording, differences))
    if WRITES:
        TABLE.write_text(table)
    assert TABLE.read_text() == table, "WINGBEAT_WRITE_TORCHRUN_TABLE=1 writes it"


# In a cell; the tests show all.
MOST_SHOWN = 12

HEAD = """# torchrun and `wingbeat torchrun`

`python/tests/test_beside_torchrun.py` writes this table and checks it: {scripts} small scripts (`python/tests/torchrun_scripts`), each run
with `wingbeat torchrun` and compared with a recording of torchrun (torch {torch}, Python {python}). {forked} of them are also run
with forked ranks, on a cluster of one node; the others start new Pythons (`--cold`).

Compared are: the launcher's exit code; every byte of stdout and stderr (with two ranks, the set of lines); what a script sees of
its process, where Python alone would show something else; the names and contents of log files and error files; what is left in
TMPDIR and HOME; and which processes live on when the launcher has ended. The launcher's own messages are not compared. Ports, ids, process
ids, times and folders are replaced by words (`DIR` is the working directory).

The fourth column has what differs, and the last one the number of the reason, below. What differs for every script is only there."""


def lines_of_table(recording, differences):
    forked = sum(case.forked for case in CASES)
    numbers = {"scripts": len(CASES), "forked": forked, "torch": recording["torch"], "python": recording["python"]}
    yield from HEAD.format(**numbers).splitlines()
    yield ""
    yield from row("", "what it tries", "torchrun", "wingbeat torchrun", "")
    yield "|---|---|---|---|---|"
    for case in CASES:
        found = [(way, differences[way, case.name]) for way in ("new", "forked") if (way, case.name) in differences]
        yield from row(case.name, case.tries, summary(recording["cases"][case.name]), what_differs(case.name, found), verdict(case.name, found))
    yield ""
    yield "## Why"
    yield ""
    for at, (_, key, why) in enumerate(DELIBERATE):
        yield f"{at + 1}. {why}" + (" (Every script.)" if is_everywhere(at) else "")
    yield ""
    yield "## Variables of a rank"
    yield ""
    yield "Rank 0 of two, started with `--role trainer --rdzv-id job --max-restarts 3`."
    yield ""
    yield from row("variable", "torchrun", "wingbeat torchrun", "")
    yield "|---|---|---|---|"
    theirs, found = recording["cases"]["facts-2"], differences["new", "facts-2"]
    prefix = "rank 0: env "
    for key in sorted(key for key in {*theirs, *found} if key.startswith(prefix)):
        their, our = found.get(key, (theirs.get(key),) * 2)
        note = "only here" if their is None else "not here" if our is None else "" if their == our else "differs"
        yield from row(key.removeprefix(prefix), brief(their), brief(our), note)


def row(*cells):
    yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def brief(value):
    """A value in a cell."""
    if value is None:
        return "not there"
    if value in ("", [], [""]):
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    if found := re.match(r"(\d+) bytes, SHA-256", text):
        return f"{int(found[1]):,} bytes"
    return "`" + (text if len(text) <= 90 else text[:60] + " … " + text[-25:]).replace("`", "'") + "`"


def ended(code):
    return f"exits with {code}" if code >= 0 else f"is ended by signal {-code}"


def summary(seen):
    parts = [ended(seen["exit code"])]
    for name in ("stdout", "stderr"):
        if brief(seen[name]) != "nothing":
            parts.append(f"{name} {brief(seen[name])}")
    parts += [f"{key.removesuffix(': told')} told {brief(value)}" for key, value in seen.items() if key.endswith(": told")]
    facts = [key for key in seen if re.match(r"rank \d+: (?!told)", key)]
    if facts:
        parts.append(f"{len(facts)} facts unlike Python alone")
    if files := [key[5:] for key in seen if key.startswith("file ")]:
        parts.append("files " + ", ".join(f"`{name}`" for name in files))
    for key in ("left in TMPDIR", "left in HOME", "lives on"):
        if seen[key]:
            parts.append(f"{key}: {brief(seen[key])}")
    return "; ".join(parts)


def what_differs(name, found):
    """What differs, in a cell; once where it is the same for both ranks or both ways."""
    cells = {}
    for way, one in found:
        for key, (_, ours) in one.items():
            if is_everywhere(why_meant(name, key)):
                continue
            what = ended(ours) if key == "exit code" else f"{re.sub('^rank [0-9]+: ', '', key)}: {brief(ours)}"
            cells.setdefault(what, []).append(way)
    only = {"new": " (new Python)", "forked": " (forked)"} if len(found) > 1 else {"new": ""}
    shown = [what + (only[ways[0]] if len(set(ways)) < len(found) else "") for what, ways in cells.items()]
    shown = shown if len(shown) <= MOST_SHOWN + 1 else [*shown[:MOST_SHOWN], f"and {len(shown) - MOST_SHOWN} more"]
    return "; ".join(shown) or "the same"


def is_everywhere(at):
    return at is not None and DELIBERATE[at][0].startswith((".*", "(?!"))


def verdict(name, found):
    reasons = {at for _, one in found for key in one if not is_everywhere(at := why_meant(name, key))}
    unmeant = ["**differs, and is not meant to**"] if None in reasons else []
    return ", ".join(unmeant + [f"({at + 1})" for at in sorted(reasons - {None})])
