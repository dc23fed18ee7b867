"""Parquet files as a source: local, or wherever pyarrow or fsspec opens a URL. Nothing is read before it is used."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wingbeat import _interrupts
from wingbeat._files import _places
from wingbeat._files._contents import PARQUET, DataFile, Inspected, first_difference, inspect
from wingbeat._files._reading import OpenFiles, rows_of
from wingbeat.ml._errors import SchemaMismatch, UnreadableFile
from wingbeat.ml._source import BATCH_ROWS, Batch, Source

if TYPE_CHECKING:
    import pyarrow

# Footers that are read at once: an object store takes tens of milliseconds for each.
_FOOTERS_AT_ONCE = 16
# What a batch takes, about, so that wide rows do not fill the memory.
_BATCH_BYTES = 4 << 20
# Bytes of a file that are copied at once: the least that S3 takes as a part of an object is 5 MiB.
_COPIED_BYTES = 8 << 20


@dataclass(frozen=True)
class _Part:
    """A file.

    Attributes:
        filesystem: What opens it.
        file: What is in it.
        nbytes: Its size, uncompressed.
    """

    filesystem: Any
    file: DataFile
    nbytes: int

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def num_rows(self) -> int:
        return sum(self.file.unit_rows)


class FileSource(Source):
    """Parquet files that have the same columns.

    Args:
        parts: The files.
        schema: Their schema.
    """

    def __init__(self, parts: Sequence[_Part], schema: pyarrow.Schema) -> None:
        self.name = parts[0].path if len(parts) == 1 else f"{parts[0].path} (and {len(parts) - 1} more files)"
        self._parts = tuple(parts)
        self._schema = schema
        self._num_rows = sum(part.num_rows for part in parts)

    @property
    def column_names(self) -> list[str]:
        return list(self._schema.names)

    @property
    def num_rows(self) -> int:
        return self._num_rows

    @property
    def is_in_files(self) -> bool:
        return True

    def schema(self, columns: Sequence[str]) -> pyarrow.Schema:
        import pyarrow

        self.require(columns)
        return pyarrow.schema([self._schema.field(name) for name in columns])

    def nbytes(self, columns: Sequence[str]) -> int:
        return sum(part.nbytes for part in self._parts)

    def split(self, parts: int) -> list[tuple[int, int]]:
        """Divides the rows into consecutive ranges, at the ends of row groups where that leaves them about equal: a row
        group can only be decoded from its beginning."""
        ends, row = [0], 0
        for rows in (rows for part in self._parts for rows in part.file.unit_rows):
            row += rows
            ends.append(row)
        slack = self._num_rows // parts // 8
        chosen = []
        for ideal in (self._num_rows * part // parts for part in range(parts + 1)):
            nearest = min(ends, key=lambda end: abs(end - ideal))
            chosen.append(nearest if abs(nearest - ideal) <= slack else ideal)
        return list(zip(chosen, chosen[1:]))

    def batches(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        last = self._num_rows if stop is None else min(stop, self._num_rows)
        schema = self.schema(columns)
        first = 0
        for part in self._parts:
            end = first + part.num_rows
            if first < last and end > start:
                with _of_ml("read {} as Parquet"):
                    yield from _read(part, first, schema, start, last, len(self._parts) > 1)
            first = end


def open_files(paths: Sequence[str | os.PathLike[str]]) -> FileSource:
    """Finds Parquet files, and reads their footers.

    Args:
        paths: Files and folders. A folder stands for the files in it and below whose names end with `.parquet`, without
            those that begin with `_` or `.`, in the order of their paths.

    Returns:
        The source.

    Raises:
        UnreadableFile: A file is not there, or is no Parquet file, or a folder has none.
        SchemaMismatch: A file has other columns than the first one.
    """
    found = [file for path in paths for file in _find(os.fspath(path))]
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as threads, _of_ml("read {} as Parquet"):
        inspected = list(threads.map(lambda one: inspect(one[0], one[1], PARQUET), found))
    parts = [_part(filesystem, path, about) for (filesystem, path), about in zip(found, inspected)]
    first = inspected[0].schema
    for part, about in zip(parts[1:], inspected[1:]):
        differs = first_difference(first, about.schema, [*first.names, *about.schema.names])
        if differs is not None:
            raise _mismatch(parts[0].path, part.path, *differs)
    return FileSource(parts, first)


def _part(filesystem: Any, path: str, about: Inspected) -> _Part:
    file = DataFile(path, PARQUET, about.unit_rows, size=about.size, modified_ns=about.modified_ns)
    return _Part(filesystem, file, about.nbytes)


def write_file(source: Source, path: str) -> None:
    """Writes a data set as one Parquet file, batch by batch. The file appears, or is replaced, once it is whole.

    Until then it has another name. An object store copies it to rename it; where it cannot, this process does, and a file that
    is replaced is gone if that fails.

    Args:
        source: The data set.
        path: The file's path or URL.

    Raises:
        UnreadableFile: The URL's scheme is unknown.
        OSError: The file cannot be written.
    """
    from pyarrow import parquet

    filesystem, inner = filesystem_of(path)
    names = source.column_names
    # A writer completes its file also after an error. The source may be the file that is replaced.
    part = _beside(inner)
    try:
        with parquet.ParquetWriter(part, source.schema(names), filesystem=filesystem) as out:
            for batch in source.batches(names):
                out.write_batch(batch.data)
        _rename(filesystem, part, inner)
    except BaseException:
        with contextlib.suppress(OSError):
            filesystem.delete_file(part)
        raise


def _beside(inner: str) -> str:
    """A name in the file's folder for what is not whole. Whoever reads the folder leaves out what begins with a dot."""
    folder, slash, name = inner.rpartition("/")
    return f"{folder}{slash}.{name}.{uuid.uuid4().hex}.part"


def _rename(filesystem: Any, part: str, inner: str) -> None:
    try:
        filesystem.move(part, inner)
    except OSError:
        if filesystem.type_name == "local":
            raise
        # S3 copies no more than 5 GB by itself.
        try:
            with filesystem.open_input_stream(part) as source, filesystem.open_output_stream(inner) as target:
                shutil.copyfileobj(source, target, _COPIED_BYTES)
        except BaseException:
            with contextlib.suppress(OSError):
                filesystem.delete_file(inner)
            raise
        filesystem.delete_file(part)


def filesystem_of(path: str) -> tuple[Any, str]:
    """The file system of a path or URL: pyarrow's own where it has one, and fsspec's elsewhere.

    Args:
        path: The path or URL.

    Returns:
        The file system, and the path in it.

    Raises:
        UnreadableFile: Neither knows the scheme.
    """
    with _of_ml("open {}"):
        return _places.filesystem_of(path)


def _find(path: str) -> list[tuple[Any, str]]:
    filesystem, inner = filesystem_of(path)
    with _of_ml("read {}"):
        files = _places.files_below(filesystem, inner, path, ".parquet")
    if files is None:
        return [(filesystem, inner)]
    if not files:
        raise UnreadableFile(f"cannot read {path}: the folder has no file whose name ends with .parquet", file=path)
    return [(filesystem, file) for file in files]


def _read(part: _Part, first: int, schema: pyarrow.Schema, start: int, stop: int, is_named: bool) -> Iterator[Batch]:
    """The rows of a file from `start` to `stop`. Its own first row is `first`. Errors name it if there are others."""
    import numpy

    batch_rows = max(1, min(BATCH_ROWS, _BATCH_BYTES * part.num_rows // max(part.nbytes, 1)))
    files = OpenFiles(part.filesystem)
    row = first
    for unit, rows in enumerate(part.file.unit_rows):
        begins, row = row, row + rows
        if not rows or begins >= stop or row <= start:
            continue
        at = max(begins, start)
        for table in rows_of(files, part.file, unit, schema, skipped=at - begins, piece_rows=batch_rows):
            for data in table.slice(0, stop - at).to_batches():
                _interrupts.check()
                yield Batch(numpy.arange(at, at + data.num_rows), data, (part.path, first) if is_named else None)
                at += data.num_rows
            if at >= stop:
                return


def _mismatch(first: str, path: str, name: str, here: Any, there: Any) -> SchemaMismatch:
    said = [f"has the column {name!r} of type {kind}" if kind else f"has no column {name!r}" for kind in (there, here)]
    return SchemaMismatch(f"{path} {said[0]}; the first file, {first}, {said[1]}", file=path, column=name)


@contextlib.contextmanager
def _of_ml(doing: str) -> Iterator[None]:
    """Makes an `UnreadableFile` of what reading files raises, which could not be done as these words say."""
    try:
        yield
    except _places.UnreadableError as error:
        raise UnreadableFile(f"cannot {doing.format(error.path)}: {error.why}", file=error.path) from error.__cause__
