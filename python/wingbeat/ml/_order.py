"""The order in which training reads the rows: of the seed, the epoch and the number of rows alone, and not of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from wingbeat.ml._stored import BLOCK_BYTES, KEPT_BYTES

if TYPE_CHECKING:
    import numpy

    Indices = numpy.ndarray[Any, Any]

# Up to this size, all rows are shuffled together. From a file that is larger, blocks would be read again and again.
WHOLE_BYTES = KEPT_BYTES
# Beyond it, the rows are divided into as many lanes, from which batches take rows in turn.
_LANES = 8
# Rows that lie together on a disk are read together: a lane shuffles blocks, and then the rows of as many blocks.
_BLOCKS_TOGETHER = 4


class Order:
    """An order of all rows for each epoch.

    A batch has rows of all lanes, so that labels that are sorted are no harm. At any time, rows of 8 MiB are read
    together at most, whatever the size of the data set.

    Args:
        rows: How many rows.
        row_bytes: What each takes.
        seed: The seed.
    """

    def __init__(self, rows: int, row_bytes: int, seed: int) -> None:
        self._rows = rows
        self._is_whole = rows * row_bytes <= WHOLE_BYTES
        self._block = max(1, BLOCK_BYTES // row_bytes)
        self._seed = seed % 2**64

    def chunks(self, epoch: int, rows: int) -> Iterator[Indices]:
        """The order of an epoch.

        Args:
            epoch: The epoch.
            rows: How many rows each chunk has; the last one has the rest.

        Yields:
            The numbers of the rows. Each is there once.
        """
        import numpy

        rest: list[Indices] = []
        held = 0
        for part in self._whole(epoch) if self._is_whole else self._interleaved(epoch):
            rest.append(part)
            held += len(part)
            if held >= rows:
                joined = rest[0] if len(rest) == 1 else numpy.concatenate(rest)
                last = held - held % rows
                yield from (joined[begin : begin + rows] for begin in range(0, last, rows))
                rest, held = [joined[last:]], held - last
        if held:
            yield numpy.concatenate(rest)

    def _whole(self, epoch: int) -> Iterator[Indices]:
        import numpy

        yield numpy.random.default_rng([self._seed, epoch]).permutation(self._rows)

    def _interleaved(self, epoch: int) -> Iterator[Indices]:
        import numpy

        lanes = [self._lane(epoch, lane) for lane in range(_LANES)]
        none = numpy.empty(0, dtype=numpy.int64)
        held = [none] * _LANES
        while True:
            held = [next(lane, none) if not len(rows) else rows for rows, lane in zip(held, lanes)]
            common = min(map(len, held))
            if not common:  # the first lanes have one row more than the others, or all are at their end
                yield numpy.concatenate(held)
                return
            yield numpy.stack([rows[:common] for rows in held], axis=1).ravel()
            held = [rows[common:] for rows in held]

    def _lane(self, epoch: int, lane: int) -> Iterator[Indices]:
        import numpy

        each, more = divmod(self._rows, _LANES)
        start = lane * each + min(lane, more)
        stop = start + each + (lane < more)
        random = numpy.random.default_rng([self._seed, epoch, lane])
        blocks = start + random.permutation((stop - start + self._block - 1) // self._block) * self._block
        for first in range(0, len(blocks), _BLOCKS_TOGETHER):
            together = blocks[first : first + _BLOCKS_TOGETHER]
            rows = (together[:, None] + numpy.arange(self._block)).ravel()
            # The lane's last block, wherever it is now, may be shorter.
            yield random.permutation(rows[rows < stop])
