"""The rows that a process trains on, checked and as float32: in memory, or on disk where they are many."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wingbeat.ml import _columns
from wingbeat.ml._errors import EmptyDataset, InvalidFeatures, InvalidLabels, InvalidWeights, OneClass, TooManyRanks
from wingbeat.ml._order import WHOLE_BYTES
from wingbeat.ml._source import Batch, Source
from wingbeat.ml._stored import StoredRows

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]

# If there may be more than this, rows go to a file in the folder for temporary files.
MEMORY_BYTES = WHOLE_BYTES
# Labels that an error lists.
_SHOWN = 12


@dataclass(frozen=True)
class Columns:
    """The columns that training reads.

    Attributes:
        features: Arrays.
        label: Labels.
        weight: Weights; None for 1.
    """

    features: str
    label: str
    weight: str | None

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([self.features, self.label, *([self.weight] if self.weight else [])]))


@dataclass(frozen=True)
class Facts:
    """What is known of rows.

    Attributes:
        rows: How many there are.
        features: The length of the arrays; None if there are no rows.
        labels: The distinct labels, sorted.
        weight: The sum of the weights.
    """

    rows: int
    features: int | None
    labels: tuple[float, ...]
    weight: float

    def and_then(self, other: Facts, columns: Columns) -> Facts:
        """What is known of these rows and others.

        Args:
            other: What is known of the others.
            columns: Where they are from.

        Returns:
            What is known of all.

        Raises:
            InvalidFeatures: The arrays differ in length.
        """
        if self.features is not None and other.features is not None and self.features != other.features:
            message = f"column {columns.features!r}: some arrays have {self.features} elements, and others {other.features}"
            raise InvalidFeatures(message, column=columns.features, row=None)
        labels = tuple(sorted({*self.labels, *other.labels}))
        features = other.features if self.features is None else self.features
        return Facts(self.rows + other.rows, features, labels, self.weight + other.weight)

    def classes(self, columns: Columns, ranks: int) -> int:
        """Checks that a classifier can be trained.

        Args:
            columns: Where the rows are from.
            ranks: How many ranks would train.

        Returns:
            How many classes there are.

        Raises:
            EmptyDataset: There are no rows.
            InvalidFeatures: There are no features.
            TooManyRanks: There are fewer rows than ranks.
            InvalidLabels: The labels are not 0, 1, 2 and so on.
            OneClass: There is one label only.
            InvalidWeights: All weights are 0.
        """
        if not self.rows:
            raise EmptyDataset("the data set has no rows to train on", rows=0, needed=2)
        if self.rows < ranks:
            message = f"{ranks} ranks cannot train on {self.rows} rows: set numTrainWorkers to {self.rows} at most"
            raise TooManyRanks(message, rows=self.rows, needed=ranks)
        if not self.features:
            raise InvalidFeatures(f"the arrays in column {columns.features!r} are empty", column=columns.features, row=None)
        _check_labels(columns.label, self.labels)
        if not self.weight > 0:
            message = f"all weights in column {columns.weight!r} are 0, or so small that they are 0 as float32: multiply them"
            raise InvalidWeights(message, column=columns.weight, row=None)
        return len(self.labels)


NOTHING = Facts(0, None, (), 0.0)


class Examples:
    """Rows to train on: for each its features, a 1 if there is an intercept, its label and its weight.

    They go to a file if there may be more than `MEMORY_BYTES`.

    Args:
        source: The data set.
        columns: Its columns.
        start: The first row.
        stop: The row after the last one; None for all.
        intercept: Whether there is an intercept.

    Attributes:
        facts: What is known of the rows.
        width: The float32s of a row.

    Raises:
        InvalidFeatures: A feature cannot be used.
        InvalidLabels: A label cannot be used.
        InvalidWeights: A weight cannot be used.
        MlError: The rows do not fit on the disk.
    """

    def __init__(self, source: Source, columns: Columns, start: int, stop: int | None, intercept: bool) -> None:
        import pyarrow

        self.facts = NOTHING
        self.width = 0
        parts: list[Array] = []
        stored: StoredRows | None = None
        most = (source.num_rows if stop is None else stop) - start
        for batch in source.batches(columns.names, start, stop):
            if not batch.data.num_rows:
                continue
            rows, facts = _examples(batch, columns, self.facts.features, intercept)
            self.facts = self.facts.and_then(facts, columns)
            self.width = rows.shape[1]
            if stored is None and 4 * most * self.width > MEMORY_BYTES:
                stored = StoredRows(self.width)
            if stored is None:
                parts.append(rows)
            else:
                stored.add(rows)
        pyarrow.default_memory_pool().release_unused()
        self._rows = _joined(parts) if stored is None else stored

    @property
    def is_in_memory(self) -> bool:
        """Whether the rows are in memory, and so may be pickled."""
        return not isinstance(self._rows, StoredRows)

    def part(self, start: int, stop: int) -> Examples:
        """Some of these rows, which are all in memory. Their facts are the number of rows alone.

        Args:
            start: The first.
            stop: The one after the last.

        Returns:
            The rows.
        """
        part = copy.copy(self)
        assert not isinstance(self._rows, StoredRows)
        part._rows = self._rows[start:stop]
        part.facts = dataclasses.replace(NOTHING, rows=stop - start, features=self.facts.features)
        return part

    def read(self, numbers: Array) -> Array:
        """Reads rows.

        Args:
            numbers: Which, counted from the first of these.

        Returns:
            A matrix of float32, with a row for each.
        """
        found: Array = self._rows[numbers]
        return found


def check(source: Source, columns: Columns) -> Facts:
    """Passes over a data set, and keeps none of its rows.

    Args:
        source: The data set.
        columns: The columns that would be trained on.

    Returns:
        What is known of the rows.

    Raises:
        InvalidFeatures: A feature cannot be used.
        InvalidLabels: A label cannot be used.
        InvalidWeights: A weight cannot be used.
    """
    facts = NOTHING
    for batch in source.batches(columns.names):
        facts = facts.and_then(_examples(batch, columns, facts.features, False)[1], columns)
    return facts


def _examples(batch: Batch, columns: Columns, size: int | None, intercept: bool) -> tuple[Array, Facts]:
    import numpy

    features = _columns.features(batch, columns.features, size)
    labels = _columns.labels(batch, columns.label)
    count = len(labels)
    weights = numpy.ones(count) if columns.weight is None else _columns.weights(batch, columns.weight)
    distinct = numpy.unique(labels)
    # What other batches hold cannot make these right.
    if distinct.size and (bool((distinct != numpy.floor(distinct)).any()) or distinct[0] < 0):
        raise _wrong_labels(columns.label, tuple(distinct.tolist()))
    parts = [features, *([numpy.ones((count, 1))] if intercept else []), labels[:, None], weights[:, None]]
    with numpy.errstate(over="ignore"):
        rows = numpy.concatenate(parts, axis=1, dtype=numpy.float32, casting="same_kind")
    bad = ~numpy.isfinite(rows[:, : features.shape[1]])
    if bad.any():
        row, element = map(int, numpy.argwhere(bad)[0])
        where = int(batch.rows[row])
        message = f"column {columns.features!r}, row {where}: element {element} is too large for float32"
        raise InvalidFeatures(message, column=columns.features, row=where)
    size = features.shape[1] if count else size
    # Of the weights as they are used: float32 has no 1e-50.
    weight = float(rows[:, -1].sum(dtype=numpy.float64))
    return rows, Facts(count, size, tuple(distinct.tolist()), weight)


def _check_labels(column: str, labels: Sequence[float]) -> None:
    """Checks that labels are 0, 1, 2 and so on, each at least once."""
    if len(labels) == 1:
        message = f"all rows have the label {labels[0]:g} in column {column!r}: a classifier needs two classes"
        raise OneClass(message, column=column, row=None, labels=[*labels])
    if list(labels) != list(range(len(labels))):
        raise _wrong_labels(column, labels)


def _wrong_labels(column: str, labels: Sequence[float]) -> InvalidLabels:
    texts = [f"{label:g}" for label in labels]
    shown = ", ".join(texts[:_SHOWN]) + (f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")
    if any(label != int(label) for label in labels):
        hint = "labels are integers, each standing for a class"
    elif labels[0] == 1 and list(labels) == list(range(1, len(labels) + 1)):
        hint = "subtract 1"
    elif min(labels) < 0:
        hint = "map them to 0, 1, 2 and so on"
    else:
        missing = next(label for label in range(len(labels)) if label not in labels)
        hint = f"{missing} is missing: map them to 0 to {len(labels) - 1}"
    wanted = f"0 to {len(labels) - 1}" if len(labels) > 1 else "0, 1, 2 and so on"
    message = f"the labels in column {column!r} are {shown}, and have to be {wanted}: {hint}"
    return InvalidLabels(message, column=column, row=None, labels=[*labels])


def _joined(parts: list[Array]) -> Array:
    import numpy

    return numpy.concatenate(parts) if parts else numpy.empty((0, 0), dtype=numpy.float32)
