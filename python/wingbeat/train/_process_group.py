"""The process group of all ranks, as `torch.distributed` has it.

A rank that waits for the others to join or to end waits in this file: `wingbeat train` looks for it in the stacks of
ranks that hang.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from wingbeat.train._context import get_context

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# How long between two looks at who has left. `Store.wait` would do without, but handles no signals meanwhile.
_LOOK_S = 0.2
_BACKEND = "WINGBEAT_BACKEND"


def join(backend: str | None = None, timeout_s: float = 1800) -> Store | None:
    """Joins the process group, unless this rank has joined one.

    Args:
        backend: "nccl" or "gloo"; None for what the run has chosen.
        timeout_s: After how many seconds a collective has failed.

    Returns:
        The store of the group that was joined; None if there was one before.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from wingbeat.train._device import get_device

    if dist.is_initialized():
        return None
    chosen = backend or os.environ.get(_BACKEND) or ("nccl" if torch.cuda.is_available() else "gloo")
    if chosen == "nccl":
        torch.cuda.set_device(get_device())
    timeout = timedelta(seconds=timeout_s)
    store: Store
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    dist.init_process_group(chosen, store=store, rank=rank, world_size=size, timeout=timeout)
    store.set(f"wingbeat/joined/{rank}", "")
    return store


def leave(store: Store) -> None:
    """Leaves the process group. The first rank, which serves the store, waits for the others.

    None leaves before all have joined: gloo connects each to each, and fails on a rank whose other side has left already.
    """
    import torch.distributed as dist

    context = get_context()
    joined = [f"wingbeat/joined/{rank}" for rank in range(context.world_size)]
    while not store.check(joined):
        time.sleep(_LOOK_S)
    if dist.is_initialized():
        dist.destroy_process_group()
    store.set(f"wingbeat/left/{context.world_rank}", "")
    if context.world_rank == 0:
        for rank in range(context.world_size):
            # Ranks may end at very different times: only the end of the run ends this.
            while not store.check([f"wingbeat/left/{rank}"]):
                time.sleep(_LOOK_S)
