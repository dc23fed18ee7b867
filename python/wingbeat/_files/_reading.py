"""The rows of Parquet and Arrow IPC files, a piece at a time."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wingbeat._files._contents import PARQUET, DataFile, check_columns, local_stamp, source_of
from wingbeat._files._places import UnreadableError, reason

if TYPE_CHECKING:
    import pyarrow

# What is read of a column at a time, of a file on this machine and of one elsewhere, which takes long to answer. Without a limit,
# pyarrow holds all of a row group's column.
_READ_LOCALLY, _READ_REMOTELY = 1 << 16, 1 << 20
# How many Parquet files are kept open: as many as there are lanes without further options. Footers take about nine times of
# what they take in the file.
_OPEN_FILES, _OPEN_FOOTER_BYTES = 8, 2 << 20
# How much of a row group is decoded together. What fits into a cache of the processor takes two thirds of the time that more
# takes, as long as its memory is free again before the next columns are decoded. A storage elsewhere takes long to answer.
_TOGETHER_BYTES, _TOGETHER_REMOTELY_BYTES = 1 << 20, 8 << 20
# After how much freed memory is given back, which takes one or two milliseconds, and by how much the process must have grown
# for that.
_GIVEN_BACK_BYTES, _GROWN_BYTES = 16 << 20, 48 << 20


class OpenFiles:
    """Parquet files that one thread reads, one row group after the other. The last few are kept open: to open one again takes
    as long as to decode some row groups, and its footer is held once, and not once for each row group that is being read.

    Args:
        filesystem: Their `pyarrow.fs.FileSystem`.
    """

    def __init__(self, filesystem: Any) -> None:
        self.filesystem = filesystem
        self._open: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._shares: OrderedDict[tuple[str, tuple[str, ...]], dict[str, float]] = OrderedDict()
        self._read_bytes = 0
        self._began_bytes = _resident_bytes()

    def parquet(self, file: DataFile, buffer_size: int) -> Any:
        """A file.

        Args:
            file: The file.
            buffer_size: How much of a column is read at a time; 0 for all of a row group's.

        Returns:
            The `pyarrow.parquet.ParquetFile`.

        Raises:
            UnreadableError: It has changed since it was looked into.
        """
        from pyarrow import fs

        key = (file.path, buffer_size)
        opened = self._open.pop(key, None)
        if opened is None:
            source = self.filesystem.open_input_file(file.path)
            _check(file, file.size in (None, source.size()))
            opened = source, _parquet_file(source, buffer_size)
        self._open[key] = opened
        while len(self._open) > 1 and (len(self._open) > _OPEN_FILES or self._footer_bytes() > _OPEN_FOOTER_BYTES):
            self._open.popitem(last=False)  # which closes it, unless some of its rows are still being read
        source, reader = opened
        if buffer_size or isinstance(self.filesystem, fs.LocalFileSystem):
            return reader
        # A storage takes long to answer: all columns are asked for at once. What has read so holds what it has read.
        return _parquet_file(source, 0, metadata=reader.metadata, pre_buffer=True)

    def shares(self, file: DataFile, reader: Any, number: int, columns: Sequence[str]) -> dict[str, float]:
        """What columns take of a row group, uncompressed; about, as what was found for a row group of the file stands for all.

        Args:
            file: The file.
            reader: What `parquet` has returned.
            number: The row group in which it is found out if it is not known yet.
            columns: The columns.

        Returns:
            The part of each.

        Raises:
            OSError: What the file says of a column is damaged.
            pyarrow.ArrowException: The same.
        """
        key = (file.path, tuple(columns))
        shares = self._shares.pop(key, None)
        if shares is None:
            check_columns(reader, file.size, [number], columns)
            about, shares = reader.metadata.row_group(number), dict.fromkeys(columns, 0.0)
            for column in range(about.num_columns):
                name = reader.schema.column(column).path.partition(".")[0]
                if name in shares:
                    shares[name] += about.column(column).total_uncompressed_size / max(about.total_byte_size, 1)
        self._shares[key] = shares
        if len(self._shares) > _OPEN_FILES:
            self._shares.popitem(last=False)
        return shares

    def has_read(self, nbytes: int) -> None:
        """Has pyarrow give freed memory back now and then, once the process has grown: its allocator keeps about as much as is in
        use, and other threads free what this one has allocated. To touch that again takes about as long as to decode it.

        Args:
            nbytes: How much was decoded.
        """
        import pyarrow

        self._read_bytes += nbytes
        if self._read_bytes >= _GIVEN_BACK_BYTES:
            self._read_bytes = 0
            if _resident_bytes() - self._began_bytes > _GROWN_BYTES:
                pyarrow.default_memory_pool().release_unused()

    def _footer_bytes(self) -> int:
        return sum(reader.metadata.serialized_size for _, reader in self._open.values())


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _parquet_file(source: Any, buffer_size: int, metadata: Any = None, pre_buffer: bool = False) -> Any:
    # After `import pyarrow.parquet`, pyarrow may not have that attribute yet, where another thread imports it at the same time.
    from pyarrow import parquet

    return parquet.ParquetFile(
        source, metadata=metadata, buffer_size=buffer_size, pre_buffer=pre_buffer, page_checksum_verification=True
    )


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a unit.

    Attributes:
        num_rows: How many.
        tables: The rows, some columns at a time: tables that together have each column once. They are decoded as they are asked
            for, before the next piece is.
    """

    num_rows: int
    tables: Iterator[pyarrow.Table]


def pieces_of(
    files: OpenFiles, file: DataFile, units: Sequence[int], schema: pyarrow.Schema, *, skipped: int = 0, piece_rows: int
) -> Iterator[Piece]:
    """Reads the rows of units, a piece at a time.

    Args:
        files: What opens the file.
        file: The file.
        units: Which of its row groups or record batches. Several are row groups that together are a piece.
        schema: The columns to read.
        skipped: How many rows are left out at its beginning.
        piece_rows: The most rows of a piece.

    Yields:
        The pieces.

    Raises:
        UnreadableError: The file is not to be had here, is damaged, or has changed since it was looked into.
    """
    constants = dict(file.constants)
    own = [name for name in schema.names if name not in constants]
    with _of_file(file):
        for rows, tables in _pieces(files, file, units, own, piece_rows):
            if skipped < rows:
                yield Piece(rows - skipped, _columns(file, tables, schema, rows, skipped))
            skipped = max(0, skipped - rows)


def rows_of(
    files: OpenFiles, file: DataFile, unit: int, schema: pyarrow.Schema, *, skipped: int = 0, piece_rows: int
) -> Iterator[pyarrow.Table]:
    """As `pieces_of`, of one unit, with all columns of a piece in a table.

    Args:
        files: As `pieces_of`.
        file: As `pieces_of`.
        unit: Which of its row groups or record batches.
        schema: As `pieces_of`.
        skipped: As `pieces_of`.
        piece_rows: As `pieces_of`.

    Yields:
        Tables.

    Raises:
        UnreadableError: As `pieces_of`.
    """
    import pyarrow

    for piece in pieces_of(files, file, [unit], schema, skipped=skipped, piece_rows=piece_rows):
        tables = list(piece.tables)
        if len(tables) > 1:
            columns = {name: table.column(name) for table in tables for name in table.column_names}
            tables = [pyarrow.table([columns[name] for name in schema.names], schema=schema)]
        if file.kind == PARQUET:
            files.has_read(tables[0].nbytes)
        yield tables[0]


@contextlib.contextmanager
def _of_file(file: DataFile) -> Iterator[None]:
    """Makes an `UnreadableError` of what reading a file raises."""
    import pyarrow

    try:
        yield
    except FileNotFoundError as error:
        where = f"it is not there on {socket.gethostname()}: ranks need a folder that all nodes share, or a URL"
        raise UnreadableError(file.path, where) from error
    except (OSError, pyarrow.ArrowException) as error:
        raise UnreadableError(file.path, reason(error)) from error


def _columns(
    file: DataFile, tables: Iterator[pyarrow.Table], schema: pyarrow.Schema, rows: int, skipped: int
) -> Iterator[pyarrow.Table]:
    """The columns of a piece as they are wanted, with those that are in no file."""
    import pyarrow

    with _of_file(file):
        for table in tables:
            _check_rows(file, rows, table.num_rows)
            table = table.slice(skipped)
            wanted = pyarrow.schema([schema.field(name) for name in table.column_names])
            yield table if table.schema.equals(wanted) else _cast(table, wanted)
            del table  # before the next one is decoded, which then uses its memory again
        for name, value in file.constants:
            if name in schema.names:
                field = schema.field(name)
                column = pyarrow.repeat(pyarrow.scalar(value, field.type), rows - skipped)
                yield pyarrow.table([column], schema=pyarrow.schema([field]))


def _cast(table: pyarrow.Table, schema: pyarrow.Schema) -> pyarrow.Table:
    import pyarrow
    from pyarrow import compute

    for number, field in enumerate(table.schema):
        if pyarrow.types.is_run_end_encoded(field.type):
            chunks = [compute.run_end_decode(chunk) for chunk in table.column(number).chunks]
            table = table.set_column(number, field.name, pyarrow.chunked_array(chunks, field.type.value_type))
    return table.cast(schema)


def _pieces(
    files: OpenFiles, file: DataFile, units: Sequence[int], columns: list[str], piece_rows: int
) -> Iterator[tuple[int, Iterator[pyarrow.Table]]]:
    """The pieces of units: how many rows each has, and their columns, decoded as they are asked for."""
    import pyarrow
    from pyarrow import fs

    filesystem = files.filesystem
    rows = sum(file.unit_rows[unit] for unit in units)
    numbers = [unit if file.units is None else file.units[unit] for unit in units]
    size, modified_ns = local_stamp(filesystem, file.path)
    # Before an Arrow file is mapped: the process would be killed when it reads beyond the end of one that was cut.
    _check(file, file.size in (None, size or file.size) and file.modified_ns in (None, modified_ns))
    if file.kind == PARQUET:
        is_whole = piece_rows >= rows
        is_here = isinstance(filesystem, fs.LocalFileSystem)
        reader = files.parquet(file, 0 if is_whole else _READ_LOCALLY if is_here else _READ_REMOTELY)
        groups = reader.metadata
        for unit, number in zip(units, numbers):
            _check(file, number < groups.num_row_groups and groups.row_group(number).num_rows == file.unit_rows[unit])
        _check(file, set(columns) <= set(reader.schema_arrow.names))
        if is_whole:
            del groups
            yield rows, _whole(reader, files.shares(file, reader, numbers[0], columns), numbers, columns, is_here)
            return
        had = 0
        for batch in reader.iter_batches(piece_rows, row_groups=numbers, columns=columns, use_threads=False):
            had += batch.num_rows
            if had > rows:
                break
            yield batch.num_rows, iter([pyarrow.Table.from_batches([batch]).select(columns)])
            del batch
        _check_rows(file, rows, had)
        return
    (number,) = numbers
    with source_of(filesystem, file.path) as source:
        _check(file, file.size in (None, source.size()))
        names = pyarrow.ipc.open_file(source).schema.names
        _check(file, set(columns) <= set(names))
        chosen = [names.index(name) for name in columns]
        options = pyarrow.ipc.IpcReadOptions(included_fields=chosen, use_threads=False)
        opened = pyarrow.ipc.open_file(source, options=options)
        _check(file, number < opened.num_record_batches)
        batch = opened.get_batch(number)
        _check(file, batch.num_rows == rows)
        batch.validate(full=True)  # an offset beyond the end would kill the process
        yield rows, iter([pyarrow.Table.from_batches([batch]).select(columns)])


def _whole(
    reader: Any, shares: Mapping[str, float], numbers: list[int], columns: list[str], is_here: bool
) -> Iterator[pyarrow.Table]:
    """Row groups, some columns at a time. For pyarrow, `a.b` is also the field of a struct: it reads more than was asked for."""
    if not columns:  # which have their number of rows
        yield reader.read_row_groups(numbers, columns=columns, use_threads=False)
        return
    nbytes = sum(reader.metadata.row_group(number).total_byte_size for number in numbers)
    most = _TOGETHER_BYTES if is_here else _TOGETHER_REMOTELY_BYTES
    some, size = [], 0.0
    for name in columns:
        some.append(name)
        size += shares[name] * nbytes
        if size >= most or name == columns[-1]:
            yield reader.read_row_groups(numbers, columns=some, use_threads=False).select(some)
            some, size = [], 0.0


def _check(file: DataFile, is_as_before: bool) -> None:
    if not is_as_before:
        raise UnreadableError(
            file.path,
            "it has changed since it was looked into; start the run again, and while one reads a file, write another file and "
            "let it take the place of the first by renaming",
        )


def _check_rows(file: DataFile, rows: int, had: int) -> None:
    if had != rows:
        raise UnreadableError(file.path, f"it is damaged: {rows} rows are said to be in its row groups, and columns have {had}")
