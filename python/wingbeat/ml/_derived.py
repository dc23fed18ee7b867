"""Sources that are made of others while they are read: with more columns, or fewer rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from wingbeat.ml._errors import ExistingColumn
from wingbeat.ml._source import Batch, Rows, Source

if TYPE_CHECKING:
    import pyarrow


class Stage(Protocol):
    """What makes columns of others: transformers are."""

    def _input_columns(self) -> list[str]:
        """The columns that it reads."""

    def _output_columns(self) -> list[tuple[str, str]]:
        """The columns that it makes, with their types as Spark writes them."""

    def _compute(self, batch: Batch) -> dict[str, pyarrow.Array]:
        """Makes the columns of a batch."""


class Derived(Source):
    """A source with more columns.

    Args:
        source: The source.
        stages: What makes the columns, in the order in which one uses those of another.

    Raises:
        MissingColumn: A stage reads a column that is not there.
        ExistingColumn: A stage makes one that is there already.
    """

    def __init__(self, source: Source, stages: Sequence[Stage]) -> None:
        from wingbeat.ml._errors import missing_column

        self.name = source.name
        self._source = source
        self._stages = tuple(stages)
        names = source.column_names
        writers: dict[str, Stage] = {}
        for stage in stages:
            for column in stage._input_columns():
                if column not in names:
                    raise missing_column(column, names, self.name)
            for column, _ in stage._output_columns():
                if column in names:
                    raise _existing(column, stage, writers.get(column), self.name)
                writers[column] = stage
                names = [*names, column]
        self._names = names

    @property
    def column_names(self) -> list[str]:
        return list(self._names)

    @property
    def num_rows(self) -> int:
        return self._source.num_rows

    @property
    def is_in_files(self) -> bool:
        return self._source.is_in_files

    def nbytes(self, columns: Sequence[str]) -> int:
        return self._source.nbytes(self._plan(columns)[0])

    def rows(self) -> Iterator[Rows]:
        return self._source.rows()

    def schema(self, columns: Sequence[str]) -> pyarrow.Schema:
        import pyarrow

        made = self.made()
        read = [name for name in columns if name not in made]
        fields = {**made, **{field.name: field for field in self._source.schema(read)}}
        return pyarrow.schema([fields[name] for name in columns])

    def made(self) -> dict[str, pyarrow.Field]:
        """The columns that the stages make, by name."""
        import pyarrow

        kinds = {"bigint": pyarrow.int64(), "array<double>": pyarrow.list_(pyarrow.float64())}
        return {name: pyarrow.field(name, kinds[kind]) for stage in self._stages for name, kind in stage._output_columns()}

    def batches(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        import pyarrow

        read, stages = self._plan(columns)
        for batch in self._source.batches(read, start, stop):
            data = batch.data
            for stage in stages:
                # With the fields that there were: a column that is never null stays so.
                for name, values in stage._compute(Batch(batch.rows, data, batch.file)).items():
                    fields = [*data.schema, pyarrow.field(name, values.type)]
                    data = pyarrow.RecordBatch.from_arrays([*data.columns, values], schema=pyarrow.schema(fields))
            yield Batch(batch.rows, data.select(list(columns)), batch.file)

    def split(self, parts: int) -> list[tuple[int, int]]:
        return self._source.split(parts)

    def result(self) -> Any:
        """The whole data set with its columns, as an object of the kind that the caller gave."""
        made = self.made()
        if self._source.is_in_files:
            return self.table()
        table = self.table(list(made))
        return self._source.appended({name: table.column(name) for name in made})

    def appended(self, columns: Mapping[str, pyarrow.ChunkedArray]) -> Any:
        raise NotImplementedError("a caller holds no derived source")

    def _plan(self, columns: Sequence[str]) -> tuple[list[str], list[Stage]]:
        """What has to be read and computed for some columns."""
        needed, stages = dict.fromkeys(columns), []
        for stage in reversed(self._stages):
            made = [name for name, _ in stage._output_columns()]
            if any(name in needed for name in made):
                stages.append(stage)
                needed = {name: None for name in needed if name not in made}
                needed.update(dict.fromkeys(stage._input_columns()))
        return list(needed), stages[::-1]


def _existing(column: str, stage: Stage, writer: Stage | None, where: str) -> ExistingColumn:
    """Says that a column is there already: in the data set, or made by this stage or by another."""
    what = f"{type(stage).__name__} would write the column {column!r}"
    if writer is stage:
        message = f"{what} twice: choose another name for one of its output columns"
    elif writer is not None:
        message = f"{what}, which {type(writer).__name__} writes already: choose another output column"
    else:
        message = f"{what}, which {where} has already: choose another output column, or drop it"
    return ExistingColumn(message, column=column)


class Filtered(Source):
    """Some rows of a source.

    Args:
        source: The source.
        rows: Which.
    """

    def __init__(self, source: Source, rows: Rows) -> None:
        self.name = source.name
        self._source = source
        self._rows = rows

    @property
    def column_names(self) -> list[str]:
        return self._source.column_names

    @property
    def num_rows(self) -> int:
        return self._source.num_rows

    @property
    def is_in_files(self) -> bool:
        return self._source.is_in_files

    def nbytes(self, columns: Sequence[str]) -> int:
        return self._source.nbytes(columns)

    def split(self, parts: int) -> list[tuple[int, int]]:
        return self._source.split(parts)

    def rows(self) -> Iterator[Rows]:
        yield self._rows
        yield from self._source.rows()

    def schema(self, columns: Sequence[str]) -> pyarrow.Schema:
        return self._source.schema(columns)

    def batches(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        import pyarrow

        read = list(dict.fromkeys([*columns, *self._rows.columns]))
        for batch in self._source.batches(read, start, stop):
            chosen = self._rows.chosen(batch)
            if chosen.any():
                data = batch.data.select(list(columns)).filter(pyarrow.array(chosen))
                yield Batch(batch.rows[chosen], data, batch.file)
