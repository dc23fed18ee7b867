"""Rows of several tables, put together in another order.

Columns of fixed width without nulls are moved by NumPy, several times as fast as by `pyarrow.Table.take`: once into the order of
their window when they are read, and are in a cache of the processor, and once to where they go, by reading several windows from
their beginnings on. Others are gathered by pyarrow.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Collection, Sequence
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
        made: list[Any] = [None] * len(like)
        groups = _alike(like)
        sizes = [count * len(numbers) * _row_bytes(like[numbers[0]]) for numbers in groups]
        begins = list(itertools.accumulate((-(-size // _LINE) * _LINE for size in sizes), initial=0))
        whole = self.array(begins[-1])
        for numbers, begin, size in zip(groups, begins, sizes):
            one = like[numbers[0]]
            group = whole[begin : begin + size].view(one.dtype).reshape(len(numbers), count, *one.shape[1:])
            for number, column in zip(numbers, group):
                made[number] = column
        return made


def _alike(like: Sequence[Any]) -> list[list[int]]:
    """The numbers of the columns that NumPy moves, those of the same type together."""
    groups: dict[Any, list[int]] = {}
    for number, one in enumerate(like):
        if one is not None:
            groups.setdefault((one.dtype.str, one.shape[1:]), []).append(number)
    return list(groups.values())


def _row_bytes(like: Any) -> int:
    return int(like.dtype.itemsize * math.prod(like.shape[1:]))


class Spare:
    """Memory that an iteration has no more use for, kept for the next one: a short epoch has a fifth of its time for new pages.
    All shards of a process share one `Spare`, and it is gone with the last of them."""

    _of_process: weakref.ref[Spare] | None = None

    def __init__(self) -> None:
        self._kept: Any = None
        self._lock = threading.Lock()

    @classmethod
    def of_process(cls) -> Spare:
        """That of this process. Who uses it keeps it."""
        spare = cls._of_process() if cls._of_process is not None else None
        if spare is None:
            spare = cls()
            cls._of_process = weakref.ref(spare)
        return spare

    def take(self, size: int) -> Any:
        """Bytes with any contents.

        Args:
            size: How many, at least.

        Returns:
            An array of bytes.
        """
        import numpy as np

        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None and kept.nbytes >= size:
            return kept
        del kept  # before there is more
        return np.empty(size, np.uint8)

    def give_back(self, memory: Any) -> None:
        """Keeps memory, unless other memory is kept already that is larger.

        Args:
            memory: What `take` has returned.
        """
        with self._lock:
            if self._kept is None or self._kept.nbytes < memory.nbytes:
                self._kept = memory


class Slots:
    """Memory for windows whose rows are taken in another order. A slot has room for a window. All slots lie together, so that
    one call of NumPy takes the rows of a column from several windows.

    Args:
        rows: How many rows a window has, at most.
        count: How many slots there are. Memory of those that are never in use stays untouched.
        like: For each column that NumPy is to move, an array of its type; None for others.
        spare: Where memory is from, and goes at the end.
    """

    def __init__(self, rows: int, count: int, like: Sequence[Any], spare: Spare) -> None:
        # For each column, all rows from its first one on, which are also those of others. Of it, row i in a slot is the one with
        # the number slot x (rows from one slot to the next) + i.
        self.sources: list[Any] = [None] * len(like)
        self.groups: list[tuple[list[int], int]] = []  # columns of the same type, and rows from one slot to the next
        self._rows: list[tuple[Any, int]] = []
        sizes = [-(-count * len(numbers) * rows * _row_bytes(like[numbers[0]]) // _LINE) * _LINE for numbers in _alike(like)]
        self._spare, self._memory = spare, spare.take(sum(sizes))
        end = 0
        for numbers, size in zip(_alike(like), sizes):
            one, begin, end = like[numbers[0]], end, end + size
            all_rows = count * len(numbers) * rows
            together = self._memory[begin : begin + all_rows * _row_bytes(one)].view(one.dtype).reshape(all_rows, *one.shape[1:])
            for place, number in enumerate(numbers):
                self.sources[number] = together[place * rows :]
            self.groups.append((numbers, len(numbers) * rows))
            self._rows.append((together.reshape(count, len(numbers), rows, *one.shape[1:]), len(numbers)))
        self._free = list(range(count - 1, -1, -1))  # the last one is used next: its memory is likely to be in a cache

    def close(self) -> None:
        """Gives the memory back. No window may be in use."""
        self._spare.give_back(self._memory)

    def take(self, window: Window, count: int) -> tuple[int, list[Any]]:
        """Takes a slot until a window is gone.

        Args:
            window: The window.
            count: How many rows it has.

        Returns:
            The number of the slot, and its columns; None for those that NumPy does not move.
        """
        slot = self._free.pop()
        weakref.finalize(window, self._free.append, slot).atexit = False
        columns: list[Any] = [None] * len(self.sources)
        for (numbers, _), (together, _) in zip(self.groups, self._rows):
            for number, column in zip(numbers, together[slot, :, :count]):
                columns[number] = column
        return slot, columns


class Window:
    """Rows `begin` to `end` of a lane.

    Args:
        begin: The offset of the first row.
        end: The offset of the row after the last.
        schema: The columns.
        like: For each column that NumPy is to move, an array of its type; None for others.
        order: The rows in the order in which they are taken; None if they stay as they are.
        memory: Where columns that NumPy moves are put: slots if they are taken in another order.
    """

    def __init__(
        self, begin: int, end: int, schema: pyarrow.Schema, like: Sequence[Any], order: Any, memory: Memory | Slots
    ) -> None:
        self.begin, self.end, self.schema, self.order = begin, end, schema, order
        self.slots = memory if isinstance(memory, Slots) else None
        # Each column as an array, in the order in which its rows are taken; None for one that NumPy cannot move.
        if isinstance(memory, Slots):
            self.slot, self.columns = memory.take(self, end - begin)
        else:
            self.slot, self.columns = 0, memory.columns(end - begin, like)
        # What is Arrow's of a column, and at which of the window's rows it begins.
        self._parts: dict[int, list[tuple[int, Any]]] = {}

    def add(self, number: int, at: int, rows: Any) -> None:
        """Takes in the next rows of a column, in the order in which they were read.

        Args:
            number: The column.
            at: Which of the window's rows the first of them is.
            rows: The rows: an array over their memory, as `view` makes it, or a `pyarrow.ChunkedArray`.
        """
        column = self.columns[number]
        if column is None or hasattr(rows, "chunks"):
            self._parts.setdefault(number, []).append((at, rows))
        elif self.order is None:
            column[at : at + len(rows)] = rows
        elif len(rows) == len(column):
            # All numbers are in range, and NumPy writes to `out` itself only if it need not check that.
            rows.take(self.order, axis=0, out=column, mode="clip")
        else:
            # The rest of the window is in another piece, which is read when the memory of this one is used again.
            column[at : at + len(rows)] = rows
            if at + len(rows) == len(column) and number not in self._parts:
                column[:] = column.take(self.order, axis=0)

    def is_array(self, number: int) -> bool:
        """Whether NumPy can move a column: its type is one of those, and none of its rows is null.

        Args:
            number: The column.
        """
        return self.columns[number] is not None and number not in self._parts

    def arrow(self, number: int) -> pyarrow.ChunkedArray:
        """A column: in the order in which its rows are taken if NumPy can move it, and else as it was read.

        Args:
            number: The column.
        """
        import pyarrow

        kind, column = self.schema.field(number).type, self.columns[number]
        chunks: list[Any] = []
        done = 0
        for at, rows in [*self._parts.get(number, ()), (self.end - self.begin, None)]:
            if column is not None and done < at:
                chunks.append(_array(kind, column[done:at]))
            if rows is not None:
                chunks += rows.chunks
                done = at + len(rows)
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


class Rows:
    """Rows that were put together.

    Args:
        schema: The columns.
        columns: Each column: an array of NumPy over its memory, of a type as `like_of` says, or one of Arrow.
    """

    def __init__(self, schema: pyarrow.Schema, columns: Sequence[Any]) -> None:
        self.schema, self._columns = schema, columns

    @cached_property
    def table(self) -> pyarrow.Table:
        """The rows as a table."""
        return self._table(range(len(self.schema)))

    def split(self, without: Collection[str] = ()) -> tuple[dict[str, Any], pyarrow.Table]:
        """Columns of numbers that need not become Arrow's first, and the others.

        Args:
            without: Columns that are among the others in any case.

        Returns:
            Arrays of numbers, by column, and a table of the other columns.
        """
        import numpy as np
        import pyarrow

        numbers, others = {}, []
        for place, (field, column) in enumerate(zip(self.schema, self._columns)):
            is_number = pyarrow.types.is_integer(field.type) or pyarrow.types.is_floating(field.type)
            if is_number and isinstance(column, np.ndarray) and field.name not in without:
                numbers[field.name] = column.view(field.type.to_pandas_dtype())
            else:
                others.append(place)
        return numbers, self._table(others)

    def _table(self, places: Sequence[int]) -> pyarrow.Table:
        import numpy as np
        import pyarrow

        fields = [self.schema.field(place) for place in places]
        columns = [self._columns[place] for place in places]
        made = [_array(field.type, one) if isinstance(one, np.ndarray) else one for field, one in zip(fields, columns)]
        return pyarrow.table(made, schema=pyarrow.schema(fields))


def gathered(picks: Sequence[Pick], count: int, memory: Memory) -> Rows:
    """Puts rows together.

    Args:
        picks: The rows. Together they go to each place from 0 to `count - 1` once.
        count: How many rows there are.
        memory: Where they are put.

    Returns:
        The rows.
    """
    import numpy as np
    import pyarrow

    if all(pick.window.order is None and pick.places.step == 1 and pick.to.step == 1 for pick in picks):
        # As they lie in the files.
        table = pyarrow.concat_tables(
            [pick.window.table.slice(pick.places.start, pick.places.stop - pick.places.start) for pick in picks]
        )
        return Rows(table.schema, table.columns)
    windows = list({id(pick.window): pick.window for pick in picks}.values())
    first, schema, slots = windows[0], windows[0].schema, windows[0].slots
    are_arrays = [all(window.is_array(number) for window in windows) for number in range(len(schema))]
    columns = memory.columns(count, [column if is_array else None for column, is_array in zip(first.columns, are_arrays)])
    if slots is None:
        for number in itertools.compress(range(len(schema)), are_arrays):
            for pick in picks:
                columns[number][pick.to] = pick.window.columns[number][pick.places]
    else:
        order = np.empty(count, np.int64)
        for numbers, rows in slots.groups:
            for pick in picks:
                begin, places = pick.window.slot * rows, pick.places
                order[pick.to] = np.arange(begin + places.start, begin + places.stop, places.step)
            for number in numbers:
                if are_arrays[number]:
                    slots.sources[number].take(order, axis=0, out=columns[number], mode="clip")
    for number, is_array in enumerate(are_arrays):
        if not is_array:
            columns[number] = _taken(picks, count, windows, number)
    return Rows(schema, columns)


def _taken(picks: Sequence[Pick], count: int, windows: Sequence[Window], number: int) -> pyarrow.Array:
    """A column whose rows pyarrow puts together: from that of all windows."""
    import numpy as np
    import pyarrow

    first = dict(zip(map(id, windows), itertools.accumulate((one.end - one.begin for one in windows), initial=0)))
    order = np.empty(count, np.int64)
    for pick in picks:
        begin, window = first[id(pick.window)], pick.window
        if window.order is None or window.is_array(number):
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
