"""Datasets in files: what a program gives to a trainer, and what ranks read."""

from __future__ import annotations

import hashlib
import itertools
import os
import posixpath
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Union

from wingbeat._files._contents import PARQUET, DataFile, Inspected, first_difference, inspect, is_changed_by_nulls
from wingbeat._files._places import absolute, files_below, filesystem_of
from wingbeat._files._reading import OpenFiles, rows_of
from wingbeat.train._dataset_errors import (
    DatasetError,
    MissingColumnError,
    SchemaMismatchError,
    TooFewRowsError,
    UnreadableFileError,
    of_train,
)

if TYPE_CHECKING:
    import pyarrow

Paths = Union[str, "os.PathLike[str]", Iterable[Union[str, "os.PathLike[str]"]], Any]

# Lanes of a shuffled dataset: as many row groups are mixed. 2, 4 or 8 ranks read parts that do not overlap.
_LANES = (8, 4, 2, 1)
# What a single rank, which reads all lanes, may hold. What its allocators keep of what was freed is about half of that.
_RANK_BYTES = 120 << 20
# How large a window is unless its rows are given, by the first rows of the dataset.
_WINDOW_BYTES = 2 << 20
_WINDOW_ROWS = range(16, 32768)
_SAMPLE_ROWS = 256
# Of larger row groups, only as much as is needed is decoded at a time.
_PIECE_BYTES = 32 << 20
# What pyarrow then holds of each column: a page and a dictionary of 1 MiB, each as read and as decoded.
_COLUMN_BYTES = 4 << 20
# How many files are looked into at the same time: a storage takes long to answer.
_INSPECTORS = 16


@dataclass(frozen=True, repr=False)
class FileDataset:
    """Rows in Parquet or Arrow IPC files, which ranks read as they need them. `read_files` makes one.

    Attributes:
        files: The files, in order.
        filesystem: The `pyarrow.fs.FileSystem` in which they lie.
        schema: The columns that are read.
        lanes: How many lanes the global order has if that was given.
        shuffled_lanes: How many it has with a seed if that was not given. Without a seed, it has one then.
        window_rows: How many rows of a lane are shuffled among each other.
        piece_rows: How many rows are decoded at a time.
        lane_bytes: About how much a rank holds of each lane that it reads, whatever the number of rows.
        with_nulls: Columns of integers and booleans that have nulls somewhere, as far as files say so. All of their batches have
            the type that nulls need.
    """

    files: tuple[DataFile, ...]
    filesystem: Any
    schema: pyarrow.Schema
    lanes: int | None
    shuffled_lanes: int
    window_rows: int
    piece_rows: int
    lane_bytes: int
    with_nulls: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"FileDataset({len(self.files)} files, {self.num_rows} rows, columns {self.schema.names})"

    @property
    def unit_rows(self) -> list[int]:
        """How many rows each row group or record batch has."""
        return [rows for file in self.files for rows in file.unit_rows]

    @cached_property
    def first_units(self) -> list[int]:
        """The number of each file's first unit among those of all files."""
        return list(itertools.accumulate((len(file.unit_rows) for file in self.files[:-1]), initial=0))

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return sum(self.unit_rows)

    @cached_property
    def layout(self) -> str:
        """A hash of what the order of rows depends on: the files, by their paths in the folder that has all of them and by
        their sizes, and the rows of each unit."""
        paths = [file.path for file in self.files]
        common = len(posixpath.dirname(posixpath.commonprefix(paths)))
        about = [(path[common:], file.size, file.units, file.unit_rows) for path, file in zip(paths, self.files)]
        return hashlib.sha256(repr(about).encode()).hexdigest()[:16]

    def lanes_with(self, seed: int | None) -> int:
        """How many lanes the global order has.

        Args:
            seed: The seed of the shuffle, if there is one.

        Returns:
            The number.
        """
        return self.lanes or (1 if seed is None else self.shuffled_lanes)


@of_train()
def read_files(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filesystem: Any = None,
    lanes: int | None = None,
    window_rows: int | None = None,
) -> FileDataset:
    """Takes Parquet and Arrow IPC (Feather V2) files as a dataset for `TorchTrainer(datasets={…})`.

    It reads what the files say of themselves, and the first rows. Ranks read the rest when they need it.

    Args:
        paths: A file, a folder, a URL that pyarrow or fsspec opens (`s3://…`), a list of these, or a `pyarrow.dataset.Dataset`.
            The files of a folder are taken in the order of their paths, without those whose names begin with "." or "_".
        columns: Which columns are read; None for all.
        filesystem: The `pyarrow.fs.FileSystem` in which `paths` are; None for this machine's, or the URLs'.
        lanes: From how many row groups (or record batches) each batch is mixed. Ranks read as little as possible if it is a
            multiple of their number. None means 1 without a shuffle seed, and with one 8, or 4, 2 or 1 if a single rank could
            not hold as many in 120 MiB.
        window_rows: How many rows of a lane are shuffled among each other. None means as many as 2 MiB hold, from 16 to
            32,768, by the size of the dataset's first rows.

    Returns:
        The dataset.

    Raises:
        UnreadableFileError: A file does not exist, or is neither.
        MissingColumnError: A column does not exist.
        SchemaMismatchError: Two files differ in a column that is read.
        TooFewRowsError: There are no rows.
        TypeError: `paths` is none of these, or `columns` is no list.
        ValueError: A number makes no sense, or a column is named twice.
    """
    if isinstance(columns, (str, bytes)):
        raise TypeError(f"columns must be a list of names, not {columns!r}: give [{columns!r}]")
    if columns is not None and (not columns or len(set(columns)) < len(columns)):
        raise ValueError(f"columns must be names, each once, or None for all, not {list(columns)!r}")
    for name, number in (("lanes", lanes), ("window_rows", window_rows)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} must be a positive integer or None, not {number!r}")
    found, filesystem, partitions = _found(paths, filesystem)
    with ThreadPoolExecutor(min(_INSPECTORS, len(found))) as pool:
        inspected = list(pool.map(lambda one: inspect(filesystem, one.path, one.kind or None, partitions), found))
    files = tuple(
        DataFile(
            one.path,
            about.kind,
            about.unit_rows if one.units is None else tuple(about.unit_rows[unit] for unit in one.units),
            one.constants,
            one.units,
            about.size,
            about.modified_ns,
        )
        for one, about in zip(found, inspected)
    )
    schema = _common(files, inspected, partitions, columns)
    if not any(sum(file.unit_rows) > 0 for file in files):  # a damaged file may have fewer than none
        raise TooFewRowsError(f"the dataset has no rows: {_listed([file.path for file in files])}")
    row_bytes = _row_bytes(filesystem, files, schema)
    if window_rows is None:
        window_rows = max(_WINDOW_ROWS.start, min(_WINDOW_ROWS.stop, int(_WINDOW_BYTES / row_bytes)))
    lane_bytes = int(_lane_bytes(files, schema, row_bytes, window_rows))
    shuffled = next((few for few in _LANES if few * lane_bytes <= _RANK_BYTES), 1)
    piece_rows = max(1, int(_PIECE_BYTES / row_bytes))
    have = {name for about in inspected for name in about.with_nulls}
    have.update(name for file in files for name, value in file.constants if value is None)
    with_nulls = tuple(field.name for field in schema if field.name in have and is_changed_by_nulls(field.type))
    return FileDataset(files, filesystem, schema, lanes, shuffled, window_rows, piece_rows, lane_bytes, with_nulls)


def is_files(given: Any) -> bool:
    """Whether a dataset that was given to a trainer is in files.

    Args:
        given: The dataset.

    Returns:
        Whether it is a path, a list of paths, a `pyarrow.dataset.Dataset` or a `FileDataset`.
    """
    if isinstance(given, (FileDataset, str, os.PathLike)):
        return True
    if isinstance(given, (list, tuple)):
        return bool(given) and all(isinstance(one, (str, os.PathLike)) for one in given)
    return any(f"{kind.__module__}.{kind.__qualname__}" == "pyarrow._dataset.Dataset" for kind in type(given).__mro__)


def of_files(given: Any) -> FileDataset:
    """The dataset of what `is_files` has found to be one.

    Args:
        given: A path, a list of paths, a `pyarrow.dataset.Dataset` or a `FileDataset`.

    Returns:
        The dataset.

    Raises:
        DatasetError: It cannot be read.
    """
    return given if isinstance(given, FileDataset) else read_files(given)


def check_ranks(datasets: Mapping[str, FileDataset], ranks: int) -> None:
    """Checks that each rank can have a row.

    Args:
        datasets: The datasets, by name.
        ranks: How many ranks there may be.

    Raises:
        TooFewRowsError: There are more ranks than rows.
    """
    for name, dataset in datasets.items():
        check_rows(name, dataset.num_rows, ranks)


def check_rows(name: str, rows: int, ranks: int) -> None:
    """Checks that each rank can have a row.

    Args:
        name: The name of the dataset.
        rows: How many rows it has.
        ranks: How many ranks there may be.

    Raises:
        TooFewRowsError: There are more ranks than rows.
    """
    if rows < ranks:
        raise TooFewRowsError(f"the dataset {name!r} has {rows} rows, and there are {ranks} ranks: use fewer ranks")


@dataclass(frozen=True)
class _Found:
    path: str
    kind: str = ""
    constants: tuple[tuple[str, Any], ...] = ()
    units: tuple[int, ...] | None = None


def _found(paths: Paths, filesystem: Any) -> tuple[list[_Found], Any, pyarrow.Schema | None]:
    """The files, where they are, and the columns of a pyarrow Dataset if it is one."""
    import pyarrow.dataset

    if isinstance(paths, pyarrow.dataset.Dataset):
        return _of_dataset(paths)
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if hasattr(paths, "__arrow_c_stream__"):
        raise TypeError(f"a {type(paths).__name__} is in memory, and read_files takes paths: give it to the trainer as it is")
    paths = list(paths)
    if not paths or not all(isinstance(one, (str, os.PathLike)) for one in paths):
        raise TypeError(f"paths must be a path, a URL, a list of these or a pyarrow.dataset.Dataset, not {paths!r:.100}")
    found: list[_Found] = []
    first = None
    for path in [os.fspath(one) for one in paths]:
        own, inside = (filesystem, absolute(filesystem, path)) if filesystem is not None else filesystem_of(path)
        if first is None:
            first = own
        elif not first.equals(own):
            raise DatasetError(f"{os.fspath(paths[0])} and {path} are in different storages; give one dataset of each")
        inner = files_below(own, inside, path)
        if inner is None:
            found.append(_Found(inside))
            continue
        if not inner:
            raise TooFewRowsError(f"the folder {path} has no files")
        if any("=" in part for one in inner for part in one[len(inside) :].split("/")[:-1]):
            if len(paths) > 1:
                raise DatasetError(f"{path} is partitioned, and is one of several paths; give a pyarrow.dataset.Dataset")
            return _of_dataset(_partitioned(own, inside, inner))
        found += [_Found(one) for one in inner]
    return found, first, None


def _partitioned(filesystem: Any, folder: str, files: Sequence[str]) -> pyarrow.dataset.Dataset:
    """A folder whose files have columns in the names of their folders."""
    import pyarrow.dataset

    first = inspect(filesystem, files[0])
    try:
        return pyarrow.dataset.dataset(folder, filesystem=filesystem, format=first.kind, partitioning="hive")
    except (OSError, pyarrow.ArrowException) as error:
        keys = [part.partition("=")[0] for part in files[0][len(folder) :].split("/")[:-1] if "=" in part]
        both = ", ".join(f"{field.name!r} ({field.type})" for field in first.schema if field.name in keys)
        where = f"; {files[0]} itself has {both}, too" if both else ""
        way = "give a pyarrow.dataset.Dataset with pyarrow.dataset.partitioning(schema, flavor='hive')"
        raise DatasetError(f"{folder} has columns in names of folders, and is no dataset: {error}{where}; {way}") from error


def _of_dataset(dataset: Any) -> tuple[list[_Found], Any, pyarrow.Schema | None]:
    import pyarrow.dataset

    if not isinstance(dataset, pyarrow.dataset.FileSystemDataset):
        raise TypeError(f"a pyarrow {type(dataset).__name__} is not in files; give dataset.to_table(), or its files")
    if (getattr(dataset, "_scan_options", None) or {}).get("filter") is not None:
        raise TypeError("a filtered pyarrow Dataset cannot be streamed; write what the filter leaves to files")
    formats = {pyarrow.dataset.ParquetFileFormat: "parquet", pyarrow.dataset.IpcFileFormat: "arrow"}
    kind = formats.get(type(dataset.format))
    if kind is None:
        raise TypeError(f"a pyarrow Dataset of {type(dataset.format).__name__} cannot be streamed; Parquet and Arrow IPC can")
    found = []
    fragments = sorted(dataset.get_fragments(), key=lambda fragment: str(fragment.path))
    with ThreadPoolExecutor(_INSPECTORS) as pool:
        # A fragment may be a part of a file.
        parts = list(pool.map(_units_of, fragments) if kind == PARQUET else [None] * len(fragments))
    for fragment, units in zip(fragments, parts):
        keys = pyarrow.dataset.get_partition_keys(fragment.partition_expression)
        found.append(_Found(absolute(dataset.filesystem, fragment.path), kind, tuple(keys.items()), units))
    if not found:
        raise TooFewRowsError("the dataset has no files")
    return found, dataset.filesystem, dataset.schema


def _units_of(fragment: Any) -> tuple[int, ...]:
    import pyarrow

    try:
        return tuple(group.id for group in fragment.row_groups)
    except (OSError, pyarrow.ArrowException) as error:
        raise UnreadableFileError(fragment.path, str(error)) from error


def _common(
    files: Sequence[DataFile], inspected: Sequence[Inspected], given: pyarrow.Schema | None, columns: Sequence[str] | None
) -> pyarrow.Schema:
    """The columns that are read, in which all files have to agree; as a pyarrow Dataset has them, if it is one."""
    import pyarrow

    constants = [name for name, _ in files[0].constants]
    for file, about in zip(files, inspected):
        _check_names(file, about.schema, columns)
    of_files = inspected[0].schema
    if given is not None:
        of_files = pyarrow.schema([*of_files, *(given.field(name) for name in constants if name not in of_files.names)])
    if columns is not None:
        names = list(columns)
    else:
        names = list(of_files.names if given is None else given.names)
    for name in names:
        if name not in of_files.names:
            raise MissingColumnError(name, files[0].path, tuple(of_files.names))
    for file in files[1:]:
        apart = {name for name, _ in file.constants}.symmetric_difference(constants)
        if apart:
            where = ("in the names of folders", "missing") if min(apart) in constants else ("missing", "in the names of folders")
            raise SchemaMismatchError(min(apart), (files[0].path, file.path), where)
    compared = [name for name in names if name not in constants]
    for file, about in zip(files[1:], inspected[1:]):
        more = about.schema.names if columns is None and (given is None or set(of_files.names) <= set(given.names)) else []
        differs = first_difference(of_files, about.schema, [*compared, *(name for name in more if name not in constants)])
        if differs is not None:
            name, *kinds = differs
            expected, there = ("missing" if kind is None else str(kind) for kind in kinds)
            raise SchemaMismatchError(name, (files[0].path, file.path), (expected, there))
    # Without metadata, and nullable: files may differ in these.
    schema = pyarrow.schema([pyarrow.field(name, _plain(of_files.field(name).type)) for name in names])
    if given is None:
        return schema
    wanted = pyarrow.schema([pyarrow.field(name, _plain(given.field(name).type)) for name in names if name in given.names])
    for name in names:
        if name not in given.names:
            raise MissingColumnError(name, "the pyarrow Dataset", tuple(given.names))
    try:
        schema.empty_table().cast(wanted)
    except pyarrow.ArrowException as error:
        raise DatasetError(f"the columns of {files[0].path} cannot be those of the pyarrow Dataset's schema: {error}") from error
    return wanted


def _check_names(file: DataFile, schema: pyarrow.Schema, columns: Sequence[str] | None) -> None:
    """Checks that no two columns that are read have the same name."""
    if len(set(schema.names)) == len(schema.names):
        return
    for name, times in Counter(schema.names).items():
        if times > 1 and (columns is None or name in columns):
            raise DatasetError(f"{file.path} has {times} columns of the name {name!r}: rename them, or name others in columns=")


def _row_bytes(filesystem: Any, files: Sequence[DataFile], schema: pyarrow.Schema) -> float:
    """How large a row is in memory, by the dataset's first rows."""
    file = next(file for file in files if sum(file.unit_rows) > 0)
    unit = next(number for number, rows in enumerate(file.unit_rows) if rows > 0)
    sample = next(rows_of(OpenFiles(filesystem), file, unit, schema, piece_rows=_SAMPLE_ROWS)).slice(0, _SAMPLE_ROWS)
    size: float = sample.nbytes / sample.num_rows
    return max(1.0, size)


def _lane_bytes(files: Sequence[DataFile], schema: pyarrow.Schema, row_bytes: float, window_rows: int) -> float:
    """What a rank holds of a lane."""
    unit = row_bytes * max(rows for file in files for rows in file.unit_rows)
    if unit > _PIECE_BYTES and files[0].kind == PARQUET:
        unit = min(unit, sum(map(_leaves, (field.type for field in schema))) * _COLUMN_BYTES)
    # One unit begins while the last rows of another are still in use. Of windows, two are read, and three are put together: one
    # that is being made, one that is ready, and one that the loop has.
    return 2 * unit + 5 * window_rows * row_bytes


def _plain(kind: pyarrow.DataType) -> pyarrow.DataType:
    """The type that rows are cast to: pyarrow gathers no views, in which polars writes text, also inside of others. Of a
    dictionary, numbers have room for the values of all files together; pandas writes them with 8 bits."""
    import pyarrow

    views = {"string_view": pyarrow.large_string(), "binary_view": pyarrow.large_binary()}
    if str(kind) in views:
        return views[str(kind)]
    types = pyarrow.types
    if types.is_dictionary(kind):
        return pyarrow.dictionary(pyarrow.int32(), _plain(kind.value_type), kind.ordered)
    if types.is_struct(kind):
        return pyarrow.struct([_plain_field(kind.field(number)) for number in range(kind.num_fields)])
    if types.is_map(kind):
        return pyarrow.map_(_plain_field(kind.key_field), _plain_field(kind.item_field), kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(_plain_field(kind.value_field), kind.list_size)
    if types.is_large_list(kind):
        return pyarrow.large_list(_plain_field(kind.value_field))
    if types.is_list(kind):
        return pyarrow.list_(_plain_field(kind.value_field))
    if types.is_run_end_encoded(kind):
        return _plain(kind.value_type)
    return kind


def _plain_field(field: pyarrow.Field) -> pyarrow.Field:
    return field.with_type(_plain(field.type))


def _leaves(kind: pyarrow.DataType) -> int:
    """How many columns a column of this type is in Parquet."""
    return sum(_leaves(kind.field(number).type) for number in range(kind.num_fields)) or 1


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
