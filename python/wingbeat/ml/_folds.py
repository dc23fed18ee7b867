"""Folds of a data set, which are chosen row by row while it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wingbeat.ml import _columns
from wingbeat.ml._errors import InvalidFeatures, InvalidFolds
from wingbeat.ml._source import Batch

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]


@dataclass(frozen=True)
class RandomFold:
    """The rows of a random fold, or those of all others.

    Of as many rows in a row as there are folds, each fold has one: folds differ by one row at most. Which one depends on
    the seed and the row's place alone, so that nothing is kept for a row, and each rank finds the same.

    Attributes:
        fold: The fold.
        folds: How many there are.
        seed: The seed.
        is_inside: Whether its own rows are chosen.
        outer: The rows that were chosen before, of which these are chosen; None for all. Of those, the first is row 0:
            otherwise, each fold of a cross-validation inside of another might be one that the outer has taken away.
    """

    fold: int
    folds: int
    seed: int
    is_inside: bool
    outer: RandomFold | None = None

    @property
    def columns(self) -> list[str]:
        return []

    def chosen(self, batch: Batch) -> Array:
        import numpy

        _, place, chosen = self._together(batch.rows)
        found: Array = numpy.take_along_axis(chosen, place[:, None], axis=1)[:, 0]
        return found

    def numbers(self, rows: Array) -> Array:
        """Counts the chosen rows.

        Args:
            rows: Where chosen rows are in the data set.

        Returns:
            How many chosen rows are before each.
        """
        import numpy

        firsts, place, chosen = self._together(rows)
        before = chosen & (numpy.arange(self.folds) < place[:, None])
        counted: Array = firsts * (1 if self.is_inside else self.folds - 1) + before.sum(axis=1)
        return counted

    def _together(self, rows: Array) -> tuple[Array, Array, Array]:
        """Divides rows into as many in a row as there are folds. Returns of each row the number of its division and its place
        in that, and whether each row of the division is chosen."""
        import numpy

        firsts, place = numpy.divmod(rows if self.outer is None else self.outer.numbers(rows), self.folds)
        numbers = _random(firsts[:, None] * self.folds + numpy.arange(self.folds), self.seed)
        return firsts, place, (numbers.argsort(axis=1).argsort(axis=1) == self.fold) == self.is_inside


@dataclass(frozen=True)
class NamedFold:
    """The rows of a fold that a column names, or those of all others.

    Attributes:
        fold: The fold.
        folds: How many there are.
        column: The column.
        is_inside: Whether its own rows are chosen.
    """

    fold: int
    folds: int
    column: str
    is_inside: bool

    @property
    def columns(self) -> list[str]:
        return [self.column]

    def chosen(self, batch: Batch) -> Array:
        import numpy

        try:
            folds = _columns.scalars(batch, self.column)
        except InvalidFeatures as error:
            raise InvalidFolds(str(error), column=self.column, row=None) from None
        wrong = ~numpy.isin(folds, numpy.arange(self.folds))
        if wrong.any():
            place = int(wrong.argmax())
            row, found = int(batch.rows[place]), folds[place]
            value = "null or NaN" if numpy.isnan(found) else f"{found:g}"
            message = f"column {self.column!r}, row {row}: the fold is {value}, and has to be 0 to {self.folds - 1}"
            raise InvalidFolds(message, column=self.column, row=row)
        inside: Array = (folds == self.fold) == self.is_inside
        return inside


def _random(numbers: Array, seed: int) -> Array:
    """A random number of 64 bits for each number: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators" (2014), with the constants of Java's SplittableRandom."""
    import numpy

    with numpy.errstate(over="ignore"):
        state = (numbers.astype(numpy.uint64) + numpy.uint64(seed % 2**64)) * numpy.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        mixed: Array = state ^ (state >> numpy.uint64(31))
    return mixed
