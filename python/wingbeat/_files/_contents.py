"""What Parquet and Arrow IPC files say of themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wingbeat._files._places import UnreadableError, reason

if TYPE_CHECKING:
    import pyarrow

PARQUET, ARROW = "parquet", "arrow"
_ENDINGS = {".parquet": PARQUET, ".pq": PARQUET, ".arrow": ARROW, ".feather": ARROW, ".ipc": ARROW}
# What a table's schema says of its columns with nulls.
_MARK = b"wingbeat.with_nulls"
# How both kinds of files begin.
_MAGIC = {b"PAR1": PARQUET, b"ARRO": ARROW}
# A size that no file has.
_LARGE = 1 << 62


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
        nbytes: The size of its rows, uncompressed; 0 if it does not say.
        size: Its bytes.
        modified_ns: When it was changed last, of a file on this machine.
        with_nulls: Columns that are read as integers and booleans and have nulls, as far as a Parquet file says so.
    """

    kind: str
    unit_rows: tuple[int, ...]
    schema: pyarrow.Schema
    nbytes: int
    size: int
    modified_ns: int | None
    with_nulls: frozenset[str] = frozenset()


def inspect(filesystem: Any, path: str, kind: str | None = None, given: pyarrow.Schema | None = None) -> Inspected:
    """Reads what a file says of itself, and no rows.

    Args:
        filesystem: Its `pyarrow.fs.FileSystem`.
        path: Its path there.
        kind: "parquet" or "arrow"; None to find out.
        given: What columns are cast to; None for nothing else.

    Returns:
        What it says.

    Raises:
        UnreadableError: It cannot be read.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        kind = kind or _kind_of(filesystem, path)
        _, modified_ns = local_stamp(filesystem, path)
        if kind == PARQUET:
            with filesystem.open_input_file(path) as source:
                about = parquet.ParquetFile(source)
                groups = [about.metadata.row_group(number) for number in range(about.metadata.num_row_groups)]
                rows, nbytes = tuple(group.num_rows for group in groups), sum(group.total_byte_size for group in groups)
                size = source.size()
                with_nulls = _with_nulls(about, groups, size, given)
                return Inspected(kind, rows, about.schema_arrow, nbytes, size, modified_ns, with_nulls)
        with source_of(filesystem, path) as source:
            schema = pyarrow.ipc.open_file(source).schema
            # One column says how many rows there are. Others are not decompressed.
            widths = [_width(field.type) for field in schema]
            only = [widths.index(min(widths))] if widths else []
            reader = pyarrow.ipc.open_file(source, options=pyarrow.ipc.IpcReadOptions(included_fields=only))
            rows = tuple(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
            return Inspected(kind, rows, schema, 0, source.size(), modified_ns)
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:  # names that are no text
        raise UnreadableError(path, reason(error)) from error


def first_difference(
    first: pyarrow.Schema, other: pyarrow.Schema, names: Iterable[str]
) -> tuple[str, pyarrow.DataType | None, pyarrow.DataType | None] | None:
    """The first column in which two files differ.

    Args:
        first: The columns of a file.
        other: Those of another.
        names: The columns to compare.

    Returns:
        Its name, and its type in each, None where it is missing; None if there is no such column.
    """
    for name in names:
        here, there = ([schema.field(number).type for number in schema.get_all_field_indices(name)] for schema in (first, other))
        if not here or here != there:
            return name, here[0] if here else None, there[0] if there else None
    return None


def is_changed_by_nulls(kind: pyarrow.DataType) -> bool:
    """Whether arrays of a column have another type where it has nulls: integers and booleans have no value for one.

    Args:
        kind: The type of the column.
    """
    import pyarrow

    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return bool(pyarrow.types.is_integer(kind) or pyarrow.types.is_boolean(kind))


def marked(table: pyarrow.Table) -> pyarrow.Table:
    """A table that says which of its columns have such nulls, for those who have some of its rows.

    Args:
        table: The table.
    """
    columns = zip(table.schema, table.columns)
    names = [field.name for field, column in columns if is_changed_by_nulls(field.type) and column.null_count]
    return table.replace_schema_metadata({**(table.schema.metadata or {}), _MARK: json.dumps(names)}) if names else table


def unmarked(table: pyarrow.Table) -> tuple[pyarrow.Table, frozenset[str]]:
    """A table without what `marked` has said in it.

    Args:
        table: The table.

    Returns:
        It, and the names of the columns.
    """
    said = dict(table.schema.metadata or {})
    names = said.pop(_MARK, None)
    return (table, frozenset()) if names is None else (table.replace_schema_metadata(said or None), frozenset(json.loads(names)))


def check_columns(opened: Any, size: int | None, groups: Iterable[int], columns: Sequence[str]) -> None:
    """Checks what a Parquet file says of columns of row groups. pyarrow ends the process if `row_group(…).column(…)` is asked for
    one of which that is damaged in some ways. Where it is about to read the column, it raises: so that begins here, and ends
    before any data is read.

    Args:
        opened: The `pyarrow.parquet.ParquetFile`.
        size: The size of the file; None if it is not known.
        groups: The row groups.
        columns: The columns.

    Raises:
        OSError: What it says is damaged.
        pyarrow.ArrowException: The same.
    """
    import pyarrow
    from pyarrow import parquet

    if not columns:
        return
    source = _Dataless(size or _LARGE)
    # With a buffer, nothing is read of a column before all of them are found.
    reader = parquet.ParquetFile(source, metadata=opened.metadata, buffer_size=1)
    for group in groups:
        source.was_read = False
        try:
            reader.read_row_group(group, columns=columns, use_threads=False)
        except (OSError, pyarrow.ArrowException):
            if not source.was_read:
                raise


class _Dataless:
    """A file for pyarrow that has a size, and no data."""

    closed = False

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0
        self.was_read = False

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        self.was_read = True
        return b""

    def close(self) -> None:
        self.closed = True


def _with_nulls(about: Any, groups: Sequence[Any], size: int, given: pyarrow.Schema | None) -> frozenset[str]:
    kinds = {field.name: field.type for field in [*about.schema_arrow, *(given or ())]}
    looked_for = {name for name, kind in kinds.items() if is_changed_by_nulls(kind)}
    found: set[str] = set()
    if not groups or not looked_for:
        return frozenset()
    # Columns are the same in all row groups, which are not asked for others.
    columns = [about.schema.column(number) for number in range(groups[0].num_columns)]
    numbers = [number for number, column in enumerate(columns) if column.path in looked_for]
    check_columns(about, size, range(len(groups)), [columns[number].path for number in numbers])
    for group in groups:
        for number in numbers:
            name, kind = columns[number].path, columns[number].physical_type
            if name not in found:
                chunk = group.column(number)
                if chunk.physical_type != kind:  # of whose statistics pyarrow would make an end of the process, too
                    raise OSError(f"the column {name!r} is {kind} in the schema, and {chunk.physical_type} in a row group")
                statistics = chunk.statistics
                if statistics is not None and statistics.has_null_count and statistics.null_count:
                    found.add(name)
    return frozenset(found)


def local_stamp(filesystem: Any, path: str) -> tuple[int | None, int | None]:
    """The size of a file on this machine, and when it was changed last. Of others, that would be a request each time."""
    from pyarrow import fs

    if not isinstance(filesystem, fs.LocalFileSystem):
        return None, None
    about = os.stat(path)
    return about.st_size, about.st_mtime_ns


def source_of(filesystem: Any, path: str) -> Any:
    """An Arrow file, which is read where it lies if it is on this machine."""
    import pyarrow
    from pyarrow import fs

    if isinstance(filesystem, fs.LocalFileSystem) and os.path.getsize(path) > 0:
        return pyarrow.memory_map(path)
    return filesystem.open_input_file(path)


def _kind_of(filesystem: Any, path: str) -> str:
    kind = _ENDINGS.get(os.path.splitext(path)[1].lower())
    if kind is not None:
        return kind
    with filesystem.open_input_stream(path) as source:
        kind = _MAGIC.get(source.read(4))
    if kind is None:
        raise UnreadableError(path, "it is neither Parquet nor Arrow IPC (Feather V2)")
    return kind


def _width(kind: pyarrow.DataType) -> int:
    try:
        return int(kind.bit_width)
    except ValueError:  # it varies
        return 1 << 30
