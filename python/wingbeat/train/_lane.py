"""A lane of a dataset's global order: its rows, read in windows."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from wingbeat._files._contents import PARQUET, DataFile
from wingbeat._files._reading import OpenFiles, Piece, pieces_of
from wingbeat.train._dataset_errors import of_train
from wingbeat.train._gather import Memory, Pick, Slots, Spare, Window, like_of, view

if TYPE_CHECKING:
    import pyarrow

    from wingbeat.train._order import Order, Stretch
    from wingbeat.train._source import FileDataset

# Small row groups are read together, as much of them in a lane and in all lanes as this part of the largest piece: it takes less
# than to read each alone.
_IN_A_LANE, _IN_ALL_LANES = 0.5, 1.25


class Lane:
    """Reads a lane from some row on. While a piece of it (a small unit, or a window of a large one) is in use, the next is read.

    Args:
        dataset: The dataset.
        order: Its global order.
        lane: The lane.
        offset: The first row that will be asked for. Units before it are not read.
        files: What opens the files, for `reader` alone.
        reader: What reads, one piece after the other.
        memory: Where windows are put: what `slots_of` returns if rows are shuffled.
    """

    def __init__(
        self,
        dataset: FileDataset,
        order: Order,
        lane: int,
        offset: int,
        files: OpenFiles,
        reader: Executor,
        memory: Memory | Slots,
    ) -> None:
        self._order, self._lane, self._reader = order, lane, reader
        # Rows of a window that is shuffled may be anywhere in it.
        begin = offset if order.seed is None else order.window_at(lane, offset)[1]
        self._orders = _Orders(dataset, order, lane, begin)
        self._windows = _windows_of(dataset, order, lane, begin, files, memory, self._orders)
        self._ready: deque[Window] = deque()
        self._window: Window | None = None
        self._next = self._ask()

    def take(self, stretch: Stretch) -> Iterator[Pick]:
        """Some of its rows.

        Args:
            stretch: Which rows. All of them are after what was taken before.

        Yields:
            The rows.
        """
        offset, step, to, left = stretch.offset, stretch.step, stretch.places, len(stretch)
        while left:
            window = self._until(offset)
            here = min(left, -(-(window.end - offset) // step))
            at = offset - window.begin
            places = slice(at, at + (here - 1) * step + 1, step)
            yield Pick(window, places, slice(to.start, to.start + (here - 1) * to.step + 1, to.step))
            to = slice(to.start + here * to.step, to.stop, to.step)
            offset, left = offset + here * step, left - here

    def _until(self, offset: int) -> Window:
        while self._window is None or offset >= self._window.end:
            self._window = None  # which may hold the last of a piece
            if not self._ready:
                read = self._next.result()
                assert read is not None
                self._ready.extend(read)
                read.clear()  # the generator still knows the list
                self._next = self._ask()
            self._window = self._ready.popleft()
        return self._window

    def _ask(self) -> Future[list[Window] | None]:
        self._orders.draw()  # in this thread: the other one has enough to do
        return self._reader.submit(next, self._windows, None)


class _Orders:
    """How the windows of a lane are permuted, drawn for the next piece before it is read."""

    def __init__(self, dataset: FileDataset, order: Order, lane: int, begin: int) -> None:
        self._order, self._lane = order, lane
        self._drawn: dict[int, Any] = {}
        self._next = begin
        # Where pieces end, about: of large units, they are a window each.
        self._ends = itertools.accumulate(
            min(rows - first, dataset.window_rows) if rows > dataset.piece_rows else rows
            for rows in (sum(order.unit_rows[unit] for unit in units) for units in _runs(dataset, order, lane))
            for first in (range(0, rows, dataset.window_rows) if rows > dataset.piece_rows else [0])
        )

    def draw(self) -> None:
        """Draws those of the next piece."""
        if self._order.seed is None:
            return
        end = next((end for end in self._ends if end > self._next), self._next)
        while self._next < end:
            number, begin, last = self._order.window_at(self._lane, self._next)
            self._drawn[number] = self._order.shuffled(self._lane, number, last - begin)
            self._next = last

    def of(self, number: int, length: int) -> Any:
        """That of a window; None if rows stay as they are.

        Args:
            number: The window.
            length: How many rows it has.
        """
        if self._order.seed is None:
            return None
        drawn = self._drawn.pop(number, None)
        return self._order.shuffled(self._lane, number, length) if drawn is None else drawn


def slots_of(dataset: FileDataset, order: Order, together: int, spare: Spare) -> Slots:
    """Memory for as many shuffled windows as there are at a time.

    Args:
        dataset: The dataset.
        order: Its global order.
        together: How many consecutive positions of the global order are put together.
        spare: Where memory is from.
    """
    rows = min(order.window, max(order.lane_rows))
    piece = max(order.unit_rows)
    if all(file.kind == PARQUET for file in dataset.files):
        piece = max(min(piece, max(dataset.piece_rows, dataset.window_rows)), _together_rows(dataset, order))
    # Of each lane, those of a piece in use and of one that is read, with one at each of their ends that is in others as well;
    # and what is put together, of which each lane may begin and end within a window.
    count = len(order.lanes) * (2 * (-(-piece // order.window) + 2) + 2) + -(-together // order.window)
    in_all = sum(-(-rows // order.window) + 1 for rows in order.lane_rows)
    return Slots(rows, min(count, in_all), [like_of(field.type) for field in dataset.schema], spare)


# Functions, and not methods of the lane: a generator that knew it would keep its rows until the next garbage collection.
def _windows_of(
    dataset: FileDataset, order: Order, lane: int, begin: int, files: OpenFiles, memory: Memory | Slots, orders: _Orders
) -> Iterator[list[Window]]:
    """The windows of a lane from some row on, as many at a time as are whole after a piece was read."""
    schema = dataset.schema
    numbers = {name: number for number, name in enumerate(schema.names)}
    movable = [like_of(field.type) for field in schema]
    left: list[Window] = []
    for file, piece in _pieces_of(dataset, order, lane, begin, files):
        end = begin + piece.num_rows
        if order.seed is None:
            # All of the piece. What lies in an Arrow file stays there.
            like = movable if file.kind == PARQUET else [None] * len(schema)
            left.append(Window(begin, end, schema, like, None, memory))
        while order.seed is not None and (not left or left[-1].end < end):
            number, first, last = order.window_at(lane, left[-1].end if left else begin)
            left.append(Window(first, last, schema, movable, orders.of(number, last - first), memory))
        # Which rows of the piece each window has, and which of its rows the first of them is.
        parts = [(one, max(begin - one.begin, 0), slice(max(one.begin - begin, 0), min(one.end, end) - begin)) for one in left]
        for table in piece.tables:
            nbytes, column, rows = 0, None, None  # none of a table without columns, which stands for its rows
            for name, column in zip(table.column_names, table.columns):
                number = numbers[name]
                is_moved = left[0].columns[number] is not None
                rows = view(column, movable[number]) if is_moved else column
                for window, at, there in parts:
                    window.add(number, at, rows[there])
                nbytes += 0 if is_moved else column.nbytes
            if file.kind == PARQUET and nbytes:
                files.has_read(nbytes)
            del table, column, rows
        begin = end
        whole = [window for window in left if window.end <= end]
        left = [window for window in left if window.end > end]
        parts.clear()
        del window
        if whole:
            yield whole


def _pieces_of(dataset: FileDataset, order: Order, lane: int, skipped: int, files: OpenFiles) -> Iterator[tuple[DataFile, Piece]]:
    for units in _runs(dataset, order, lane):
        while units and skipped >= order.unit_rows[units[0]]:
            skipped -= order.unit_rows[units.pop(0)]
        if not units:
            continue
        file, _ = _file_of(dataset, units[0])
        numbers = [_file_of(dataset, unit)[1] for unit in units]
        is_small = sum(order.unit_rows[unit] for unit in units) <= dataset.piece_rows
        size = dataset.piece_rows if is_small else dataset.window_rows
        with of_train():
            for piece in pieces_of(files, file, numbers, dataset.schema, skipped=skipped, piece_rows=size):
                yield file, Piece(piece.num_rows, _of_train(piece.tables))
        skipped = 0


def _runs(dataset: FileDataset, order: Order, lane: int) -> Iterator[list[int]]:
    """The units of a lane, those together that are read at once: small ones of a file that follow each other."""
    most = _together_rows(dataset, order)
    run: list[int] = []
    rows = 0
    last: DataFile | None = None
    for unit in order.lanes[lane]:
        file, _ = _file_of(dataset, unit)
        if run and (file is not last or file.kind != PARQUET or rows + order.unit_rows[unit] > most):
            yield run
            run, rows = [], 0
        run.append(unit)
        rows, last = rows + order.unit_rows[unit], file
    if run:
        yield run


def _together_rows(dataset: FileDataset, order: Order) -> int:
    """How many rows of several units are read at once, at most."""
    return int(dataset.piece_rows * min(_IN_A_LANE, _IN_ALL_LANES / len(order.lanes)))


def _of_train(tables: Iterator[pyarrow.Table]) -> Iterator[pyarrow.Table]:
    with of_train():
        yield from tables


def _file_of(dataset: FileDataset, unit: int) -> tuple[DataFile, int]:
    """The file of a unit, and the unit's number there."""
    number = bisect.bisect_right(dataset.first_units, unit) - 1  # the last of those that begin there: others have no units
    return dataset.files[number], unit - dataset.first_units[number]
