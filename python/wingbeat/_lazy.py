"""Modules whose names are imported when they are first used: a rank must not pay for what its script does not use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def names_of(
    module: str, homes: Mapping[str, str], absent: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Makes a module's `__getattr__`.

    Args:
        module: The module's name.
        homes: For each public name, the module that defines it. A name that is itself a module has itself as its home.
        absent: Names that a user may look for, each with what to do instead.

    Returns:
        The function that finds a name.
    """

    def __getattr__(name: str) -> Any:
        home = homes.get(name)
        if home is not None:
            found = importlib.import_module(home)
            return found if home == f"{module}.{name}" else getattr(found, name)
        if absent is not None and name in absent:
            raise AttributeError(f"{module} has no {name}: {absent[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
