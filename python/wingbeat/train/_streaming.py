"""A rank's part of a dataset in files, read as it is needed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wingbeat._files._reading import OpenFiles
from wingbeat.train import _formats
from wingbeat.train._ahead import ahead
from wingbeat.train._context import get_context
from wingbeat.train._dataset_errors import TooFewRowsError
from wingbeat.train._gather import Memory, Pick, Rows, Slots, Spare, gathered
from wingbeat.train._lane import Lane, slots_of
from wingbeat.train._order import Order
from wingbeat.train._source import FileDataset
from wingbeat.train._unsupported import refuse

if TYPE_CHECKING:
    import pyarrow
    import torch

    # What makes of rows what cuts batches from them, by their beginning and number of rows.
    Cutter = Callable[[Rows], Callable[[int, int], Any]]

# Rows that are put together at a time, at most, for as many batches as they make.
_BLOCK_ROWS = 1 << 18
# How many windows of rows that stay in their order are put together: they are not copied.
_WINDOWS_IN_ORDER = 4
# Of how many pieces of memory arrays are made without putting them together.
_PARTS = 8
# Rows that are made Python objects at a time.
_LIST_ROWS = 256


class StreamingShard:
    """This rank's part of a dataset in files. Rows are read when they are needed.

    Each iteration is an epoch. Iterate on all ranks alike: with the same batch size, seed and `drop_last`, and as often.

    The dataset has a global order, which depends on the files, the seed and the epoch, and not on the number of ranks
    (`wingbeat/train/_order.py` defines it). With batches of b rows on n ranks, step k takes the rows at the positions from k b n
    on, and rank r has those at k b n + r, k b n + r + n and so on. All ranks take as many steps.

    Args:
        dataset: The dataset.
        rank: This rank; None for what the context says.
        ranks: How many there are; None for what the context says.
    """

    def __init__(self, dataset: FileDataset, rank: int | None = None, ranks: int | None = None) -> None:
        context = get_context()
        self.dataset = dataset
        self._rank = context.world_rank if rank is None else rank
        self._ranks = context.world_size if ranks is None else ranks
        self._state: dict[str, Any] = {"epoch": 0, "rows": 0}
        self._has_begun = False
        self._spare = Spare.of_process()
        # Of the iteration that is going on. In its last batch, the state is already that of the next.
        self._epoch: int | None = None

    @property
    def num_rows(self) -> int:
        """How many rows the dataset has, on all ranks together."""
        return self.dataset.num_rows

    @property
    def schema(self) -> pyarrow.Schema:
        """The columns."""
        return self.dataset.schema

    @property
    def epoch(self) -> int:
        """The epoch of the iteration that is going on, or of the next one if there is none."""
        if self._epoch is not None:
            return self._epoch
        # One that was left early is over.
        return int(self._state["epoch"] + (self._has_begun and self._state["rows"] > 0))

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, which begins at its first row.

        Args:
            epoch: The epoch, from 0.

        Raises:
            ValueError: It is negative.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is not negative, and this is {epoch}")
        self._state, self._has_begun, self._epoch = {"epoch": int(epoch), "rows": 0}, False, None

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is: after the batch that it has given last. It is the same on all ranks, small, and fit for JSON.

        Returns:
            The state. Its `rows` are those that all ranks together have had in this epoch.
        """
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next iteration go on from a state, also with another number of ranks or another batch size.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: It is of another dataset, or no such state.
        """
        if not isinstance(state, Mapping) or not {"epoch", "rows"} <= set(state):
            raise ValueError(f"a shard's state has an epoch and rows; this is {state!r:.100}")
        if state.get("of", self.num_rows) != self.num_rows:
            raise ValueError(f"the state is of a dataset with {state['of']} rows, and this one has {self.num_rows}")
        layout = self.dataset.layout
        if state["rows"] and state.get("layout", layout) != layout:
            raise ValueError(
                "the state was taken with other files, or with files of other sizes or row groups: the rows that are left would "
                "be others; go on with the same files, or begin an epoch anew with set_epoch"
            )
        self._state, self._has_begun, self._epoch = dict(state), False, None

    def iter_batches(
        self,
        *,
        batch_size: int = 256,
        batch_format: str = "numpy",
        shuffle_seed: int | None = None,
        drop_last: bool = False,
        prefetch_batches: int = 1,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
    ) -> Iterator[Any]:
        """Iterates over this rank's batches of an epoch.

        Args:
            batch_size: Rows of a rank's batch.
            batch_format: "numpy" or "default" (a dict of arrays), "pandas" or "pyarrow".
            shuffle_seed: The seed of the global order. None for the order of the files.
            drop_last: Whether rows that do not fill a batch on every rank are left out. Otherwise ranks share them in a last
                batch; fewer rows than ranks are added to the batch before, one to each of the first ranks.
            prefetch_batches: How many batches are ready ahead, at least. A thread makes them; with 0, none is made ahead.
            local_shuffle_buffer_size: Ray's; refused.
            local_shuffle_seed: Ray's; refused.

        Yields:
            The batches.

        Raises:
            ValueError: An argument makes no sense, or the state that was loaded is of another seed.
            TooFewRowsError: There are more ranks than rows, or than rows that are left of the epoch.
            UnreadableFileError: A file cannot be read.
            NotImplementedError: An option is refused.
        """
        if local_shuffle_buffer_size is not None or local_shuffle_seed is not None:
            raise refuse("a local shuffle of a dataset in files", "use shuffle_seed=, which shuffles across ranks")
        with_nulls = frozenset(self.dataset.with_nulls)
        made = _formats.maker(batch_format, with_nulls)
        is_arrays = _formats.is_arrays(batch_format)
        cutter = functools.partial(_arrays_cutter, with_nulls) if is_arrays else functools.partial(_tables_cutter, made)
        return self._iterate(batch_size, shuffle_seed, drop_last, prefetch_batches, cutter)

    def iter_torch_batches(
        self,
        *,
        batch_size: int = 256,
        dtypes: torch.dtype | dict[str, torch.dtype] | None = None,
        device: str | torch.device = "auto",
        collate_fn: Callable[[dict[str, Any]], Any] | None = None,
        shuffle_seed: int | None = None,
        drop_last: bool = False,
        prefetch_batches: int = 1,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
    ) -> Iterator[Any]:
        """Iterates over this rank's batches of an epoch as tensors.

        Args:
            batch_size: As `iter_batches`.
            dtypes: The tensors' type, for all columns or by column.
            device: Where the tensors are; "auto" is this rank's device.
            collate_fn: Makes something else of a batch, which it gets as a dict of arrays.
            shuffle_seed: As `iter_batches`.
            drop_last: As `iter_batches`.
            prefetch_batches: As `iter_batches`.
            local_shuffle_buffer_size: Ray's; refused.
            local_shuffle_seed: Ray's; refused.

        Yields:
            A dict of tensors by column, or what `collate_fn` has made.

        Raises:
            TypeError: A column holds what tensors cannot hold.
            KeyError: `dtypes` names a column that is not there.
            ValueError: As `iter_batches`.
        """
        made = _formats.tensors(dtypes, device, collate_fn)
        batches = self.iter_batches(
            batch_size=batch_size,
            shuffle_seed=shuffle_seed,
            drop_last=drop_last,
            prefetch_batches=prefetch_batches,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )
        return map(made, batches)

    def iter_rows(self, *, shuffle_seed: int | None = None) -> Iterator[dict[str, Any]]:
        """Iterates over this rank's rows of an epoch. Ranks may differ by one row. The state counts the rows that were given.

        Args:
            shuffle_seed: The seed of the global order. None for the order of the files.

        Yields:
            Each row, as a dict by column.
        """
        begin = self._start(shuffle_seed)["rows"]
        for batch in self._iterate(1, shuffle_seed, False, 1, _rows_cutter, may_differ=True):
            if len(batch) > 1:
                # The last step, with one of the rows that are fewer than ranks.
                state, after = self._state, dict(self._state)
                state.update(epoch=after["epoch"] - 1, rows=self.num_rows - (self.num_rows - begin) % self._ranks)
                yield batch[0]
                state.update(after)
            yield batch[-1]

    def _iterate(
        self,
        batch_size: int,
        seed: int | None,
        drop_last: bool,
        prefetch_batches: int,
        cutter: Cutter,
        may_differ: bool = False,
    ) -> Iterator[Any]:
        _check("batch_size", batch_size, 1)
        _check("prefetch_batches", prefetch_batches, 0)
        if seed is not None:
            _check("shuffle_seed", seed, 0)
        if self.num_rows < self._ranks:
            raise TooFewRowsError(f"the dataset has {self.num_rows} rows, and there are {self._ranks} ranks: use fewer ranks")
        self._steps(self._start(seed), batch_size, drop_last, may_differ)
        return self._batches(batch_size, seed, drop_last, prefetch_batches, cutter, may_differ)

    def _start(self, seed: int | None) -> dict[str, Any]:
        """The state at the beginning of an iteration."""
        begin, epoch = int(self._state["rows"]), int(self._state["epoch"])
        order = {
            "of": self.num_rows,
            "seed": seed,
            "lanes": self.dataset.lanes_with(seed),
            "window_rows": self.dataset.window_rows,
            "layout": self.dataset.layout,
        }
        if self._has_begun:
            begin, epoch = 0, epoch + (begin > 0)
        elif begin:
            for name, value in order.items():
                if self._state.get(name, value) != value:
                    named = {"seed": "shuffle_seed"}.get(name, name)
                    raise ValueError(
                        f"the state was taken with {named}={self._state[name]!r}, and this iteration has {named}={value!r}: "
                        "the rows that are left would be others"
                    )
        return {"epoch": epoch, "rows": begin, **order}

    def _steps(self, state: Mapping[str, Any], batch_size: int, drop_last: bool, may_differ: bool) -> _Steps:
        """The batches of an iteration that begins at a state."""
        begin, epoch = state["rows"], state["epoch"]
        steps = _Steps(begin, self.num_rows, batch_size, self._rank, self._ranks, drop_last, may_differ)
        if steps.lost:
            raise TooFewRowsError(
                f"{steps.lost} of the dataset's {self.num_rows} rows are left of epoch {epoch}, and there are {self._ranks} "
                f"ranks, of which each needs one: go on with {steps.lost} ranks at most, or leave these rows out with "
                f"set_epoch({epoch + 1}) or drop_last=True"
            )
        return steps

    def _batches(
        self, batch_size: int, seed: int | None, drop_last: bool, prefetch_batches: int, cutter: Cutter, may_differ: bool
    ) -> Iterator[Any]:
        # Now, and not when the iterator was made: of two that were made before either is used, each is an epoch.
        state = self._start(seed)
        steps = self._steps(state, batch_size, drop_last, may_differ)
        begin, epoch = state["rows"], state["epoch"]
        self._state, self._has_begun, self._epoch = state, True, epoch
        if drop_last and not begin and not len(steps) and self._rank == 0:
            warnings.warn(
                f"epoch {epoch} has no batch: its {self.num_rows} rows do not fill one of {batch_size} rows on each of the "
                f"{self._ranks} ranks, and drop_last leaves them out; use a smaller batch_size",
                RuntimeWarning,
                stacklevel=2,
            )
        order = Order(self.dataset.unit_rows, state["lanes"], self.dataset.window_rows, seed, epoch)
        try:
            yield from self._given(steps, order, prefetch_batches, cutter, state)
        finally:
            if self._state is state:
                self._epoch = None

    def _given(self, steps: _Steps, order: Order, prefetch_batches: int, cutter: Cutter, state: dict[str, Any]) -> Iterator[Any]:
        # As many rows as a window of each lane has: then each window is gone through once or twice, and not time and again.
        windows = -(-len(order.lanes) // self._ranks)
        if order.seed is None and len(order.lanes) == self._ranks == 1:
            windows = _WINDOWS_IN_ORDER
        in_a_block = max(1, min(_BLOCK_ROWS, windows * self.dataset.window_rows) // steps.batch_size)
        source = _blocks(self.dataset, order, steps, in_a_block, cutter, self._spare)
        step = 0
        with contextlib.closing(ahead(source, -(-prefetch_batches // in_a_block))) as blocks:
            for cut, sizes in blocks:
                done = 0
                for size in sizes:
                    batch = cut(done, size)
                    done += size
                    step += 1
                    # Before the batch is given: a checkpoint that is taken with it counts it as done.
                    state["rows"] = steps.consumed(step)
                    if step == len(steps):
                        state.update(epoch=order.epoch + 1, rows=0)
                    yield batch
        if not len(steps):
            state.update(epoch=order.epoch + 1, rows=0)


@dataclass(frozen=True)
class _Steps:
    """The batches of a rank from some global position on."""

    begin: int
    rows: int
    batch_size: int
    rank: int
    ranks: int
    drop_last: bool
    may_differ: bool = False  # whether ranks may take different numbers of steps

    @property
    def _whole(self) -> int:
        return (self.rows - self.begin) // (self.batch_size * self.ranks)

    @property
    def _rest(self) -> int:
        return (self.rows - self.begin) % (self.batch_size * self.ranks)

    @property
    def lost(self) -> int:
        """How many rows no rank could have although none is to be left out: fewer than ranks are left, and no step before to
        which they could be added."""
        is_lost = not self.drop_last and not self.may_differ and self._whole == 0 and self._rest < self.ranks
        return self._rest if is_lost else 0

    def __len__(self) -> int:
        if self._rest < self.ranks:
            return self._whole or int(self.may_differ and self.rank < self._rest)
        return self._whole + (not self.drop_last)

    def size(self, step: int) -> int:
        """How many rows this rank has in a step."""
        if self.drop_last or step < self._whole - 1:
            return self.batch_size
        own = self._rest // self.ranks + (self.rank < self._rest % self.ranks)
        if step == self._whole:
            return own
        return self.batch_size + (own if self._rest < self.ranks else 0)

    def consumed(self, steps: int) -> int:
        """How many rows all ranks together have had after so many steps."""
        return min(self.rows, self.begin + steps * self.batch_size * self.ranks)


def _blocks(
    dataset: FileDataset, order: Order, steps: _Steps, in_a_block: int, cutter: Cutter, spare: Spare
) -> Generator[tuple[Callable[[int, int], Any], list[int]], None, None]:
    """This rank's rows, for some batches at a time: what cuts batches of them, and how large these are."""
    lanes: dict[int, Lane] = {}
    done = 0
    files, memory = OpenFiles(dataset.filesystem), Memory(dataset.lane_bytes * len(order.lanes))
    together = min(in_a_block * steps.batch_size * steps.ranks, order.rows)
    windows = memory if order.seed is None else slots_of(dataset, order, together, spare)
    reader = ThreadPoolExecutor(1, thread_name_prefix="wingbeat-reader")
    try:
        for first in range(0, len(steps), in_a_block):
            sizes = [steps.size(step) for step in range(first, min(first + in_a_block, len(steps)))]
            count = sum(sizes)
            picks: list[Pick] = []
            for stretch in order.stretches(steps.begin + steps.rank + done * steps.ranks, count, steps.ranks):
                if stretch.lane not in lanes:
                    lanes[stretch.lane] = Lane(dataset, order, stretch.lane, stretch.offset, files, reader, windows)
                picks += lanes[stretch.lane].take(stretch)
            cut = cutter(gathered(picks, count, memory))
            del picks  # which hold windows
            yield cut, sizes
            del cut
            done += count
    finally:
        reader.shutdown(wait=True, cancel_futures=True)
        memory.close()
        if isinstance(windows, Slots):
            windows.close()


def _tables_cutter(made: Callable[[pyarrow.Table], Any], rows: Rows) -> Callable[[int, int], Any]:
    return lambda begin, count: made(rows.table.slice(begin, count))


def _rows_cutter(rows: Rows) -> Callable[[int, int], list[dict[str, Any]]]:
    """What cuts rows, one after the other."""
    each = (row for batch in rows.table.to_batches(max_chunksize=_LIST_ROWS) for row in batch.to_pylist())
    return lambda begin, count: list(itertools.islice(each, count))


def _arrays_cutter(with_nulls: Collection[str], rows: Rows) -> Callable[[int, int], dict[str, Any]]:
    """What cuts batches of arrays, one after the other."""
    names = rows.schema.names
    numbers, table = rows.split(with_nulls)
    nested = [name for name in table.column_names if _formats.is_nested(table.schema.field(name).type)]
    apart, flat = table.select(nested), _flat_cutter(with_nulls, table.drop_columns(nested))

    def cut(begin: int, count: int) -> dict[str, Any]:
        made = {name: array[begin : begin + count] for name, array in numbers.items()}
        if len(made) == len(names):
            return made
        made.update(flat(begin, count))
        if nested:
            made.update(_formats.arrays(apart.slice(begin, count), is_own=True))
        return {name: made[name] for name in names}

    return cut


def _flat_cutter(with_nulls: Collection[str], flat: pyarrow.Table) -> Callable[[int, int], dict[str, Any]]:
    """What cuts batches of arrays, one after the other, without lists. Arrays are made once for all batches in a piece that lies
    together. To put pieces together first would copy them."""
    parts = _parts(flat)
    ends = list(itertools.accumulate(part.num_rows for part in parts))
    made: deque[tuple[int, int, dict[str, Any]]] = deque()  # the parts in use: where they begin and end, and their arrays

    def cut(begin: int, count: int) -> dict[str, Any]:
        end = begin + count
        while parts and (not made or made[-1][1] < end):
            part = parts.popleft()
            last = ends[-1 - len(parts)]
            made.append((last - part.num_rows, last, _formats.arrays(part, with_nulls, is_own=True)))
        while len(made) > 1 and made[0][1] <= begin:
            made.popleft()
        if len(made) == 1:
            first, _, whole = made[0]
            return {name: array[begin - first : end - first] for name, array in whole.items()}
        return {name: _joined(name, made, begin, end) for name in flat.column_names}

    return cut


def _joined(name: str, made: Iterable[tuple[int, int, dict[str, Any]]], begin: int, end: int) -> Any:
    """The rows of a column that are in several parts."""
    import numpy

    return numpy.concatenate([whole[name][max(begin, first) - first : end - first] for first, _, whole in made])


def _parts(table: pyarrow.Table) -> deque[pyarrow.Table]:
    """The rows that lie together in memory, in order; all of them as one if there are many such pieces."""
    import pyarrow

    batches = table.to_batches()
    return deque([table] if len(batches) > _PARTS else map(pyarrow.Table.from_batches, zip(batches)))


def _check(name: str, number: Any, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {number!r}")


_given: dict[str, FileDataset] = {}
_shards: dict[str, StreamingShard] = {}


def give(datasets: Mapping[str, FileDataset]) -> None:
    """Gives datasets to this rank, for `get_dataset_shard`.

    Args:
        datasets: The datasets, by name.
    """
    _given.clear()
    _shards.clear()
    _given.update(datasets)


def shard_of(name: str) -> StreamingShard | None:
    """This rank's part of a dataset in files.

    Args:
        name: The dataset's name.

    Returns:
        The same object each time; None if the run has no such dataset.
    """
    if name not in _shards and name in _given:
        _shards[name] = StreamingShard(_given[name])
    return _shards.get(name)


def call(datasets: Mapping[str, FileDataset], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function on a rank that has these datasets.

    Args:
        datasets: The datasets, by name.
        function: The function.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What it returns.
    """
    give(datasets)
    return function(*args, **kwargs)
