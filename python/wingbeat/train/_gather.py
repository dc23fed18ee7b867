"""Rows of several tables, put together in another order.

Columns of fixed width without nulls are moved by NumPy, several times as fast as by `pyarrow.Table.take`: once into the order of
their window when they are read, and are in a cache of the processor, and once to where they go. Others are gathered by pyarrow.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

# Columns begin at whole lines of a cache.
_LINE = 64
# NumPy asks for huge pages, of which new ones take a tenth of the time, for arrays of this size. Smaller ones are parts of such,
# unless there would be very many.
_HUGE, _SMALL = 4 << 20, 128 << 10


class Memory:
    """Memory that is used again once no array over it is left: new pages of a process take longer than to copy into them.

    Args:
        most: How many bytes wait to be used again, at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # Arrays that die add to its end, in whatever thread that is, also while another looks for one.
        self._free: list[Any] = []
        self._lock = threading.Lock()

    def array(self, size: int) -> Any:
        """Bytes with any contents.

        Args:
            size: How many.

        Returns:
            An array of bytes. Views of it keep it.
        """
        import numpy as np

        if size == 0:
            return np.empty(0, np.uint8)
        with self._lock:
            # Of several, what was used last.
            fits = [(one.nbytes, -place) for place, one in enumerate(list(self._free)) if size <= one.nbytes <= 2 * size]
            if fits:
                piece = self._free.pop(-min(fits)[1])
            elif _SMALL < size < _HUGE:
                made = np.empty(-(-_HUGE // size) * size, np.uint8)
                self._free += [made[begin : begin + size] for begin in range(size, made.nbytes, size)]
                piece = made[:size]
            else:
                piece = np.empty(size, np.uint8)
        # Over a memoryview: views of views of an array refer to the first array that is over something else.
        array = np.frombuffer(piece.data, np.uint8, size)
        weakref.finalize(array, self._take_back, piece).atexit = False
        return array

    def close(self) -> None:
        """Lets go of what waits. Arrays that are left keep their own memory alone."""
        self._most = -1
        self._free.clear()

    def _take_back(self, piece: Any) -> None:
        if sum(one.nbytes for one in self._free) + piece.nbytes <= self._most:
            self._free.append(piece)

    def columns(self, count: int, like: Sequence[Any]) -> list[Any]:
        """Arrays with any contents.

        Args:
            count: How many rows each has.
            like: For each, an array with the same type and rows of the same shape; None for None.

        Returns:
            The arrays, which lie together.
        """
        sizes = [0 if one is None else count * one.dtype.itemsize * math.prod(one.shape[1:]) for one in like]
        begins = list(itertools.accumulate((-(-size // _LINE) * _LINE for size in sizes), initial=0))
        whole = self.array(begins[-1])
        return [
            None if one is None else whole[begin : begin + size].view(one.dtype).reshape(count, *one.shape[1:])
            for one, begin, size in zip(like, begins, sizes)
        ]


class Window:
    """Rows `begin` to `end` of a lane.

    Args:
        begin: The offset of the first row.
        end: The offset of the row after the last.
        schema: The columns.
        like: For each column that NumPy is to move, an array of its type; None for others.
        order: The rows in the order in which they are taken; None if they stay as they are.
        memory: Where columns that NumPy moves are put, in that order.
    """

    def __init__(self, begin: int, end: int, schema: pyarrow.Schema, like: Sequence[Any], order: Any, memory: Memory) -> None:
        self.begin, self.end, self.schema, self.order = begin, end, schema, order
        # Each column as an array, in the order in which its rows are taken; None for one that NumPy cannot move.
        self.columns: list[Any] = memory.columns(end - begin, like)
        # What has come of each column that is not there yet, or is Arrow's.
        self._parts: list[list[Any]] = [[] for _ in like]

    def add(self, number: int, rows: Any) -> None:
        """Takes in the next rows of a column, in the order in which they were read.

        Args:
            number: The column.
            rows: The rows: an array over their memory, as `view` makes it, or a `pyarrow.ChunkedArray`.
        """
        parts, length, column = self._parts[number], self.end - self.begin, self.columns[number]
        is_array = not hasattr(rows, "chunks")
        if column is None:
            parts.append(rows)
        elif is_array and len(rows) == length:
            self._put(rows, column)
        else:
            # The rest of the window is in another piece, which is read when the memory of this one is used again.
            parts.append(rows.copy() if is_array else rows)
            if sum(map(len, parts)) < length:
                return
            if any(hasattr(part, "chunks") for part in parts):  # some have nulls
                self.columns[number] = None
                return
            import numpy as np

            self._put(np.concatenate(parts), column)
            parts.clear()

    def _put(self, rows: Any, column: Any) -> None:
        if self.order is None:
            column[:] = rows
        else:
            # All numbers are in range, and NumPy writes to `out` itself only if it need not check that.
            rows.take(self.order, axis=0, out=column, mode="clip")

    def arrow(self, number: int) -> pyarrow.ChunkedArray:
        """A column: in the order in which its rows are taken if NumPy can move it, and else as it was read.

        Args:
            number: The column.
        """
        import numpy as np
        import pyarrow

        kind, column = self.schema.field(number).type, self.columns[number]
        if column is not None:
            return pyarrow.chunked_array([_array(kind, column)])
        chunks: list[Any] = []
        for part in self._parts[number]:
            chunks += [_array(kind, part)] if isinstance(part, np.ndarray) else part.chunks
        return pyarrow.chunked_array(chunks, kind)

    @cached_property
    def table(self) -> pyarrow.Table:
        """The rows of a window that stay as they are."""
        import pyarrow

        return pyarrow.table([self.arrow(number) for number in range(len(self.schema))], schema=self.schema)


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


def gathered(picks: Sequence[Pick], count: int, memory: Memory) -> pyarrow.Table:
    """Puts rows together.

    Args:
        picks: The rows. Together they go to each place from 0 to `count - 1` once.
        count: How many rows there are.
        memory: Where they are put.

    Returns:
        The table.
    """
    import pyarrow

    if all(pick.window.order is None and pick.places.step == 1 and pick.to.step == 1 for pick in picks):
        # As they lie in the files.
        return pyarrow.concat_tables(
            [pick.window.table.slice(pick.places.start, pick.places.stop - pick.places.start) for pick in picks]
        )
    windows = list({id(pick.window): pick.window for pick in picks}.values())
    schema = windows[0].schema
    moved = [None if any(one is None for one in of_all) else of_all[0] for of_all in zip(*(window.columns for window in windows))]
    made = memory.columns(count, moved)
    columns = []
    for number, column in enumerate(made):
        if column is None:
            columns.append(_taken(picks, count, windows, number))
            continue
        for pick in picks:
            column[pick.to] = pick.window.columns[number][pick.places]
        columns.append(_array(schema.field(number).type, column))
    return pyarrow.table(columns, schema=schema)


def _taken(picks: Sequence[Pick], count: int, windows: Sequence[Window], number: int) -> pyarrow.Array:
    """A column whose rows pyarrow puts together: from that of all windows."""
    import numpy as np
    import pyarrow

    first = dict(zip(map(id, windows), itertools.accumulate((one.end - one.begin for one in windows), initial=0)))
    order = np.empty(count, np.int64)
    for pick in picks:
        begin, window = first[id(pick.window)], pick.window
        is_moved = window.order is None or window.columns[number] is not None
        if is_moved:
            order[pick.to] = np.arange(begin + pick.places.start, begin + pick.places.stop, pick.places.step)
        else:
            np.add(window.order[pick.places], begin, out=order[pick.to])
    kind = windows[0].schema.field(number).type
    column = pyarrow.chunked_array([chunk for one in windows for chunk in one.arrow(number).chunks], kind)
    if pyarrow.types.is_dictionary(kind):
        column = column.unify_dictionaries()
    return column.combine_chunks().take(pyarrow.array(order))


def like_of(kind: pyarrow.DataType) -> Any:
    """An array of no rows, of the type that NumPy moves such a column as; None if it cannot.

    Args:
        kind: The type of the column.
    """
    import numpy as np
    import pyarrow

    if pyarrow.types.is_fixed_size_list(kind):
        inner = like_of(kind.value_type) if kind.list_size else None
        return np.empty((0, kind.list_size), inner.dtype) if inner is not None and inner.ndim == 1 else None
    dtype = _dtype(kind)
    return None if dtype is None else np.empty(0, dtype)


def _dtype(kind: pyarrow.DataType) -> Any:
    """What NumPy moves values of fixed width as; None for others."""
    import numpy as np
    import pyarrow

    is_fixed = pyarrow.types.is_primitive(kind) or pyarrow.types.is_fixed_size_binary(kind) or pyarrow.types.is_decimal(kind)
    if not is_fixed or kind.bit_width % 8 or not kind.bit_width or isinstance(kind, pyarrow.BaseExtensionType):
        return None
    size = kind.bit_width // 8
    return np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")


def view(column: pyarrow.ChunkedArray, like: Any) -> Any:
    """A column as an array over its memory; as it is if NumPy cannot move it.

    Args:
        column: The column.
        like: An array of its type; None if NumPy cannot move such.
    """
    import numpy as np

    if like is None or column.null_count or not column.num_chunks:
        return column
    if column.num_chunks == 1:
        one = _view_of(column.chunk(0), like)
        return column if one is None else one
    views = [_view_of(chunk, like) for chunk in column.chunks]
    if any(one is None for one in views):
        return column
    return np.concatenate(views)


def _view_of(array: pyarrow.Array, like: Any) -> Any:
    import numpy as np

    if like.ndim == 2:  # lists of a fixed size
        array = array.flatten()
        if array.null_count:
            return None
    found = np.frombuffer(array.buffers()[1], like.dtype, count=len(array), offset=array.offset * like.itemsize)
    return found if like.ndim == 1 else found.reshape(-1, *like.shape[1:])


def _array(kind: pyarrow.DataType, made: Any) -> pyarrow.Array:
    import pyarrow

    if pyarrow.types.is_fixed_size_list(kind):
        return pyarrow.FixedSizeListArray.from_arrays(_array(kind.value_type, made.reshape(-1)), type=kind)
    return pyarrow.Array.from_buffers(kind, len(made), [None, pyarrow.py_buffer(made)])
