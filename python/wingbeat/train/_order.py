"""The global order of a dataset's rows: which row is where, whatever the number of ranks.

1. The units (row groups of Parquet, record batches of Arrow IPC) are put in order: that of the files, or with a seed, a
   permutation of them drawn from (seed, epoch, 0).
2. In this order, each unit is dealt whole to one of L lanes: to the one with the fewest rows so far, and the first of those.
3. A lane's rows are cut into windows of W rows. The first window of lane l has ceil(W (l + 1) / L), so that lanes do not need
   their next windows all at once. With a seed, each window's rows are permuted, by what is drawn from (seed, epoch, 1, lane,
   window).
4. The global order takes one row of each lane in turn, and passes over lanes that have no rows left.

Permutations are those of `numpy.random.RandomState`, whose streams NumPy has frozen (NEP 19), over an `MT19937` that is seeded by
`SeedSequence` with these numbers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_UNITS, _WINDOWS = 0, 1  # what a permutation is drawn for


def permutation(length: int, *drawn_for: int) -> Any:
    """The numbers from 0 to `length - 1` in the order that these seeds draw.

    Args:
        length: How many.
        *drawn_for: Non-negative integers.

    Returns:
        An array of int64.
    """
    import numpy as np

    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(drawn_for))).permutation(length)


@dataclass(frozen=True)
class Phase:
    """A stretch of the global order in which the same lanes have rows.

    Attributes:
        position: The global position at which it begins.
        offset: How many rows of each of its lanes come before it.
        lanes: The lanes, in turn.
    """

    position: int
    offset: int
    lanes: tuple[int, ...]


@dataclass(frozen=True)
class Stretch:
    """Rows of a lane at equal distances.

    Attributes:
        lane: The lane.
        offset: The offset of the first of them among the rows of the lane.
        step: How many rows of the lane further the next one is.
        places: Which ones they are of those that were asked for: a slice with a stop.
    """

    lane: int
    offset: int
    step: int
    places: slice

    def __len__(self) -> int:
        return len(range(self.places.start, self.places.stop, self.places.step))


class Order:
    """The global order of one epoch.

    Args:
        unit_rows: How many rows each unit has.
        lanes: How many lanes there are.
        window: How many rows a window has.
        seed: The seed of the shuffle; None for the order of the files.
        epoch: The epoch, from 0.
    """

    def __init__(self, unit_rows: Sequence[int], lanes: int, window: int, seed: int | None, epoch: int) -> None:
        self.unit_rows, self.window, self.seed, self.epoch = unit_rows, window, seed, epoch
        self.rows = int(sum(unit_rows))
        count = len(unit_rows)
        units = range(count) if seed is None else permutation(count, seed, epoch, _UNITS).tolist()
        self.lanes: list[list[int]] = [[] for _ in range(lanes)]
        self.lane_rows = [0] * lanes
        fewest = [(0, lane) for lane in range(lanes)]
        for unit in units:
            rows, lane = fewest[0]
            self.lanes[lane].append(unit)
            self.lane_rows[lane] = rows + unit_rows[unit]
            heapq.heapreplace(fewest, (self.lane_rows[lane], lane))
        self.phases = _phases(self.lane_rows)

    def stretches(self, begin: int, count: int, step: int) -> Iterator[Stretch]:
        """Where the rows at the global positions `begin`, `begin + step` and so on are.

        Args:
            begin: The first position.
            count: How many positions.
            step: Their distance.

        Yields:
            Rows of a lane at equal distances. Those of a lane follow each other.
        """
        done = 0
        for number, phase in enumerate(self.phases):
            end = self.phases[number + 1].position if number + 1 < len(self.phases) else self.rows
            till = min(count, -(-(end - begin) // step))
            lanes = len(phase.lanes)
            common = math.gcd(lanes, step)
            # After so many positions, it is the first lane's turn again.
            period = lanes // common
            for first in range(done, min(done + period, till)):
                at = begin + step * first - phase.position
                places = slice(first, till, period)
                yield Stretch(phase.lanes[at % lanes], phase.offset + at // lanes, step // common, places)
            done = max(done, till)

    def window_at(self, lane: int, offset: int) -> tuple[int, int, int]:
        """The window of a lane in which the row with this offset is.

        Args:
            lane: The lane.
            offset: The row's offset among the rows of this lane.

        Returns:
            The window's number, and the offsets of its first row and of the row after its last.
        """
        first = -(-self.window * (lane + 1) // len(self.lanes))
        if offset < first:
            number, begin, end = 0, 0, first
        else:
            number = 1 + (offset - first) // self.window
            begin = first + (number - 1) * self.window
            end = begin + self.window
        return number, begin, min(end, self.lane_rows[lane])

    def shuffled(self, lane: int, number: int, length: int) -> Any:
        """How a window's rows are permuted with a seed: the i-th row of the order is the one with the i-th of these numbers.

        Args:
            lane: The lane.
            number: The window's number.
            length: How many rows it has.

        Returns:
            The numbers, an array.
        """
        assert self.seed is not None
        return permutation(length, self.seed, self.epoch, _WINDOWS, lane, number)


def _phases(lane_rows: Sequence[int]) -> list[Phase]:
    phases, position, offset = [], 0, 0
    for length in sorted(set(lane_rows) - {0}):
        lanes = tuple(lane for lane, rows in enumerate(lane_rows) if rows > offset)
        phases.append(Phase(position, offset, lanes))
        position += (length - offset) * len(lanes)
        offset = length
    return phases
