"""A lane of a dataset's global order: its rows, read in windows."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

from wingbeat._files._contents import DataFile
from wingbeat._files._reading import OpenFiles, rows_of
from wingbeat.train._dataset_errors import of_train
from wingbeat.train._gather import Pick, Window

if TYPE_CHECKING:
    import pyarrow

    from wingbeat.train._order import Order, Stretch
    from wingbeat.train._source import FileDataset


class Lane:
    """Reads a lane from some row on. While a piece of it (a small unit, or a window of a large one) is in use, the next is read.

    Args:
        dataset: The dataset.
        order: Its global order.
        lane: The lane.
        offset: The first row that will be asked for. Units before it are not read.
        files: What opens the files, for `reader` alone.
        reader: What reads, one piece after the other.
    """

    def __init__(
        self, dataset: FileDataset, order: Order, lane: int, offset: int, files: OpenFiles, reader: Executor
    ) -> None:
        self._order, self._lane, self._reader = order, lane, reader
        # Rows of a window that is shuffled may be anywhere in it.
        self._begin = offset if order.seed is None else order.window_at(lane, offset)[1]
        self._pieces = _read(dataset, order, lane, self._begin, files)
        self._piece: pyarrow.Table | None = None
        self._next: Future[pyarrow.Table | None] = reader.submit(next, self._pieces, None)
        self._window: Window | None = None

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
            if self._window is not None:
                self._begin = self._window.end
                self._window = None  # which may hold the last of a piece
            self._window = self._window_from(self._begin)
        return self._window

    def _window_from(self, begin: int) -> Window:
        import pyarrow

        number, _, end = self._order.window_at(self._lane, begin)
        parts, missing = [], end - begin
        while missing:
            if self._piece is None:
                self._piece = self._next.result()
                assert self._piece is not None
                self._next = self._reader.submit(next, self._pieces, None)
            parts.append(self._piece.slice(0, missing))
            self._piece = self._piece.slice(missing) if self._piece.num_rows > missing else None
            missing -= parts[-1].num_rows
        order, lane = self._order, self._lane
        draw = None if order.seed is None else lambda: order.shuffled(lane, number, end - begin)
        return Window(begin, end, pyarrow.concat_tables(parts), draw)


# Functions, and not methods of the lane: a generator that knew it would keep its rows until the next garbage collection.
def _read(dataset: FileDataset, order: Order, lane: int, skipped: int, files: OpenFiles) -> Iterator[pyarrow.Table]:
    for unit in order.lanes[lane]:
        rows = order.unit_rows[unit]
        if skipped >= rows:
            skipped -= rows
            continue
        file, number = _file_of(dataset, unit)
        with of_train():
            yield from rows_of(
                files,
                file,
                number,
                dataset.schema,
                skipped=skipped,
                piece_rows=dataset.piece_rows if rows <= dataset.piece_rows else dataset.window_rows,
            )
        skipped = 0


def _file_of(dataset: FileDataset, unit: int) -> tuple[DataFile, int]:
    """The file of a unit, and the unit's number there."""
    number = bisect.bisect_right(dataset.first_units, unit) - 1  # the last of those that begin there: others have no units
    return dataset.files[number], unit - dataset.first_units[number]
