"""A lane of a dataset's global order: its rows, read in windows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from wingbeat.train._files import DataFile, rows_of

if TYPE_CHECKING:
    import pyarrow

    from wingbeat.train._order import Order
    from wingbeat.train._source import FileDataset


class Lane:
    """Reads a lane from some row on. While a window is in use, the next is being read.

    Args:
        dataset: The dataset.
        order: Its global order.
        lane: The lane.
        offset: The first row that will be asked for. Units before it are not read.
        reader: What reads, one window after the other.
    """

    def __init__(self, dataset: FileDataset, order: Order, lane: int, offset: int, reader: Executor) -> None:
        self._dataset, self._order, self._lane, self._reader = dataset, order, lane, reader
        _, begin, _ = order.window_at(lane, offset)
        self._pieces = self._read(begin)
        self._rest: pyarrow.Table | None = None
        self._next: Future[_Window] | None = self._load(begin)
        self._window: _Window | None = None

    def take(self, offsets: Any) -> list[pyarrow.Table]:
        """The rows with these offsets.

        Args:
            offsets: An increasing array. All of it is after what was taken before.

        Returns:
            Tables that hold them one after the other.
        """
        import numpy as np

        taken = []
        while len(offsets):
            window = self._until(int(offsets[0]))
            here = int(np.searchsorted(offsets, window.end))
            taken.append(window.take(offsets[:here] - window.begin))
            offsets = offsets[here:]
        return taken

    def _until(self, offset: int) -> _Window:
        while self._window is None or offset >= self._window.end:
            assert self._next is not None
            self._window = None  # not two besides the one that is read next
            self._window = self._next.result()
            self._next = self._load(self._window.end) if self._window.end < self._order.lane_rows[self._lane] else None
        return self._window

    def _load(self, begin: int) -> Future[_Window]:
        number, begin, end = self._order.window_at(self._lane, begin)
        return self._reader.submit(self._window_of, number, begin, end)

    def _window_of(self, number: int, begin: int, end: int) -> _Window:
        import pyarrow

        pieces, missing = [], end - begin
        while missing:
            piece = self._rest if self._rest is not None else next(self._pieces)
            pieces.append(piece.slice(0, missing))
            self._rest = piece.slice(missing) if piece.num_rows > missing else None
            missing -= pieces[-1].num_rows
        table = pieces[0] if len(pieces) == 1 else pyarrow.concat_tables(pieces).combine_chunks()
        return _Window(begin, end, table, self._order.shuffled(self._lane, number, end - begin))

    def _read(self, skipped: int) -> Iterator[pyarrow.Table]:
        for unit in self._order.lanes[self._lane]:
            rows = self._order.unit_rows[unit]
            if skipped >= rows:
                skipped -= rows
                continue
            file, number = self._file_of(unit)
            yield from rows_of(
                self._dataset.filesystem,
                file,
                number,
                self._dataset.schema,
                skipped=skipped,
                piece_rows=min(self._dataset.window_rows, _PIECE_ROWS),
            )
            skipped = 0

    def _file_of(self, unit: int) -> tuple[DataFile, int]:
        """The file of a unit, and the unit's number there."""
        for file in self._dataset.files:
            if unit < len(file.unit_rows):
                return file, unit
            unit -= len(file.unit_rows)
        raise IndexError(unit)


# Rows that are decoded at a time: enough that the cost of a call does not count.
_PIECE_ROWS = 1 << 16


class _Window:
    """Rows `begin` to `end` of a lane. `shuffled` says in which order they are taken."""

    def __init__(self, begin: int, end: int, table: pyarrow.Table, shuffled: Any) -> None:
        self.begin, self.end, self.table, self.shuffled = begin, end, table, shuffled

    def take(self, places: Any) -> pyarrow.Table:
        if self.shuffled is not None:
            return self.table.take(self.shuffled[places])
        first, count = int(places[0]), len(places)
        if int(places[-1]) - first + 1 == count:
            return self.table.slice(first, count)
        return self.table.take(places)
