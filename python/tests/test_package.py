"""The package itself: what it says of itself, and how its public names are documented."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap

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
