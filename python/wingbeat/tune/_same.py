"""Whether two spaces of parameters are the same."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import types
from collections.abc import Mapping
from typing import Any

from wingbeat.tune import _space

_MISSING = object()


def first_difference(space: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first parameter in which two spaces differ.

    Args:
        space: A space.
        other: Another.

    Returns:
        Its name; None if there is none. What cannot be compared, as an object of a class of the user's, is taken for the same.
    """
    ours, theirs = dict(_space.leaves(space)), dict(_space.leaves(other))
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        if not _is_same(ours.get(path, _MISSING), theirs.get(path, _MISSING)):
            return _space.name_of(path)
    return None


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, (numbers.Number, str, bytes)) and isinstance(other, (numbers.Number, str, bytes)):
        return bool(one == other) or bool(one != one and other != other)  # NaN
    if type(one) is not type(other):
        return False
    if isinstance(one, _space.Domain) and dataclasses.is_dataclass(one):
        return all(_is_same(getattr(one, each.name), getattr(other, each.name)) for each in dataclasses.fields(one))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, types.FunctionType):
        return _parts(one) == _parts(other)
    if isinstance(one, functools.partial):
        return all(_is_same(getattr(one, name), getattr(other, name)) for name in ("func", "args", "keywords"))
    return True


def _parts(function: types.FunctionType) -> list[Any]:
    """What a function does. It may have been pickled by value: then it is another object, of a file of another name."""
    return _of_code(function.__code__)


def _of_code(code: types.CodeType) -> list[Any]:
    return [code.co_code, code.co_names, code.co_varnames, [_of_constant(one) for one in code.co_consts]]


def _of_constant(one: Any) -> Any:
    if isinstance(one, types.CodeType):
        return _of_code(one)
    # As text, which tells 1 from 1.0 and True. The order of a set is another in each program.
    return frozenset(map(repr, one)) if isinstance(one, frozenset) else repr(one)
