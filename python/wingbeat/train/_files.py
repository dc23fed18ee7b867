"""Parquet and Arrow IPC files: what is in them, and their rows, a piece at a time."""

from __future__ import annotations

import os
import socket
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wingbeat.train._dataset_errors import UnreadableFileError

if TYPE_CHECKING:
    import pyarrow

PARQUET, ARROW = "parquet", "arrow"
_ENDINGS = {".parquet": PARQUET, ".pq": PARQUET, ".arrow": ARROW, ".feather": ARROW, ".ipc": ARROW}
# How both kinds of files begin.
_MAGIC = {b"PAR1": PARQUET, b"ARRO": ARROW}
# What is read of a column at a time, of a file on this machine and of one elsewhere, which takes long to answer. Without a limit,
# pyarrow holds all of a row group's column.
_READ_LOCALLY, _READ_REMOTELY = 1 << 16, 1 << 20
# How many Parquet files are kept open: as many as there are lanes without further options. Footers take about nine times of
# what they take in the file.
_OPEN_FILES, _OPEN_FOOTER_BYTES = 8, 2 << 20


@dataclass(frozen=True)
class DataFile:
    """A file of a dataset.

    Attributes:
        path: Its path in its file system.
        kind: "parquet" or "arrow".
        unit_rows: How many rows each of its row groups or record batches has.
        constants: Columns that are not in the file, with their values: those of a partitioned dataset.
        units: Which of its row groups are in the dataset; None for all. `unit_rows` are those of these.
        size: Its bytes, when it was looked into.
        modified_ns: When it had been changed last, of a file on this machine.
    """

    path: str
    kind: str
    unit_rows: tuple[int, ...]
    constants: tuple[tuple[str, Any], ...] = ()
    units: tuple[int, ...] | None = None
    size: int | None = None
    modified_ns: int | None = None


@dataclass(frozen=True)
class Inspected:
    """What a file says of itself.

    Attributes:
        kind: "parquet" or "arrow".
        unit_rows: How many rows each of its row groups or record batches has.
        schema: Its columns.
        size: Its bytes.
        modified_ns: When it was changed last, of a file on this machine.
    """

    kind: str
    unit_rows: tuple[int, ...]
    schema: pyarrow.Schema
    size: int
    modified_ns: int | None


def inspect(filesystem: Any, path: str, kind: str | None = None) -> Inspected:
    """Reads what a file says of itself, and no rows.

    Args:
        filesystem: Its `pyarrow.fs.FileSystem`.
        path: Its path there.
        kind: "parquet" or "arrow"; None to find out.

    Returns:
        What it says.

    Raises:
        UnreadableFileError: It cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        kind = kind or _kind_of(filesystem, path)
        _, modified_ns = _local_stamp(filesystem, path)
        if kind == PARQUET:
            with filesystem.open_input_file(path) as source:
                about = pyarrow.parquet.ParquetFile(source)
                groups = about.metadata
                rows = tuple(groups.row_group(number).num_rows for number in range(groups.num_row_groups))
                return Inspected(kind, rows, about.schema_arrow, source.size(), modified_ns)
        with _source(filesystem, path) as source:
            schema = pyarrow.ipc.open_file(source).schema
            # One column says how many rows there are. Others are not decompressed.
            widths = [_width(field.type) for field in schema]
            only = [widths.index(min(widths))] if widths else []
            reader = pyarrow.ipc.open_file(source, options=pyarrow.ipc.IpcReadOptions(included_fields=only))
            rows = tuple(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
            return Inspected(kind, rows, schema, source.size(), modified_ns)
    except (OSError, pyarrow.ArrowException) as error:
        raise UnreadableFileError(path, _why(error)) from error


class OpenFiles:
    """Parquet files that one thread reads, one row group after the other. The last few are kept open: to open one again takes
    as long as to decode some row groups, and its footer is held once, and not once for each row group that is being read.

    Args:
        filesystem: Their `pyarrow.fs.FileSystem`.
    """

    def __init__(self, filesystem: Any) -> None:
        self.filesystem = filesystem
        self._open: OrderedDict[tuple[str, int], Any] = OrderedDict()

    def parquet(self, file: DataFile, buffer_size: int) -> Any:
        """A file.

        Args:
            file: The file.
            buffer_size: How much of a column is read at a time; 0 for all of a row group's.

        Returns:
            The `pyarrow.parquet.ParquetFile`.

        Raises:
            UnreadableFileError: It has changed since it was looked into.
        """
        import pyarrow.parquet

        key = (file.path, buffer_size)
        opened = self._open.pop(key, None)
        if opened is None:
            source = self.filesystem.open_input_file(file.path)
            _check(file, file.size in (None, source.size()))
            opened = pyarrow.parquet.ParquetFile(source, buffer_size=buffer_size)
        self._open[key] = opened
        while len(self._open) > 1 and (len(self._open) > _OPEN_FILES or self._footer_bytes() > _OPEN_FOOTER_BYTES):
            self._open.popitem(last=False)  # which closes it, unless some of its rows are still being read
        return opened

    def _footer_bytes(self) -> int:
        return sum(opened.metadata.serialized_size for opened in self._open.values())


def rows_of(
    files: OpenFiles, file: DataFile, unit: int, schema: pyarrow.Schema, *, skipped: int = 0, piece_rows: int
) -> Iterator[pyarrow.Table]:
    """Reads the rows of a unit, a piece at a time.

    Args:
        files: What opens the file.
        file: The file.
        unit: Which of its row groups or record batches.
        schema: The columns to read.
        skipped: How many rows are left out at its beginning.
        piece_rows: The most rows of a piece.

    Yields:
        Tables.

    Raises:
        UnreadableFileError: The file is not to be had here, is damaged, or has changed since it was looked into.
    """
    import pyarrow

    constants = dict(file.constants)
    columns = schema.names
    own = [name for name in columns if name not in constants]
    try:
        for table in _tables(files, file, unit, own, piece_rows):
            if skipped >= table.num_rows:
                skipped -= table.num_rows
                continue
            table = table.slice(skipped)
            skipped = 0
            for name, value in constants.items():
                if name in columns:
                    kind = schema.field(name).type
                    table = table.append_column(name, pyarrow.repeat(pyarrow.scalar(value, kind), table.num_rows))
            table = table.select(columns)
            yield table if table.schema.equals(schema) else table.cast(schema)
    except FileNotFoundError as error:
        where = f"it is not there on {socket.gethostname()}: ranks need a folder that all nodes share, or a URL"
        raise UnreadableFileError(file.path, where) from error
    except UnreadableFileError:
        raise
    except (OSError, pyarrow.ArrowException) as error:
        raise UnreadableFileError(file.path, _why(error)) from error


def _tables(files: OpenFiles, file: DataFile, unit: int, columns: list[str], piece_rows: int) -> Iterator[pyarrow.Table]:
    import pyarrow
    import pyarrow.fs

    filesystem = files.filesystem
    rows, number = file.unit_rows[unit], unit if file.units is None else file.units[unit]
    size, modified_ns = _local_stamp(filesystem, file.path)
    # Before an Arrow file is mapped: the process would be killed when it reads beyond the end of one that was cut.
    _check(file, file.size in (None, size or file.size) and file.modified_ns in (None, modified_ns))
    if file.kind == PARQUET:
        is_whole = piece_rows >= rows
        is_here = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        reader = files.parquet(file, 0 if is_whole else _READ_LOCALLY if is_here else _READ_REMOTELY)
        groups = reader.metadata
        _check(file, number < groups.num_row_groups and groups.row_group(number).num_rows == rows)
        _check(file, set(columns) <= set(reader.schema_arrow.names))
        if is_whole:
            yield reader.read_row_group(number, columns=columns, use_threads=False)
            return
        for batch in reader.iter_batches(piece_rows, row_groups=[number], columns=columns, use_threads=False):
            yield pyarrow.Table.from_batches([batch])
        return
    with _source(filesystem, file.path) as source:
        _check(file, file.size in (None, source.size()))
        names = pyarrow.ipc.open_file(source).schema.names
        _check(file, set(columns) <= set(names))
        chosen = [names.index(name) for name in columns]
        options = pyarrow.ipc.IpcReadOptions(included_fields=chosen, use_threads=False)
        opened = pyarrow.ipc.open_file(source, options=options)
        _check(file, number < opened.num_record_batches)
        batch = opened.get_batch(number)
        _check(file, batch.num_rows == rows)
        yield pyarrow.Table.from_batches([batch])


def _check(file: DataFile, is_as_before: bool) -> None:
    if not is_as_before:
        raise UnreadableFileError(
            file.path,
            "it has changed since read_files looked into it; start the run again, and while one reads a file, write another "
            "file and let it take the place of the first by renaming",
        )


def _local_stamp(filesystem: Any, path: str) -> tuple[int | None, int | None]:
    """The size of a file on this machine, and when it was changed last. Of others, that would be a request each time."""
    import pyarrow.fs

    if not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        return None, None
    about = os.stat(path)
    return about.st_size, about.st_mtime_ns


def _source(filesystem: Any, path: str) -> Any:
    """An Arrow file, which is read where it lies if it is on this machine."""
    import pyarrow
    import pyarrow.fs

    if isinstance(filesystem, pyarrow.fs.LocalFileSystem) and os.path.getsize(path) > 0:
        return pyarrow.memory_map(path)
    return filesystem.open_input_file(path)


def _kind_of(filesystem: Any, path: str) -> str:
    kind = _ENDINGS.get(os.path.splitext(path)[1].lower())
    if kind is not None:
        return kind
    with filesystem.open_input_stream(path) as source:
        kind = _MAGIC.get(source.read(4))
    if kind is None:
        raise UnreadableFileError(path, "it is neither Parquet nor Arrow IPC (Feather V2)")
    return kind


def _width(kind: pyarrow.DataType) -> int:
    try:
        return int(kind.bit_width)
    except ValueError:  # it varies
        return 1 << 30


def _why(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
