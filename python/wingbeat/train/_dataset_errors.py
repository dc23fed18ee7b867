"""What may be wrong with a dataset that is read from files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from wingbeat._files._places import UnreadableError


class DatasetError(ValueError):
    """A dataset cannot be read. The text says which file or column, and what to do."""

    __module__ = "wingbeat.train"


class UnreadableFileError(DatasetError):
    """A file does not exist, is damaged, or is neither Parquet nor Arrow IPC.

    Attributes:
        path: The file.
    """

    __module__ = "wingbeat.train"

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} cannot be read: {why}")
        self.path, self.why = path, why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.why)


class SchemaMismatchError(DatasetError):
    """Two files of a dataset differ in a column.

    Attributes:
        field: The column.
        paths: The two files.
    """

    __module__ = "wingbeat.train"

    def __init__(self, field: str, paths: tuple[str, str], kinds: tuple[str, str]) -> None:
        super().__init__(
            f"the column {field!r} is {kinds[0]} in {paths[0]}, and {kinds[1]} in {paths[1]}; "
            "write the files with one schema, or leave the column out (columns=…)"
        )
        self.field, self.paths, self.kinds = field, paths, kinds

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.paths, self.kinds)


class MissingColumnError(DatasetError):
    """A dataset has no such column.

    Attributes:
        column: The name that was asked for.
    """

    __module__ = "wingbeat.train"

    def __init__(self, column: str, path: str, there: tuple[str, ...]) -> None:
        import difflib

        near = difflib.get_close_matches(column, there, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, there[:20]))}"
        super().__init__(f"{path} has no column {column!r}; {hint}")
        self.column, self.path, self.there = column, path, there

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.column, self.path, self.there)


class TooFewRowsError(DatasetError):
    """A dataset has no rows, or fewer than there are ranks."""

    __module__ = "wingbeat.train"


@contextlib.contextmanager
def of_train() -> Iterator[None]:
    """Makes an `UnreadableFileError` of what reading files raises."""
    try:
        yield
    except UnreadableError as error:
        raise UnreadableFileError(error.path, error.why) from error.__cause__
