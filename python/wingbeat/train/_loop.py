"""What a rank of a `TorchTrainer` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wingbeat.train import _process_group
from wingbeat.train._config import TorchConfig


def run(loop: Callable[..., Any], config: TorchConfig, *, train_loop_config: tuple[Any, ...]) -> None:
    """Calls the loop in a process group. What the loop returns is dropped: it may be anything.

    Args:
        loop: The user's function.
        config: How to join the process group.
        train_loop_config: What the loop is called with: its configuration, if it takes one.
    """
    store = _process_group.join(config.backend, config.timeout_s)
    try:
        loop(*train_loop_config)
    except SystemExit as end:
        # A rank that ends well by `sys.exit()` leaves as any other: the first waits for all.
        if store is not None and not end.code:
            _process_group.leave(store)
        raise
    if store is not None:
        _process_group.leave(store)
