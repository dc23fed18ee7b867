"""Models and data loaders of one process, made ready for many."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from wingbeat.train import _process_group
from wingbeat.train._context import get_context
from wingbeat.train._device import get_device


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Moves a model to this rank's device, and wraps it where there are several ranks.

    Args:
        model: The model.
        move_to_device: Whether to move it, or where to.
        parallel_strategy: "ddp" for DistributedDataParallel, "fsdp" for FullyShardedDataParallel (on GPUs), or None to
            wrap nothing.
        parallel_strategy_kwargs: Arguments of that class.

    Returns:
        The model, wrapped if there are several ranks.

    Raises:
        ValueError: The strategy is none of these.
        RuntimeError: "fsdp" on CPUs.
    """
    if parallel_strategy not in ("ddp", "fsdp", None):
        raise ValueError(f'parallel_strategy must be "ddp", "fsdp" or None, not {parallel_strategy!r}')
    device = move_to_device if isinstance(move_to_device, torch.device) else get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if move_to_device:
        model = model.to(device)
    if parallel_strategy is None or get_context().world_size == 1:
        return model
    _process_group.join()
    arguments = dict(parallel_strategy_kwargs or {})
    if parallel_strategy == "ddp":
        if device.type == "cuda":
            arguments = {"device_ids": [device], "output_device": device, **arguments}
        return DistributedDataParallel(model, **arguments)
    if device.type != "cuda":
        raise RuntimeError('parallel_strategy="fsdp" needs GPUs: set ScalingConfig(use_gpu=True), or use "ddp"')
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, **arguments)


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> DataLoader[Any]:
    """Has each rank load its own part of the data, onto its device.

    With several ranks, the loader gets a `DistributedSampler` that shuffles if the loader did. Call
    `loader.sampler.set_epoch(epoch)` before each epoch, or every epoch has the same order.

    Args:
        data_loader: The loader.
        add_dist_sampler: Whether to add the sampler. It is not added to one that has it, or over an `IterableDataset`.
        move_to_device: Whether batches are moved to this rank's device.
        auto_transfer: Whether, with a GPU, the next batch is copied while the last one is computed with.

    Returns:
        The loader, or another one over the same data.

    Raises:
        ValueError: The loader has a `batch_sampler` of its own, which a sampler cannot replace.
    """
    context = get_context()
    is_split = isinstance(data_loader.sampler, DistributedSampler) or isinstance(data_loader.dataset, IterableDataset)
    if add_dist_sampler and context.world_size > 1 and not is_split:
        data_loader = _split(data_loader, context.world_rank, context.world_size)
    device = get_device()
    if move_to_device and device.type != "cpu":
        return _OnDevice(data_loader, device, auto_transfer)
    return data_loader


def enable_reproducibility(seed: int = 0) -> None:
    """Makes runs repeatable, as far as PyTorch can.

    Args:
        seed: The seed for PyTorch, Python and NumPy.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when it begins


def _split(loader: DataLoader[Any], rank: int, ranks: int) -> DataLoader[Any]:
    if loader.batch_size is None and loader.batch_sampler is not None:
        raise ValueError(
            "the loader has a batch_sampler of its own: have that one choose this rank's rows, "
            "and call prepare_data_loader(…, add_dist_sampler=False)"
        )
    usual = isinstance(loader.sampler, (RandomSampler, SequentialSampler))
    if not usual and rank == 0:
        warnings.warn(
            f"a DistributedSampler takes the place of the loader's {type(loader.sampler).__name__}; "
            "prepare_data_loader(…, add_dist_sampler=False) keeps it",
            stacklevel=3,
        )
    shuffle = not isinstance(loader.sampler, SequentialSampler)
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, num_replicas=ranks, rank=rank, shuffle=shuffle)
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


# What follows the last batch: a batch may be anything, also None.
_END = object()


class _OnDevice(DataLoader[Any]):
    """A loader whose batches are on a GPU."""

    _loader: DataLoader[Any]
    _device: torch.device
    _ahead: bool

    def __init__(self, loader: DataLoader[Any], device: torch.device, ahead: bool) -> None:
        # It is the other one, but for the iterator.
        self.__dict__.update(loader.__dict__)
        self.__dict__["_loader"], self.__dict__["_device"], self.__dict__["_ahead"] = loader, device, ahead

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = iter(self._loader)
        if not self._ahead:
            return (moved(batch, self._device) for batch in batches)
        return self._copied_ahead(batches)

    def _copied_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

        def copy() -> Any:
            batch = next(batches, _END)
            if _hides_tensors(batch):  # their memory is given to a later copy as soon as the loop lets go of the batch
                stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                return moved(batch, self._device)

        following = copy()
        while following is not _END:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(stream)
            batch = following
            _in_use(batch, current)
            following = copy()
            yield batch


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device: tensors, and what lists, tuples and dicts hold of them."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def _hides_tensors(batch: Any) -> bool:
    """Whether a batch has something that moves itself, whose tensors `_in_use` does not know."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return any(map(_hides_tensors, batch))
    return hasattr(batch, "to") and not isinstance(batch, torch.Tensor)


def _in_use(batch: Any, stream: torch.cuda.Stream) -> None:
    """Keeps the memory of a batch until a stream has used it."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for value in batch:
            _in_use(value, stream)
    elif isinstance(batch, torch.Tensor):
        batch.record_stream(stream)
