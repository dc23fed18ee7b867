"""Sums of small arrays over ranks of the same machine.

For a gradient of a few KiB, gloo takes a millisecond on two cores: its threads wake each other several times. Here, each
rank sends its array over a socket to the first, which adds them up and sends the sum back: two switches of process. It
waits in the kernel, so that more ranks than cores are no harm, and adds in the order of ranks, so that the sum is always
the same.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Larger arrays are faster by gloo, and would not fit into one message.
MOST_BYTES = 64 << 10


def all_reduce(is_one_machine: bool, nbytes: int, device: torch.device) -> Callable[[torch.Tensor], Any]:
    """The fastest way to sum arrays over the ranks of the process group. Every rank calls it.

    Args:
        is_one_machine: Whether all ranks are on the same machine.
        nbytes: The size of the largest array.
        device: Where arrays are.

    Returns:
        A function that sums a tensor over all ranks, in place.
    """
    import torch.distributed as dist

    if is_one_machine and nbytes <= MOST_BYTES and device.type == "cpu":
        star = _star(dist.get_rank(), dist.get_world_size())
        return dist.all_reduce if star is None else star.sum
    return dist.all_reduce


class _Star:
    """The first rank's connections to all others in their order, or another's to the first. They close with the process."""

    def __init__(self, rank: int, connections: list[socket.socket]) -> None:
        self._is_first = rank == 0
        self._connections = connections

    def sum(self, tensor: torch.Tensor) -> None:
        """Sums a tensor over all ranks, in place."""
        import numpy

        own = tensor.numpy().reshape(-1)
        if not self._is_first:
            self._connections[0].sendall(own.data)
            _receive(self._connections[0], own, "the first rank")
            return
        other = numpy.empty_like(own)
        for rank, connection in enumerate(self._connections, 1):
            _receive(connection, other, f"rank {rank}")
            own += other
        for connection in self._connections:
            connection.sendall(own.data)


def _star(rank: int, ranks: int) -> _Star | None:
    """Connects all ranks; None if the first cannot listen, as where the path of $TMPDIR is too long for a socket."""
    import torch.distributed as dist

    paths: list[Any] = [None]
    if rank:
        dist.broadcast_object_list(paths)
        if paths[0] is None:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(paths[0])
        connection.sendall(rank.to_bytes(8, "big"))
        return _Star(rank, [connection])
    with contextlib.ExitStack() as stack:
        # Only this user can connect to what is in this folder.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wingbeat-sum-"))
        listener = stack.enter_context(_listener(os.path.join(folder, "socket"), ranks))
        paths[0] = listener.getsockname() or None
        dist.broadcast_object_list(paths)
        if paths[0] is None:
            return None
        accepted = [listener.accept()[0] for _ in range(ranks - 1)]
    by_rank = {int.from_bytes(connection.recv(8), "big"): connection for connection in accepted}
    return _Star(rank, [by_rank[other] for other in range(1, ranks)])


def _listener(path: str, ranks: int) -> socket.socket:
    """A socket that listens at a path, or has no name if it cannot."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(OSError):
        listener.bind(path)
        listener.listen(ranks)
    return listener


def _receive(connection: socket.socket, into: Any, who: str) -> None:
    if connection.recv_into(into.data) != into.nbytes:
        raise ConnectionError(f"{who} ended during training; its own error says why")
