"""Data sets as streams of record batches, whatever the caller holds: tables in memory here, files in `_parquet`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from wingbeat import _interrupts
from wingbeat.ml._errors import DatasetError, UnsupportedDataset, missing_column

if TYPE_CHECKING:
    import numpy
    import pyarrow

# Rows of a batch: enough that numpy works on arrays, few enough that a batch of 100 features takes 50 MB.
BATCH_ROWS = 65536


class Batch(NamedTuple):
    """Some rows.

    Attributes:
        rows: Where each is in the data set.
        data: The rows.
        file: The file in which they are, and where its first row is in the data set; None if there are not several files.
    """

    rows: numpy.ndarray[Any, Any]
    data: pyarrow.RecordBatch
    file: tuple[str, int] | None = None


class Rows(Protocol):
    """Chooses rows."""

    @property
    def columns(self) -> list[str]:
        """The columns that it looks at."""

    def chosen(self, batch: Batch) -> numpy.ndarray[Any, Any]:
        """Whether each row of a batch is chosen. The batch has `columns`."""


class Source(ABC):
    """A data set that can be read more than once, also in part.

    Attributes:
        name: What errors call it.
    """

    name: str = "the data set"

    @property
    @abstractmethod
    def column_names(self) -> list[str]:
        """The columns."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """The number of rows. A source that leaves rows out counts them: `start` and `stop` count them, too."""

    @abstractmethod
    def nbytes(self, columns: Sequence[str]) -> int:
        """The size of some columns. Files count in whole, uncompressed."""

    @abstractmethod
    def batches(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Reads rows.

        Args:
            columns: The columns to read.
            start: The first row.
            stop: The row after the last one; None for all.

        Yields:
            The rows, in order.
        """

    @property
    @abstractmethod
    def is_in_files(self) -> bool:
        """Whether ranks can read it by themselves, so that it need not be sent to them."""

    @abstractmethod
    def schema(self, columns: Sequence[str]) -> pyarrow.Schema:
        """The types of some columns."""

    def split(self, parts: int) -> list[tuple[int, int]]:
        """Divides the rows into consecutive ranges.

        Args:
            parts: How many ranges.

        Returns:
            The first row of each, and the row after its last one.
        """
        ends = [self.num_rows * part // parts for part in range(parts + 1)]
        return list(zip(ends, ends[1:]))

    def rows(self) -> Iterator[Rows]:
        """What has chosen the rows of this source from those of another, the last choice first."""
        return iter(())

    def require(self, columns: Sequence[str]) -> None:
        """Checks that columns are there.

        Args:
            columns: The columns.

        Raises:
            MissingColumn: One is not.
            DatasetError: Two have the same name.
        """
        existing = self.column_names
        for column in columns:
            if column not in existing:
                raise missing_column(column, existing, self.name)
            if existing.count(column) > 1:
                raise DatasetError(f"{self.name} has {existing.count(column)} columns of the name {column!r}: rename them")

    def table(self, columns: Sequence[str] | None = None) -> pyarrow.Table:
        """Reads rows into memory.

        Args:
            columns: The columns to read; None for all.

        Returns:
            All rows.
        """
        import pyarrow

        names = self.column_names if columns is None else list(columns)
        return pyarrow.Table.from_batches([batch.data for batch in self.batches(names)], self.schema(names))

    def appended(self, columns: Mapping[str, pyarrow.ChunkedArray]) -> Any:
        """The data set with more columns, as an object of the kind that the caller gave.

        Args:
            columns: The columns by name.

        Returns:
            The new object. The caller's own is unchanged.
        """
        table = self.table()
        for name, values in columns.items():
            table = table.append_column(name, values)
        return table


class TableSource(Source):
    """A table in memory.

    Args:
        rows: The table.
    """

    def __init__(self, rows: pyarrow.Table) -> None:
        self._rows = rows

    @property
    def column_names(self) -> list[str]:
        return list(self._rows.column_names)

    @property
    def num_rows(self) -> int:
        return int(self._rows.num_rows)

    @property
    def is_in_files(self) -> bool:
        return False

    def table(self, columns: Sequence[str] | None = None) -> pyarrow.Table:
        self.require(self.column_names if columns is None else columns)
        return self._rows if columns is None else self._rows.select(list(columns))

    def schema(self, columns: Sequence[str]) -> pyarrow.Schema:
        return self.table(columns).schema

    def nbytes(self, columns: Sequence[str]) -> int:
        return int(self.table(columns).nbytes)

    def batches(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        import numpy

        end = self.num_rows if stop is None else min(stop, self.num_rows)
        row = start
        for data in self.table(columns).slice(start, max(end - start, 0)).to_batches(max_chunksize=BATCH_ROWS):
            _interrupts.check()
            yield Batch(numpy.arange(row, row + data.num_rows), data)
            row += data.num_rows


class _FrameSource(TableSource):
    """A data frame. Only the columns that are read become Arrow's."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        # Of each set of columns that was read: training reads the same ones several times.
        self._converted: dict[tuple[str, ...], pyarrow.Table] = {}

    @property
    def column_names(self) -> list[str]:
        return list(self._frame.columns)

    @property
    def num_rows(self) -> int:
        return len(self._frame)

    def table(self, columns: Sequence[str] | None = None) -> pyarrow.Table:
        names = tuple(self.column_names if columns is None else columns)
        if names not in self._converted:
            self.require(names)
            self._converted[names] = self._convert(list(names))
        return self._converted[names]

    @abstractmethod
    def _convert(self, columns: list[str]) -> pyarrow.Table: ...


class PandasSource(_FrameSource):
    """A pandas DataFrame."""

    def _convert(self, columns: list[str]) -> pyarrow.Table:
        import pyarrow

        try:
            return pyarrow.Table.from_pandas(self._frame[columns], preserve_index=False)
        except (pyarrow.ArrowException, TypeError) as error:
            raise DatasetError(f"a column of {columns} of the DataFrame holds values of several kinds: {error}") from error

    def appended(self, columns: Mapping[str, pyarrow.ChunkedArray]) -> Any:
        frame = self._frame.copy(deep=False)
        for name, values in columns.items():
            series = values.to_pandas()
            series.index = frame.index
            frame.insert(len(frame.columns), name, series)
        return frame


class PolarsSource(_FrameSource):
    """A polars DataFrame."""

    def _convert(self, columns: list[str]) -> pyarrow.Table:
        return self._frame.select(columns).to_arrow()

    def appended(self, columns: Mapping[str, pyarrow.ChunkedArray]) -> Any:
        import polars  # type: ignore[import-not-found,unused-ignore]

        return self._frame.with_columns([polars.Series(name, values) for name, values in columns.items()])


def open_source(dataset: Any) -> Source:
    """Makes a source of a data set.

    Args:
        dataset: A pyarrow Table, a pandas or polars DataFrame, what has `__arrow_c_stream__`, or the path or URL of a
            Parquet file or of a folder of them, or a list of these.

    Returns:
        The source.

    Raises:
        UnsupportedDataset: It is none of these.
        UnreadableFile: A file cannot be read.
        SchemaMismatch: Files have different columns.
    """
    import pyarrow

    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, (str, os.PathLike)) or is_paths(dataset):
        from wingbeat.ml._parquet import open_files

        return open_files([dataset] if isinstance(dataset, (str, os.PathLike)) else list(dataset))
    if isinstance(dataset, pyarrow.Table):
        return TableSource(dataset)
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    root = kind.partition(".")[0]
    if root == "polars" and kind.endswith(".LazyFrame"):
        raise UnsupportedDataset(f"a data set cannot be a {kind}: call .collect(), or pass the path of its Parquet files")
    if root == "polars" and hasattr(dataset, "to_arrow") and hasattr(dataset, "columns"):
        return PolarsSource(dataset)
    if root == "pandas" and hasattr(dataset, "columns"):
        return PandasSource(dataset)
    if hasattr(dataset, "__arrow_c_stream__"):
        try:
            return TableSource(pyarrow.table(dataset))
        except pyarrow.ArrowInvalid:  # a series: a column, and no table
            pass
    hint = ": write it as Parquet, and pass the path" if root == "pyspark" else ""
    hint = ": call .to_frame()" if kind.endswith(".Series") else hint
    raise UnsupportedDataset(
        f"a data set must be a pyarrow Table, a pandas or polars DataFrame, or the path of Parquet files; this is a {kind}{hint}"
    )


def is_paths(dataset: Any) -> bool:
    """Whether this is a list of paths."""
    return isinstance(dataset, (list, tuple)) and bool(dataset) and all(isinstance(one, (str, os.PathLike)) for one in dataset)
