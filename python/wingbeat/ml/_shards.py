"""One pass over a data set: in this process, or over shards by the ranks of a group, whose states are merged."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from wingbeat import _interrupts
from wingbeat.ml._errors import InvalidParameter, MlError
from wingbeat.ml._source import Batch, Source

S = TypeVar("S", bound="State")

# Below this, one process has read a data set before ranks have started: they take 1.2 s without a cluster.
LOCAL_BYTES = 512 << 20
# More ranks read no faster than the store of one machine.
_MOST_RANKS = 8
# What the error of a run says for which the cluster is too small.
_NEVER = "can never be placed"


class State(Protocol):
    """What is known of the rows that were seen. It is pickled on its way from a rank."""

    def update(self, batch: Batch) -> None:
        """Takes more rows in."""

    def merge(self: S, other: S) -> None:
        """Takes in what another state has seen of the rows after these."""


def reduce(make: Callable[[], S], source: Source, columns: Sequence[str], local_bytes: int, workers: int | None) -> S:
    """Passes once over a data set.

    Args:
        make: Makes a state that has seen no row.
        source: The data set.
        columns: The columns that the state needs.
        local_bytes: Files that are larger than this, uncompressed, are read by ranks. A table in memory never is:
            sending it would take longer than a pass over it.
        workers: How many ranks; None for as many as `usual_ranks` says.

    Returns:
        The state that has seen all rows.

    Raises:
        MissingColumn: A column is not there.
        InvalidParameter: The cluster can never hold so many ranks.
    """
    columns = list(dict.fromkeys(columns))
    source.require(columns)
    if workers == 1 or not source.is_in_files or source.nbytes(columns) <= local_bytes:
        return _pass(make, source, columns, 0, None)
    ranges = source.split(usual_ranks() if workers is None else workers)
    if len(ranges) == 1 and workers is None:
        return _pass(make, source, columns, 0, None)
    sent = (make, source, columns, ranges)
    states: list[S] = on_ranks(_shard, sent, len(ranges), parameter="numWorkers", return_all=True)
    first, *others = states
    for state in others:
        first.merge(state)
    return first


def usual_ranks() -> int:
    """How many ranks read a data set, unless a program says it: as many as there are CPUs for, and 8 at most."""
    if os.environ.get("WINGBEAT_ADDRESS"):
        from wingbeat.tune._cluster import slots

        return min(slots({}, 1, 0), _MOST_RANKS)
    return min(local_cpus(), _MOST_RANKS)


def local_cpus() -> int:
    """How many CPUs this process may use: of those of the machine, also by its control group."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return cpus if quota == "max" else max(1, min(cpus, int(quota) // int(period)))
    except (OSError, ValueError):  # no control groups of version 2
        return cpus


def on_ranks(
    function: Callable[..., Any],
    args: Sequence[Any],
    ranks: int,
    *,
    parameter: str = "",
    table: Any = None,
    use_gpu: bool = False,
    return_all: bool = False,
) -> Any:
    """Calls a function on ranks: on the cluster at `$WINGBEAT_ADDRESS`, and without that on this machine.

    Args:
        function: The function. An `MlError` that it returns is raised here: what a rank raises is shown with its traceback.
        args: Its arguments.
        ranks: How many ranks.
        parameter: The parameter that says so, for errors; "" for none.
        table: A table of which each rank gets its own rows.
        use_gpu: Whether each rank gets a GPU of its own.
        return_all: Whether the values of all ranks are wanted, and not only rank 0's.

    Returns:
        What rank 0's function returned, or a list of what each rank's did.

    Raises:
        InvalidParameter: The cluster can never hold so many ranks.
        Exception: That of the first rank that failed.
    """
    value = _on_ranks(function, args, ranks, parameter, table, use_gpu, return_all)
    for one in value if return_all else [value]:
        if isinstance(one, MlError):
            raise one
    return value


def _on_ranks(
    function: Callable[..., Any], args: Sequence[Any], ranks: int, parameter: str, table: Any, use_gpu: bool, return_all: bool
) -> Any:
    from wingbeat.torch import TorchDistributor, TrainingError

    _interrupts.check()
    distributor = TorchDistributor(ranks, local_mode=not os.environ.get("WINGBEAT_ADDRESS"), use_gpu=use_gpu)
    try:
        if table is None:
            return distributor.run(function, *args, return_all=return_all)
        return distributor.run_on_dataframe(function, table, *args, return_all=return_all)
    except TrainingError as error:
        if parameter and _NEVER in str(error):
            raise InvalidParameter(f"{parameter} is {ranks}, and the cluster has no room for so many ranks: {error}") from error
        raise


def _shard(make: Callable[[], S], source: Source, columns: Sequence[str], ranges: Sequence[tuple[int, int]]) -> S:
    from wingbeat.train import get_context

    return _pass(make, source, columns, *ranges[get_context().get_world_rank()])


def _pass(make: Callable[[], S], source: Source, columns: Sequence[str], start: int, stop: int | None) -> S:
    state = make()
    for batch in source.batches(columns, start, stop):
        state.update(batch)
    return state
