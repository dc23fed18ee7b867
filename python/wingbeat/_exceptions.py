"""Exceptions that have travelled."""

from __future__ import annotations

from typing import Any, TypeVar

Raised = TypeVar("Raised", bound=BaseException)


def remake(kind: type[Raised], args: tuple[Any, ...], state: dict[str, Any]) -> Raised:
    """An exception of this class, without a call of its `__init__`."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
