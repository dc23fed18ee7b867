"""The devices of a rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from wingbeat.train._context import get_context

if TYPE_CHECKING:
    import torch

# How the ranks of a node are told apart.
_LAYOUT = "WINGBEAT_LAYOUT"
_TORCHRUN = "torchrun"


def get_device() -> torch.device:
    """This rank's device, or the first of them.

    Returns:
        `cuda:N` where the rank holds a GPU, and `cpu` elsewhere.

    Raises:
        RuntimeError: The ranks of this node share its GPUs unevenly, so that it is unknown which is whose.
    """
    return get_devices()[0]


def get_devices() -> list[torch.device]:
    """This rank's devices.

    Returns:
        The GPUs that it holds, and `cpu` where it holds none.

    Raises:
        RuntimeError: The ranks of this node share its GPUs unevenly, so that it is unknown which is whose.
    """
    import torch

    if not torch.cuda.is_available():
        return [torch.device("cpu")]
    context, visible = get_context(), torch.cuda.device_count()
    if os.environ.get(_LAYOUT, _TORCHRUN) != _TORCHRUN:
        return [torch.device("cuda", number) for number in range(visible)]  # the rank sees only its own
    # Every rank of a node sees the GPUs of all, in the order of ranks.
    each, rest = divmod(visible, context.local_world_size)
    if each and not rest:
        first = context.local_rank * each
        return [torch.device("cuda", first + number) for number in range(each)]
    if not each and context.local_world_size % visible == 0:
        return [torch.device("cuda", context.local_rank * visible // context.local_world_size)]
    raise RuntimeError(
        f"{context.local_world_size} ranks share {visible} GPUs of this node unevenly: "
        "choose the device yourself, or give each rank as much of a GPU as the others"
    )
