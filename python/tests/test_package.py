"""The package itself: what it says of itself, and how its public names are documented."""

import ast
import dataclasses
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import PACKAGE

import wingbeat

MODULES = """
    wingbeat.torch wingbeat.train wingbeat.train.torch wingbeat.tune wingbeat.tune.search wingbeat.tune.search.optuna
    wingbeat.tune.schedulers wingbeat.ml wingbeat.ml.base wingbeat.ml.classification wingbeat.ml.evaluation wingbeat.ml.feature
    wingbeat.ml.param wingbeat.ml.pipeline wingbeat.ml.summarizer wingbeat.ml.tuning
""".split()


# What pyspark's classes have for each parameter, which is described where it is.
SHORT = r"Sets `\w+`\.|Sets parameters, as the constructor does\."


def table(path, name):
    """The lines of a table of a TOML file: `tomllib` is not in each Python that the package runs on."""
    lines = iter(path.read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line == f"[{name}]")
    found = {}
    for line in lines:
        if line.startswith("["):
            break
        key, equals, value = line.partition(" = ")
        if equals:
            found[key] = value.strip('"')
    return found


def test_the_package_is_of_the_version_and_the_place_that_the_crates_are():
    crates = table(PACKAGE.parent / "Cargo.toml", "workspace.package")
    assert wingbeat.__version__ == crates["version"]
    assert table(PACKAGE / "pyproject.toml", "project.urls")["Repository"] == crates["repository"]
    project = table(PACKAGE / "pyproject.toml", "project")
    assert project["license"] == crates["license"] and project["keywords"] == crates["keywords"]
    for name in ("README.md", "LICENSE-APACHE", "LICENSE-MIT"):
        assert (PACKAGE / name).read_bytes() == (PACKAGE.parent / name).read_bytes(), name


def interpreters():
    """The Pythons of this machine that the package is for: those on the PATH, and pyenv's. The tests' own is one in any case."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    found = {sys.version_info[:2]: sys.executable}
    for minor in range(9, 15):
        there = [shutil.which(f"python3.{minor}"), *sorted(map(str, versions.glob(f"3.{minor}.*/bin/python3")))]
        for one in filter(None, there):  # a shim of pyenv's is there also if there is no such Python
            if subprocess.run([one, "-c", f"import sys; sys.exit(sys.version_info[:2] != (3, {minor}))"], stderr=subprocess.DEVNULL).returncode == 0:
                found.setdefault((3, minor), one)
                break
    return found


FOUND = interpreters()


@pytest.mark.parametrize("version", FOUND, ids=lambda version: ".".join(map(str, version)))
def test_ranks_run_with_each_python_that_the_package_is_for(run, write, cluster, tmp_path, version):
    least = re.search(r">=3\.(\d+)", table(PACKAGE / "pyproject.toml", "project")["requires-python"])[1]
    assert int(least) == 9, "the least that is tried here"
    # None of them needs torch or anything else.
    script = write("reports.py", """
        import os, pathlib, sys

        import wingbeat.torch, wingbeat.train.torch, wingbeat.tune.schedulers, wingbeat.tune.search
        from wingbeat import train, tune

        train.RunConfig(name="a"), train.ScalingConfig((1, 2)), tune.TuneConfig(), tune.ASHAScheduler(), tune.uniform(0, 1)
        step = 0
        if checkpoint := train.get_checkpoint():
            step = int(pathlib.Path(checkpoint.path, "step").read_text())
        rank = train.get_context().get_world_rank()
        pathlib.Path(f"here-{rank}").mkdir(exist_ok=True)
        pathlib.Path(f"here-{rank}", "step").write_text(str(step + 1))
        train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(f"here-{rank}"))
        if step == 0:
            sys.exit(1)
        print("python", *sys.version_info[:2], "step", step)
    """)
    for start in ([], ["--cold"]):
        storage = tmp_path / f"stored{len(start)}"
        options = ["-n", "2", *start, "--python", FOUND[version], "--storage", storage, "--max-failures", "1"]
        done = run("train", *options, script, env=cluster, cwd=tmp_path)
        assert done.stdout.count(f"python {version[0]} {version[1]} step 1") == 2, done.stdout + done.stderr
        assert "starts cold" not in done.stderr, done.stderr


def public(module):
    """The public functions of a module, and those of its classes, by name."""
    names = getattr(module, "__all__", None) or [name for name, of in vars(module).items() if of_the_module(of, module, name)]
    for name in names:
        value = getattr(module, name)
        if inspect.isfunction(value):
            yield name, value, None
        elif inspect.isclass(value):
            yield name, value, None
            for method, raw in vars(value).items():
                function = raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
                function = function.fget if isinstance(function, property) else function
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", function, (value, isinstance(raw, property))


def of_the_module(value, module, name):
    return (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__ and name[0] != "_"


def inherits_its_text(owner, name):
    """Whether a class of this package above this one documents the method, whose short text here says what is special."""
    above = [vars(base).get(name) for base in owner.__mro__[1:] if base.__module__.startswith("wingbeat")]
    return any(inspect.getdoc(one) and "Args:" in inspect.getdoc(one) or one.__doc__ and "Returns:" in one.__doc__ for one in above if one)


def raises_by_itself(function):
    left = list(ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Raise) and node.exc is not None and getattr(node.exc, "id", "") != "NotImplementedError":
            return True
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):  # those are called by others
            left += ast.iter_child_nodes(node)
    return False


def missing(name, value, of):
    """What the text of a public function or class lacks."""
    text = inspect.getdoc(value) or ""
    if dataclasses.is_dataclass(value):
        text = "\n".join(base.__doc__ or "" for base in value.__mro__ if dataclasses.is_dataclass(base))
    owner, is_property = of or (None, False)
    if not text:
        return ["a docstring"]
    if re.fullmatch(SHORT, text):
        return []
    section, has_result = "Args:", False
    if inspect.isclass(value):
        if "__init__" not in vars(value) or issubclass(value, Exception):
            return []
        # What the class is made with is in its own text.
        is_dataclass = dataclasses.is_dataclass(value)
        section, made = "Attributes:" if is_dataclass else "Args:", inspect.unwrap(value.__init__)
        value = vars(value).get("__post_init__", print) if is_dataclass else made
    else:
        made = value
        has_result = inspect.signature(value).return_annotation not in ("None", None, inspect.Signature.empty, "NoReturn")
        has_result = has_result and "NotImplementedError: Always" not in text
    if owner is not None and inherits_its_text(owner, name.rpartition(".")[2]):
        return []
    parameters = [one for one in inspect.signature(made).parameters if one not in ("self", "cls")]
    lacks = [f"the argument {one}" for one in parameters if f"{one}:" not in text.partition(section)[2]]
    # Of one without arguments, the first sentence is what it returns.
    if has_result and parameters and not is_property and not ("Returns:" in text or "Yields:" in text):
        lacks.append("Returns")
    if value is not print and raises_by_itself(value) and "Raises:" not in text:
        lacks.append("Raises")
    return lacks


@pytest.mark.parametrize("name", MODULES)
def test_public_names_say_what_they_take_return_and_raise(name):
    lacks = {each: missing(each, value, of) for each, value, of in public(importlib.import_module(name))}
    assert not {each: what for each, what in lacks.items() if what}
