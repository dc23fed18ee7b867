"""Rows of several tables, put together in another order.

Columns of fixed width without nulls are gathered by NumPy, several times as fast as by `pyarrow.Table.take`; others by pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow


class Window:
    """Rows `begin` to `end` of a lane.

    Args:
        begin: The offset of the first row.
        end: The offset of the row after the last.
        table: The rows as they were read.
        draw: What draws in which order they are taken; None if they stay as they are.
    """

    def __init__(self, begin: int, end: int, table: pyarrow.Table, draw: Callable[[], Any] | None) -> None:
        self.begin, self.end, self._draw = begin, end, draw
        self.table = table if draw is None else table.combine_chunks()

    @cached_property
    def views(self) -> list[Any]:
        """Each column as an array over its memory; None for one that NumPy cannot gather."""
        return [_view(column) for column in self.table.columns]

    @cached_property
    def _order(self) -> Any:
        return None if self._draw is None else self._draw()

    def rows(self, places: slice) -> Any:
        """Which rows of the table are at these places of the order.

        Args:
            places: The places.

        Returns:
            A slice or an array.
        """
        return places if self._draw is None else self._order[places]


@dataclass(frozen=True)
class Pick:
    """Rows of a window, and where they go.

    Attributes:
        window: The window.
        places: Which rows of the window's order.
        to: Where they go among the rows that are put together.
    """

    window: Window
    places: slice
    to: slice


def gathered(picks: Sequence[Pick], count: int) -> pyarrow.Table:
    """Puts rows together.

    Args:
        picks: The rows. Together they go to each place from 0 to `count - 1` once.
        count: How many rows there are.

    Returns:
        The table.
    """
    import numpy as np
    import pyarrow

    rows = [pick.window.rows(pick.places) for pick in picks]
    if all(isinstance(row, slice) and row.step == 1 and pick.to.step == 1 for row, pick in zip(rows, picks)):
        # As they lie in the files.
        return pyarrow.concat_tables(
            [pick.window.table.slice(row.start, row.stop - row.start) for row, pick in zip(rows, picks)]
        )
    # Each column of all windows is put together, and gathered from once: to write the rows of each window to where they go, which
    # are far from each other, takes longer.
    windows = list({id(pick.window): pick.window for pick in picks}.values())
    first = dict(zip(map(id, windows), np.cumsum([0, *(window.table.num_rows for window in windows)]).tolist()))
    order = np.empty(count, np.int64)
    for pick, row in zip(picks, rows):
        begin = first[id(pick.window)]
        if isinstance(row, slice):
            order[pick.to] = np.arange(begin + row.start, begin + row.stop, row.step)
        else:
            np.add(row, begin, out=order[pick.to])
    schema = windows[0].table.schema
    columns = []
    for number, field in enumerate(schema):
        views = [window.views[number] for window in windows]
        if all(view is not None for view in views):
            made = _empty((count, *views[0].shape[1:]), views[0].dtype)
            # All numbers are in range, and NumPy writes to `out` itself only if it need not check that.
            np.take(_together(views), order, axis=0, out=made, mode="clip")
            columns.append(_array(field.type, made))
            continue
        column = pyarrow.chunked_array([chunk for one in windows for chunk in one.table.column(number).chunks], field.type)
        if pyarrow.types.is_dictionary(field.type):
            column = column.unify_dictionaries()
        columns.append(column.combine_chunks().take(pyarrow.array(order)))
    return pyarrow.table(columns, schema=schema)


def _together(views: Sequence[Any]) -> Any:
    import numpy as np

    if len(views) == 1:
        return views[0]
    together = _empty((sum(map(len, views)), *views[0].shape[1:]), views[0].dtype)
    return np.concatenate(views, out=together)


def _view(column: pyarrow.ChunkedArray) -> Any:
    if column.num_chunks != 1 or column.null_count:
        return None
    return _view_of(column.chunk(0))


def _view_of(array: pyarrow.Array) -> Any:
    import numpy as np
    import pyarrow

    kind = array.type
    if pyarrow.types.is_fixed_size_list(kind):
        values = array.flatten()
        inner = _view_of(values) if not values.null_count and kind.list_size else None
        return inner.reshape(len(array), kind.list_size) if inner is not None and inner.ndim == 1 else None
    is_fixed = pyarrow.types.is_primitive(kind) or pyarrow.types.is_fixed_size_binary(kind) or pyarrow.types.is_decimal(kind)
    if not is_fixed or kind.bit_width % 8 or not kind.bit_width or isinstance(kind, pyarrow.BaseExtensionType):
        return None
    size = kind.bit_width // 8
    dtype = np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")
    data = array.buffers()[1]
    return np.frombuffer(data, dtype, count=len(array), offset=array.offset * size)


def _empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array in pyarrow's memory, which it uses again: NumPy would get large ones from the kernel each time."""
    import math

    import numpy as np
    import pyarrow

    buffer = pyarrow.allocate_buffer(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(buffer, dtype).reshape(shape)


def _array(kind: pyarrow.DataType, made: Any) -> pyarrow.Array:
    import pyarrow

    if pyarrow.types.is_fixed_size_list(kind):
        return pyarrow.FixedSizeListArray.from_arrays(_array(kind.value_type, made.reshape(-1)), type=kind)
    return pyarrow.Array.from_buffers(kind, len(made), [None, pyarrow.py_buffer(made)])
