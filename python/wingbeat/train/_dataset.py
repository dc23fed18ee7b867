"""A rank's part of a table that was given to the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow
    import torch

_SHARDS = "WINGBEAT_SHARD_"


class DatasetShard:
    """This rank's rows of a table, over shared memory.

    It has all attributes of a `pyarrow.Table`, and some iterators of Ray's `DataIterator`. `table` is the table itself.

    Args:
        table: The rows.
    """

    def __init__(self, table: pyarrow.Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, key: Any) -> Any:
        return self.table[key]

    def __getattr__(self, name: str) -> Any:
        if name == "table":  # not made yet: as while it is unpickled
            raise AttributeError(name)
        return getattr(self.table, name)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.table.__arrow_c_stream__(requested_schema)

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        """Iterates over the rows.

        Yields:
            Each row, as a dict by column.
        """
        for batch in self.table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def iter_batches(
        self,
        *,
        batch_size: int | None = 256,
        batch_format: str = "numpy",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        prefetch_batches: int = 1,
    ) -> Iterator[Any]:
        """Iterates over batches of rows.

        Args:
            batch_size: Rows of a batch; None for all of them.
            batch_format: "numpy" or "default" (a dict of arrays), "pandas" or "pyarrow".
            drop_last: Whether a last batch with fewer rows is left out.
            local_shuffle_buffer_size: If it is given, all rows of this rank are shuffled, whatever the size.
            local_shuffle_seed: The seed of that, for the same order again.
            prefetch_batches: Ignored: the rows are in memory.

        Yields:
            The batches.

        Raises:
            ValueError: The format or the size is none of these.
        """
        formats: dict[str, Callable[[pyarrow.Table], Any]] = {
            "default": _arrays,
            "numpy": _arrays,
            "pandas": lambda batch: batch.to_pandas(),
            "pyarrow": lambda batch: batch,
        }
        if batch_format not in formats:
            raise ValueError(f'batch_format must be "numpy", "pandas" or "pyarrow", not {batch_format!r}')
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        table = self.table
        if local_shuffle_buffer_size is not None:
            import numpy

            table = table.take(numpy.random.default_rng(local_shuffle_seed).permutation(table.num_rows))
        size = batch_size or max(1, table.num_rows)
        for begin in range(0, table.num_rows, size):
            batch = table.slice(begin, size)
            if drop_last and batch.num_rows < size:
                return
            yield formats[batch_format](batch)

    def iter_torch_batches(
        self,
        *,
        batch_size: int | None = 256,
        dtypes: torch.dtype | dict[str, torch.dtype] | None = None,
        device: str | torch.device = "auto",
        collate_fn: Callable[[dict[str, Any]], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        prefetch_batches: int = 1,
    ) -> Iterator[Any]:
        """Iterates over batches of rows as tensors.

        Args:
            batch_size: Rows of a batch; None for all of them.
            dtypes: The tensors' type, for all columns or by column.
            device: Where the tensors are; "auto" is this rank's device.
            collate_fn: Makes something else of a batch, which it gets as a dict of arrays.
            drop_last: Whether a last batch with fewer rows is left out.
            local_shuffle_buffer_size: If it is given, all rows of this rank are shuffled, whatever the size.
            local_shuffle_seed: The seed of that, for the same order again.
            prefetch_batches: Ignored: the rows are in memory.

        Yields:
            A dict of tensors by column, or what `collate_fn` has made.

        Raises:
            TypeError: A column holds what tensors cannot hold.
        """
        import torch

        from wingbeat.train._device import get_device

        target = get_device() if device == "auto" else torch.device(device)
        batches = self.iter_batches(
            batch_size=batch_size,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )
        for batch in batches:
            if collate_fn is not None:
                yield collate_fn(batch)
                continue
            tensors = {}
            for name, array in batch.items():
                dtype = dtypes.get(name) if isinstance(dtypes, dict) else dtypes
                try:
                    # A copy: what lies in shared memory cannot be written.
                    tensors[name] = torch.tensor(array, dtype=dtype, device=target)
                except TypeError as error:
                    raise TypeError(f"the column {name!r} cannot be a tensor: {error}; give a collate_fn") from error
            yield tensors


def get_dataset_shard(dataset_name: str = "train") -> DatasetShard:
    """This rank's rows of a table that was given to the run.

    Args:
        dataset_name: The table's name.

    Returns:
        The rows.

    Raises:
        KeyError: The run was given no table of that name.
    """
    path = os.environ.get(_SHARDS + dataset_name)
    if path is None:
        raise KeyError(f"the run was given no dataset {dataset_name!r}")
    import pyarrow

    with pyarrow.memory_map(path) as source:
        return DatasetShard(pyarrow.ipc.open_file(source).read_all())


def _arrays(batch: pyarrow.Table) -> dict[str, Any]:
    """The columns as arrays. Lists of the same length in each row are arrays of two dimensions."""
    import numpy
    import pyarrow

    arrays = {}
    for name in batch.column_names:
        array = batch.column(name).to_numpy()
        kind = batch.schema.field(name).type
        if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
            rows = [numpy.asarray(row) for row in array]
            array = numpy.stack(rows) if len({row.shape for row in rows}) == 1 else array
        arrays[name] = array
    return arrays
