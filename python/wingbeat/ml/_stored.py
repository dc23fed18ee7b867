"""Rows in a file without a name, of which a few blocks are in memory at a time."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

from wingbeat.ml._errors import MlError

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]

# What is read at once, and kept: training shuffles blocks of this size, and then the rows of a few of them.
BLOCK_BYTES = 256 << 10
# What may be kept. Not by mapping the file: the kernel maps pages around each that is touched, and all of them count.
KEPT_BYTES = 24 << 20


class StoredRows:
    """Rows of float32 in a file that is gone when this process is, however that ends.

    Args:
        width: The float32s of a row.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._block = max(1, BLOCK_BYTES // (4 * width))
        self._blocks: dict[int, Array] = {}  # in the order of their last use
        self._file = tempfile.TemporaryFile(prefix="wingbeat-rows-")

    def add(self, rows: Array) -> None:
        """Appends rows.

        Args:
            rows: The rows.

        Raises:
            MlError: They do not fit on the disk.
        """
        try:
            self._file.write(rows.data)
        except OSError as error:
            folder = tempfile.gettempdir()
            raise MlError(f"cannot keep rows in {folder} during training: {error}; set TMPDIR to a folder with room") from error

    def __getitem__(self, numbers: Array) -> Array:
        import numpy

        found = numpy.empty((len(numbers), self._width), dtype=numpy.float32)
        order = numpy.argsort(numbers, kind="stable")
        blocks, offsets = numpy.divmod(numbers[order], self._block)
        starts = numpy.flatnonzero(numpy.diff(blocks, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], len(blocks)]):
            found[order[start:stop]] = self._read(int(blocks[start]))[offsets[start:stop]]
        return found

    def _read(self, block: int) -> Array:
        import numpy

        rows = self._blocks.pop(block, None)
        if rows is None:
            size = 4 * self._width * self._block
            self._file.flush()
            data = os.pread(self._file.fileno(), size, block * size)
            rows = numpy.frombuffer(data, dtype=numpy.float32).reshape(-1, self._width)
            while len(self._blocks) * size >= KEPT_BYTES:
                self._blocks.pop(next(iter(self._blocks)))
        self._blocks[block] = rows
        return rows
