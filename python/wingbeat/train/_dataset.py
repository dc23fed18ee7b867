"""A rank's part of a table that was given to the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from wingbeat._files import _contents
from wingbeat.train import _formats

if TYPE_CHECKING:
    import pyarrow
    import torch

_SHARDS = "WINGBEAT_SHARD_"
_shards: dict[str, DatasetShard] = {}


class DatasetShard:
    """This rank's rows of a table, over shared memory.

    It has all attributes of a `pyarrow.Table`, and some iterators of Ray's `DataIterator`. `table` is the table itself.

    Args:
        table: The rows.
        with_nulls: The columns of integers and booleans that have nulls, here or on another rank.
    """

    def __init__(self, table: pyarrow.Table, with_nulls: Collection[str] = ()) -> None:
        self.table, self._with_nulls = table, with_nulls
        self._iterations = 0

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, key: Any) -> Any:
        return self.table[key]

    def __getattr__(self, name: str) -> Any:
        if name in ("table", "_iterations", "_with_nulls"):  # not made yet: as while it is unpickled
            raise AttributeError(name)
        return getattr(self.table, name)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.table.__arrow_c_stream__(requested_schema)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration over batches, as after a restart from a checkpoint. It decides the order that
        `shuffle_seed` gives.

        Args:
            epoch: The epoch, from 0.

        Raises:
            ValueError: It is negative.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is not negative, and this is {epoch}")
        self._iterations = int(epoch)

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
        shuffle_seed: int | None = None,
    ) -> Iterator[Any]:
        """Iterates over batches of rows.

        Args:
            batch_size: Rows of a batch; None for all of them.
            batch_format: "numpy" or "default" (a dict of arrays), "pandas" or "pyarrow".
            drop_last: Whether a last batch with fewer rows is left out.
            local_shuffle_buffer_size: If it is given, all rows of this rank are shuffled, whatever the size.
            local_shuffle_seed: The seed of that, for the same order again.
            prefetch_batches: Ignored: the rows are in memory.
            shuffle_seed: If it is given, all rows of this rank are shuffled, in each iteration otherwise. Of a dataset in files,
                rows of all ranks are.

        Yields:
            The batches.

        Raises:
            ValueError: The format or the size is none of these.
        """
        is_shuffled = shuffle_seed is not None or local_shuffle_buffer_size is not None
        # A copy of all rows would take as much memory as these.
        made = _formats.maker(batch_format, self._with_nulls, is_shuffled, batch_size is not None)
        yield from map(made, self._tables(batch_size, drop_last, local_shuffle_buffer_size, local_shuffle_seed, shuffle_seed))

    def _tables(
        self, batch_size: int | None, drop_last: bool, buffer_size: int | None, local_seed: int | None, seed: int | None
    ) -> Iterator[pyarrow.Table]:
        """The rows of each batch."""
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        table, epoch = self.table, self._iterations
        self._iterations += 1
        if buffer_size is not None:
            import numpy

            table = table.take(numpy.random.default_rng(local_seed).permutation(table.num_rows))
        if seed is not None:
            from wingbeat.train._order import permutation

            table = table.take(permutation(table.num_rows, seed, epoch))
        size = batch_size or max(1, table.num_rows)
        for begin in range(0, table.num_rows, size):
            batch = table.slice(begin, size)
            if drop_last and batch.num_rows < size:
                return
            yield batch

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
        shuffle_seed: int | None = None,
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
            shuffle_seed: If it is given, all rows of this rank are shuffled, in each iteration otherwise. Of a dataset in files,
                rows of all ranks are.

        Yields:
            A dict of tensors by column, or what `collate_fn` has made.

        Raises:
            TypeError: A column holds what tensors cannot hold.
            KeyError: `dtypes` names a column that is not there.
        """
        made = _formats.tensors(dtypes, device, collate_fn)
        is_shuffled = shuffle_seed is not None or local_shuffle_buffer_size is not None
        # Tensors are copies themselves.
        is_copied = collate_fn is not None and batch_size is not None
        for table in self._tables(batch_size, drop_last, local_shuffle_buffer_size, local_shuffle_seed, shuffle_seed):
            yield made(_formats.arrays(table, self._with_nulls, is_shuffled, is_copied))


def get_dataset_shard(dataset_name: str = "train") -> Any:
    """This rank's rows of a dataset that was given to the run.

    Args:
        dataset_name: The dataset's name.

    Returns:
        A `DatasetShard` of a table; a `StreamingShard` of files. It is the same object each time, which counts its iterations.

    Raises:
        KeyError: The run was given no dataset of that name.
    """
    from wingbeat.train import _streaming

    of_files = _streaming.shard_of(dataset_name)
    if of_files is not None:
        return of_files
    path = os.environ.get(_SHARDS + dataset_name)
    if path is None:
        raise KeyError(f"the run was given no dataset {dataset_name!r}")
    if path not in _shards:
        import pyarrow

        with pyarrow.memory_map(path) as source:
            _shards[path] = DatasetShard(*_contents.unmarked(pyarrow.ipc.open_file(source).read_all()))
    return _shards[path]
