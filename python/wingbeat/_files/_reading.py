"""The rows of Parquet and Arrow IPC files, a piece at a time."""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from wingbeat._files._contents import PARQUET, DataFile, local_stamp, source_of
from wingbeat._files._places import UnreadableError, reason

if TYPE_CHECKING:
    import pyarrow

# What is read of a column at a time, of a file on this machine and of one elsewhere, which takes long to answer. Without a limit,
# pyarrow holds all of a row group's column.
_READ_LOCALLY, _READ_REMOTELY = 1 << 16, 1 << 20
# How many Parquet files are kept open: as many as there are lanes without further options. Footers take about nine times of
# what they take in the file.
_OPEN_FILES, _OPEN_FOOTER_BYTES = 8, 2 << 20


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
            UnreadableError: It has changed since it was looked into.
        """
        import pyarrow.parquet

        key = (file.path, buffer_size)
        opened = self._open.pop(key, None)
        if opened is None:
            source = self.filesystem.open_input_file(file.path)
            _check(file, file.size in (None, source.size()))
            opened = pyarrow.parquet.ParquetFile(source, buffer_size=buffer_size, page_checksum_verification=True)
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
        UnreadableError: The file is not to be had here, is damaged, or has changed since it was looked into.
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
        raise UnreadableError(file.path, where) from error
    except (OSError, pyarrow.ArrowException) as error:
        raise UnreadableError(file.path, reason(error)) from error


def _tables(files: OpenFiles, file: DataFile, unit: int, columns: list[str], piece_rows: int) -> Iterator[pyarrow.Table]:
    import pyarrow
    import pyarrow.fs

    filesystem = files.filesystem
    rows, number = file.unit_rows[unit], unit if file.units is None else file.units[unit]
    size, modified_ns = local_stamp(filesystem, file.path)
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
        yield pyarrow.Table.from_batches([batch])


def _check(file: DataFile, is_as_before: bool) -> None:
    if not is_as_before:
        raise UnreadableError(
            file.path,
            "it has changed since it was looked into; start the run again, and while one reads a file, write another file and "
            "let it take the place of the first by renaming",
        )
