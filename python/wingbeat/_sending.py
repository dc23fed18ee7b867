"""Functions and tables on their way to ranks."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wingbeat._files import _contents

if TYPE_CHECKING:
    import pyarrow


def write_function(path: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], returns: str) -> None:
    """Writes a function with its arguments, as `_function.py` reads it.

    Args:
        path: The file.
        function: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        returns: "first" or "all": the ranks whose values are wanted.

    Raises:
        TypeError: Something cannot be pickled; the text names it.
    """
    import cloudpickle

    about = {"sys_path": sys.path, "first": _before_the_library(sys.path), "returns": returns}
    with open(path, "wb") as out:
        pickle.dump(about, out)
        try:
            cloudpickle.dump((function, tuple(args), dict(kwargs)), out)
        except Exception as error:
            raise TypeError(_who_cannot_be_sent(function, args, kwargs, error)) from error


def table_of(rows: Any) -> pyarrow.Table:
    """A table of whatever holds rows.

    Args:
        rows: A pyarrow Table, a pandas DataFrame (its columns, without the index), or what has `__arrow_c_stream__`.

    Returns:
        The table.

    Raises:
        TypeError: It is none of these.
    """
    import pyarrow

    if isinstance(rows, pyarrow.Table):
        return rows
    pandas = sys.modules.get("pandas")
    is_of_pandas = pandas is not None and isinstance(rows, pandas.DataFrame)
    if hasattr(rows, "__arrow_c_stream__") and not is_of_pandas:  # of pandas, it has the index as a column
        return pyarrow.table(rows)
    if is_of_pandas or (hasattr(rows, "dtypes") and hasattr(rows, "columns")):
        return pyarrow.Table.from_pandas(rows, preserve_index=False)
    kind = f"{type(rows).__module__}.{type(rows).__qualname__}"
    raise TypeError(f"a dataset must be a pyarrow Table, a pandas DataFrame or have __arrow_c_stream__; this is a {kind}")


def write_parts(table: pyarrow.Table, folder: str, ranks: int) -> None:
    """Writes each rank's rows, which differ in number by one at most.

    Args:
        table: The rows.
        folder: Where the files `0.arrow`, `1.arrow` and so on are written.
        ranks: How many.
    """
    import pyarrow

    table = _contents.marked(table)
    ends = [table.num_rows * rank // ranks for rank in range(ranks + 1)]
    for rank, (begin, end) in enumerate(zip(ends, ends[1:])):
        with pyarrow.ipc.new_file(os.path.join(folder, f"{rank}.arrow"), table.schema) as file:
            file.write_table(table.slice(begin, end - begin))


def _before_the_library(paths: Sequence[str]) -> int:
    """How many of these come before Python's own: the script's folder, and what the user has named."""
    library = os.path.dirname(os.__file__)

    def is_the_library(path: str) -> bool:
        return path == library or (path.endswith(".zip") and os.path.dirname(path) == os.path.dirname(library))

    return next((index for index, path in enumerate(paths) if is_the_library(path)), 0)


def _who_cannot_be_sent(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    error: Exception,
    seen: tuple[Callable[..., Any], ...] = (),
) -> str:
    """Names the part of a call that cannot be pickled. Functions that were `seen` are not looked into again."""
    import cloudpickle

    def fails(value: Any) -> bool:
        try:
            cloudpickle.dumps(value)
        except Exception:
            return True
        return False

    name = getattr(function, "__qualname__", repr(function))
    parts = [(f"argument {number}", value) for number, value in enumerate(args)]
    parts += [(f"argument {key!r}", value) for key, value in kwargs.items()]
    code = getattr(function, "__code__", None)
    if code is not None:
        cells = getattr(function, "__closure__", None) or ()
        for variable, cell in zip(code.co_freevars, cells):
            try:
                parts.append((f"variable {variable!r}", cell.cell_contents))
            except ValueError:
                pass  # not assigned yet
        names = getattr(function, "__globals__", {})
        parts += [(f"global {variable!r}", names[variable]) for variable in code.co_names if variable in names]
    for part, value in parts:
        if any(value is one for one in (function, *seen)):
            continue
        if fails(value):
            if hasattr(value, "__code__"):
                return _who_cannot_be_sent(value, (), {}, error, (*seen, function))
            return f"{name} cannot be sent to ranks: its {part}, a {type(value).__qualname__}, cannot be pickled: {error}"
    return f"{name} cannot be sent to ranks: {error}"
