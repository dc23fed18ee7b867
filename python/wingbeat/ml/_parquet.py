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
from wingbeat.ml._errors import SchemaMismatch, UnreadableFile
from wingbeat.ml._source import BATCH_ROWS, Batch, Source

if TYPE_CHECKING:
    import pyarrow

# Footers that are read at once: an object store takes tens of milliseconds for each.
_FOOTERS_AT_ONCE = 16
# What a batch takes, about, so that wide rows do not fill the memory.
_BATCH_BYTES = 4 << 20
# A column of a row group is read in pieces of this size, and not whole.
_BUFFER_BYTES = 1 << 20
# Bytes of a file that are copied at once: the least that S3 takes as a part of an object is 5 MiB.
_COPIED_BYTES = 8 << 20


@dataclass(frozen=True)
class _Part:
    """A file.

    Attributes:
        path: Where it is.
        filesystem: What opens it.
        rows: The rows of each row group.
        nbytes: Its size, uncompressed.
    """

    path: str
    filesystem: Any
    rows: tuple[int, ...]
    nbytes: int

    @property
    def num_rows(self) -> int:
        return sum(self.rows)


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

        return pyarrow.schema([self._schema.field(name) for name in columns])

    def nbytes(self, columns: Sequence[str]) -> int:
        return sum(part.nbytes for part in self._parts)

    def split(self, parts: int) -> list[tuple[int, int]]:
        """Divides the rows into consecutive ranges, at the ends of row groups where that leaves them about equal: a row
        group can only be decoded from its beginning."""
        ends, row = [0], 0
        for rows in (rows for part in self._parts for rows in part.rows):
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
        first = 0
        for part in self._parts:
            end = first + part.num_rows
            if first < last and end > start:
                yield from _read(part, first, list(columns), start, last)
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
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as threads:
        footers = list(threads.map(lambda file: _footer(*file), found))
    parts = [part for part, _ in footers]
    schema = footers[0][1]
    for part, other in footers[1:]:
        _compare(parts[0].path, schema, part.path, other)
    return FileSource(parts, schema)


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
    part = f"{inner}.{uuid.uuid4().hex}.part"
    try:
        with parquet.ParquetWriter(part, source.schema(names), filesystem=filesystem) as out:
            for batch in source.batches(names):
                out.write_batch(batch.data)
        _rename(filesystem, part, inner)
    except BaseException:
        with contextlib.suppress(OSError):
            filesystem.delete_file(part)
        raise


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
    from pyarrow import fs

    if "://" not in path:
        return fs.LocalFileSystem(), os.path.abspath(path)
    try:
        filesystem, inner = fs.FileSystem.from_uri(path)
        return filesystem, inner
    except Exception as own:
        try:
            import fsspec  # type: ignore[import-untyped,unused-ignore]

            other, inner = fsspec.core.url_to_fs(path)
            return fs.PyFileSystem(fs.FSSpecHandler(other)), inner
        except Exception as error:
            raise UnreadableFile(f"cannot open {path}: pyarrow: {own}; fsspec: {error}", file=path) from error


def _find(path: str) -> list[tuple[Any, str]]:
    from pyarrow import fs

    filesystem, inner = filesystem_of(path)
    try:
        info = filesystem.get_file_info(inner)
        if info.type == fs.FileType.File:
            return [(filesystem, inner)]
        listed = filesystem.get_file_info(fs.FileSelector(inner, recursive=True)) if info.type == fs.FileType.Directory else []
    except OSError as error:
        raise UnreadableFile(f"cannot read {path}: {error}", file=path) from error
    if info.type != fs.FileType.Directory:
        raise UnreadableFile(f"cannot read {path}: there is no such file or folder", file=path)
    root = inner.rstrip("/")
    files = sorted(one.path for one in listed if one.is_file and _is_data(one.path[len(root) :]))
    if not files:
        raise UnreadableFile(f"cannot read {path}: the folder has no file whose name ends with .parquet", file=path)
    return [(filesystem, file) for file in files]


def _is_data(path: str) -> bool:
    return path.endswith(".parquet") and not any(part.startswith(("_", ".")) for part in path.split("/"))


def _footer(filesystem: Any, path: str) -> tuple[_Part, pyarrow.Schema]:
    from pyarrow import parquet

    with _named(path), parquet.ParquetFile(path, filesystem=filesystem) as file:
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        rows = tuple(group.num_rows for group in groups)
        return _Part(path, filesystem, rows, sum(group.total_byte_size for group in groups)), file.schema_arrow


def _read(part: _Part, first: int, columns: list[str], start: int, stop: int) -> Iterator[Batch]:
    """The rows of a file from `start` to `stop`. Its own first row is `first`."""
    import numpy
    from pyarrow import parquet

    wanted: list[int] = []
    row = first
    begins = row
    for index, rows in enumerate(part.rows):
        if rows and row < stop and row + rows > start:
            begins = begins if wanted else row
            wanted.append(index)
        row += rows
    batch_rows = max(1, min(BATCH_ROWS, _BATCH_BYTES * part.num_rows // max(part.nbytes, 1)))
    with _named(part.path), parquet.ParquetFile(
        part.path,
        filesystem=part.filesystem,
        buffer_size=_BUFFER_BYTES,
        pre_buffer=False,
        page_checksum_verification=True,
    ) as file:
        row = begins
        for data in file.iter_batches(batch_rows, wanted, columns, use_threads=False):
            _interrupts.check()
            skipped = max(start - row, 0)
            # pyarrow reads columns in the order of the file.
            kept = data.select(columns).slice(skipped, max(min(stop - row, data.num_rows) - skipped, 0))
            if kept.num_rows:
                yield Batch(numpy.arange(row + skipped, row + skipped + kept.num_rows), kept)
            row += data.num_rows
            if row >= stop:
                return


def _compare(first: str, schema: Any, path: str, other: Any) -> None:
    for name in [*schema.names, *other.names]:
        here = schema.field(name).type if name in schema.names else None
        there = other.field(name).type if name in other.names else None
        if here != there:
            said = [f"has the column {name!r} of type {kind}" if kind else f"has no column {name!r}" for kind in (there, here)]
            raise SchemaMismatch(f"{path} {said[0]}; the first file, {first}, {said[1]}", file=path, column=name)


class _named:
    """Names the file in what pyarrow raises."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        import pyarrow

        if isinstance(error, (pyarrow.ArrowException, OSError)) and not isinstance(error, UnreadableFile):
            raise UnreadableFile(f"cannot read {self._path} as Parquet: {error}", file=self._path) from error
