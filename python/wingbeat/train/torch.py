"""`ray.train.torch` for Wingbeat: the trainer, and what makes models and data loaders ready for many ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wingbeat import _lazy

if TYPE_CHECKING:
    from wingbeat.train._config import TorchConfig as TorchConfig
    from wingbeat.train._device import get_device as get_device
    from wingbeat.train._device import get_devices as get_devices
    from wingbeat.train._prepare import enable_reproducibility as enable_reproducibility
    from wingbeat.train._prepare import prepare_data_loader as prepare_data_loader
    from wingbeat.train._prepare import prepare_model as prepare_model
    from wingbeat.train._trainer import TorchTrainer as TorchTrainer

__all__ = [
    "TorchConfig",
    "TorchTrainer",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "prepare_data_loader",
    "prepare_model",
]

_HOMES = {
    "TorchConfig": "wingbeat.train._config",
    "TorchTrainer": "wingbeat.train._trainer",
    "enable_reproducibility": "wingbeat.train._prepare",
    "get_device": "wingbeat.train._device",
    "get_devices": "wingbeat.train._device",
    "prepare_data_loader": "wingbeat.train._prepare",
    "prepare_model": "wingbeat.train._prepare",
}
_ABSENT = dict.fromkeys(("accelerate", "backward", "prepare_optimizer"), "use torch.amp itself") | {
    "TorchXLAConfig": "ranks run on CPUs and GPUs"
}

if not TYPE_CHECKING:
    __getattr__ = _lazy.names_of(__name__, _HOMES, _ABSENT)
