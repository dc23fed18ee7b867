"""What can be wrong with a data set, a parameter or a trial. Each class is an error that a program can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class MlError(Exception):
    """An estimator, a transformer or an evaluator cannot do what it was asked to.

    Args:
        message: What failed, on what, and what to do.
        **details: Attributes of the error.
    """

    __module__ = "wingbeat.ml"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.__dict__.update(details)


class DatasetError(MlError, ValueError):
    """A data set cannot be used."""

    __module__ = "wingbeat.ml"


class UnsupportedDataset(MlError, TypeError):
    """An object is not a data set."""

    __module__ = "wingbeat.ml"


class MissingColumn(DatasetError, KeyError):
    """A column is not in the data set.

    Attributes:
        column: Its name.
        nearest: The name in the data set that is most like it; None if none is.
    """

    __module__ = "wingbeat.ml"
    column: str
    nearest: str | None

    def __str__(self) -> str:  # KeyError would show the text with quotes around it
        return str(self.args[0])


class ExistingColumn(DatasetError):
    """The output column of a transformer is in the data set already.

    Attributes:
        column: Its name.
    """

    __module__ = "wingbeat.ml"
    column: str


class InvalidFeatures(DatasetError):
    """A feature is null, NaN or infinite, arrays differ in length, or the column holds something else.

    Attributes:
        column: The column.
        row: The first such row, counted from 0; None if it is unknown.
    """

    __module__ = "wingbeat.ml"
    column: str
    row: int | None


class InvalidFolds(DatasetError):
    """The fold of a row (`CrossValidator.foldCol`) is none of those that there are.

    Attributes:
        column: The column.
        row: The first such row, counted from 0; None if it is unknown, or if the column holds no numbers.
    """

    __module__ = "wingbeat.ml"
    column: str
    row: int | None


class InvalidLabels(DatasetError):
    """Labels are null, NaN, or not those that the algorithm needs.

    Attributes:
        column: The column.
        row: The first such row, counted from 0; None if it is unknown, or if no single row is wrong.
        labels: The labels that were found, where these are what is wrong; else None.
    """

    __module__ = "wingbeat.ml"
    column: str
    row: int | None
    labels: list[Any] | None


class OneClass(InvalidLabels):
    """All rows have the same label."""

    __module__ = "wingbeat.ml"


class InvalidWeights(DatasetError):
    """A weight is null, NaN, infinite or negative, or all of them are 0.

    Attributes:
        column: The column.
        row: The first such row, counted from 0; None if it is unknown.
    """

    __module__ = "wingbeat.ml"
    column: str
    row: int | None


class TooFewRows(DatasetError):
    """The data set has fewer rows than are needed.

    Attributes:
        rows: How many it has.
        needed: How many it needs at least.
    """

    __module__ = "wingbeat.ml"
    rows: int
    needed: int


class EmptyDataset(TooFewRows):
    """The data set has no rows."""

    __module__ = "wingbeat.ml"


class TooManyRanks(TooFewRows):
    """There are more ranks than rows."""

    __module__ = "wingbeat.ml"


class UnreadableFile(MlError, OSError):
    """A file cannot be read as Parquet.

    Attributes:
        file: Its path.
    """

    __module__ = "wingbeat.ml"
    file: str

    def __str__(self) -> str:
        return str(self.args[0])


class SchemaMismatch(DatasetError):
    """A file of a data set has other columns than the first one.

    Attributes:
        file: Its path.
        column: The first column that differs.
    """

    __module__ = "wingbeat.ml"
    file: str
    column: str


class UnknownParameter(MlError, TypeError, AttributeError):
    """A class has no parameter of this name.

    Attributes:
        nearest: The parameter that is most like it; None if none is.
    """

    __module__ = "wingbeat.ml"
    nearest: str | None


class InvalidParameter(MlError, ValueError):
    """A parameter cannot have this value."""

    __module__ = "wingbeat.ml"


class TrainingDiverged(MlError, ArithmeticError):
    """The loss became infinite or NaN.

    Attributes:
        epoch: The epoch, counted from 0.
    """

    __module__ = "wingbeat.ml"
    epoch: int


class TrialFailed(MlError, RuntimeError):
    """A trial of a `CrossValidator` failed. The exception that it raised is the cause.

    Attributes:
        fold: The fold.
        params: The parameters by name.
    """

    __module__ = "wingbeat.ml"
    fold: int
    params: dict[str, Any]


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that is most like another.

    Args:
        name: The other.
        names: Those to choose from.

    Returns:
        The nearest one; None if none is near.
    """
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)), None)


def missing_column(column: str, existing: Iterable[str], where: str) -> MissingColumn:
    """Says that a column is not there.

    Args:
        column: The column.
        existing: The columns that are there.
        where: What the data set is called.

    Returns:
        The error.
    """
    names = list(existing)
    near = nearest(column, names)
    shown = ", ".join(map(repr, names[:20])) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    hint = f"; did you mean {near!r}?" if near else ""
    return MissingColumn(f"{where} has no column {column!r}{hint} Its columns are {shown}.", column=column, nearest=near)
