"""Whether two spaces of parameters are the same."""

from __future__ import annotations

import dataclasses
import enum
import functools
import numbers
import types
from collections.abc import Callable, Mapping
from typing import Any

from wingbeat.tune import _space

_MISSING = object()


def first_difference(space: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first parameter in which two spaces differ.

    Args:
        space: A space.
        other: Another.

    Returns:
        Its name; None if there is none. Classes are told apart by their names, and what has no `==` of its own by its class
        alone.
    """
    ours, theirs = dict(_space.leaves(space)), dict(_space.leaves(other))
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        if not _is_same(ours.get(path, _MISSING), theirs.get(path, _MISSING)):
            return _space.name_of(path)
    return None


def _is_same(one: Any, other: Any, within: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two values are the same. One of them may have been pickled in another program: what its `__main__` defines has
    come along by value, and is another object here.

    Args:
        one: A value.
        other: Another.
        within: The pairs of which these are parts: a function may refer to itself.
    """
    if one is other:
        return True
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    if isinstance(one, (numbers.Number, str, bytes)) and isinstance(other, (numbers.Number, str, bytes)):
        return bool(one == other) or bool(one != one and other != other)  # NaN
    if _name(type(one)) != _name(type(other)):
        return False
    for kinds, parts in _PARTS:
        if isinstance(one, kinds):
            pair = (id(one), id(other))
            if pair in within:
                return True
            ours, theirs = parts(one), parts(other)
            return len(ours) == len(theirs) and all(_is_same(*each, within | {pair}) for each in zip(ours, theirs))
    if isinstance(one, (set, frozenset)):
        return len(one) == len(other) and all(any(_is_same(each, its, within) for its in other) for each in one - other)
    try:
        if dataclasses.is_dataclass(one) and not isinstance(one, type):
            names = [each.name for each in dataclasses.fields(one) if each.compare]
            return all(_is_same(getattr(one, name), getattr(other, name), within) for name in names)
        return _is_equal(one, other)
    except Exception:  # of the value's own
        return True


def _name(one: Any) -> tuple[Any, ...]:
    return getattr(one, "__module__", None), getattr(one, "__qualname__", None), getattr(one, "__name__", None)


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values of one class are equal, as far as that can be known."""
    if isinstance(getattr(one, "__name__", None), str):  # a class, a function that is built in, a module
        return _name(one) == _name(other)
    if callable(getattr(one, "equals", None)):  # a table
        return bool(one.equals(other))
    if hasattr(one, "shape") and hasattr(one, "dtype"):
        is_like = one.shape == other.shape and one.dtype == other.dtype
        return is_like and bool(((one == other) | ((one != one) & (other != other))).all())
    named = one.__reduce_ex__(2)
    if isinstance(named, str):  # there is one of it in its module, as of torch's types
        return bool(named == other.__reduce_ex__(2))
    is_own = getattr(type(one), "__eq__", None) is not object.__eq__
    return type(one) is not type(other) or not is_own or bool(one == other)


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    """What a function does, and with what."""
    cells = [_inside(cell) for cell in function.__closure__ or ()]
    return [*_of_code(function.__code__), function.__defaults__, function.__kwdefaults__, *cells]


def _inside(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING


def _of_code(code: types.CodeType) -> list[Any]:
    return [code.co_code, code.co_names, code.co_varnames, [_of_constant(one) for one in code.co_consts]]


def _of_constant(one: Any) -> Any:
    if isinstance(one, types.CodeType):
        return _of_code(one)
    # As text, which tells 1 from 1.0 and True. The order of a set is another in each program.
    return frozenset(map(repr, one)) if isinstance(one, frozenset) else repr(one)


# The parts of values, which decide whether these are the same.
_PARTS: list[tuple[Any, Callable[[Any], list[Any]]]] = [
    (enum.Enum, lambda one: [one.name, one.value]),
    (Mapping, lambda one: [*one, *one.values()]),
    ((list, tuple), list),
    (types.FunctionType, _parts_of_function),
    (types.MethodType, lambda one: [one.__func__, one.__self__]),
    (functools.partial, lambda one: [one.func, one.args, one.keywords]),
]
