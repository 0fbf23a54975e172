"""Arguments of a run, as Megatron-LM's log begins: of strategy, module, optimizers, data and Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

_OF_TRAINER = (
    *("max_steps", "max_epochs", "num_nodes", "num_devices", "precision", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "val_check_interval", "check_val_every_n_epoch"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "num_sanity_val_steps", "log_every_n_steps"),
    *("overfit_batches", "fast_dev_run", "reload_dataloaders_every_n_epochs", "default_root_dir"),
)
_PLAIN = (str, int, float, bool, type(None), torch.dtype)


def run_arguments(trainer: Trainer, module: LightningModule, settings: Mapping[str, Any]) -> dict[str, object]:
    """Names and values. A name that two parts have is written as ``part.name``, and so is every name of an optimizer.

    Args:
        settings: arguments of the strategy.
    """
    found: dict[str, object] = {**settings, "accelerator": type(trainer.accelerator).__name__}
    parts: dict[str, dict[str, object]] = {
        "model": dict(_flat(module.hparams)),
        "trainer": {name: getattr(trainer, name) for name in _OF_TRAINER},
    }
    if (data := getattr(trainer, "datamodule", None)) is not None:
        own = {name: value for name, value in vars(data).items() if not name.startswith("_")}
        parts["data"] = {"data_module": type(data).__name__, **dict(_flat(own))}
    for part, arguments in parts.items():
        found |= {f"{part}.{name}" if name in found else name: value for name, value in arguments.items()}
    for number, optimizer in enumerate(trainer.optimizers):
        name = "optimizer" if len(trainer.optimizers) == 1 else f"optimizer_{number}"
        found[name] = type(optimizer).__name__
        group = dict(_flat({key: value for key, value in optimizer.param_groups[0].items() if key != "params"}))
        found |= {f"{name}.{key}": value for key, value in group.items() if value is not None}
    return found


def _flat(arguments: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Entries with plain values, those of nested mappings and dataclasses too."""
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        elif is_dataclass(value) and not isinstance(value, type):
            yield from _flat(asdict(value))
        elif isinstance(value, _PLAIN) or (
            isinstance(value, list | tuple) and all(isinstance(v, _PLAIN) for v in value)
        ):
            yield str(name), value
