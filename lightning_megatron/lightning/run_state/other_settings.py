"""Resuming from a checkpoint whose settings of optimizers and schedulers differ from those of the code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_megatron.errors import CheckpointError
from lightning_megatron.optim.lr_schedule import MegatronLR
from lightning_megatron.optim.zero import ShardedOptimizer

Groups = Sequence[Mapping[str, Any]]


def tell_other_settings(
    path: str,
    before: Sequence[Groups],
    optimizers: Sequence[ShardedOptimizer],
    schedulers: Sequence[LRSchedulerConfig],
    saved: Sequence[Mapping[str, Any]],
) -> None:
    """Warn of settings that a checkpoint has changed: the checkpoint's settings win, as in PyTorch.

    Args:
        path: path of the checkpoint.
        before: settings of each optimizer's groups before it was loaded.
        optimizers: the optimizers, with the checkpoint's settings.
        schedulers: schedulers of this run, whose states Lightning loads next.
        saved: states of the checkpoint's schedulers.

    Raises:
        CheckpointError: if the schedulers of only one side can be continued.
    """
    if len(schedulers) != len(saved):
        kinds = ", ".join(type(config.scheduler).__name__ for config in schedulers) or "none"
        raise CheckpointError(
            f"{path}: it has {len(saved)} learning-rate schedulers, and this run {len(schedulers)} ({kinds}), so that"
            " none can be restored. Use those of the checkpoint (lr_schedule), or begin a run with its weights"
        )
    found: list[str] = []
    for optimizer, groups in zip(optimizers, before, strict=True):
        own = [config.scheduler for config in schedulers if config.scheduler.optimizer is optimizer.optimizer]
        for today, held in zip(groups, optimizer.group_settings(), strict=False):
            found += _differences(_unmoved(today, held, own), held)
    for config, state in zip(schedulers, saved, strict=True):
        kind = type(config.scheduler)
        names = inspect.signature(kind).parameters.keys() - {"last_epoch"}
        settings = {name: value for name, value in config.scheduler.state_dict().items() if name in names}
        if (lacking := sorted(settings.keys() - state.keys())) and kind is not MegatronLR:
            raise CheckpointError(
                f"{path}: its schedulers have no {', '.join(lacking)}, so that no {kind.__name__} can be restored"
            )
        found += _differences(settings, state)
    if found:
        rank_zero_warn(
            f"{path}: its settings replace those of this run: {'; '.join(dict.fromkeys(found))}. For your own,"
            " begin a run with its weights (load_from_checkpoint, and no ckpt_path)"
        )


def _unmoved(today: Mapping[str, Any], held: Mapping[str, Any], schedulers: Sequence[object]) -> dict[str, Any]:
    """Settings of a group without those that its schedulers change from step to step."""
    moved = {"lr"} if schedulers else set()
    moved |= {"weight_decay"} if any(isinstance(s, MegatronLR) and s.moves_weight_decay for s in schedulers) else set()
    moved |= {"betas", "momentum"} if "max_momentum" in held else set()
    return {name: value for name, value in today.items() if name not in moved}


def _differences(today: Mapping[str, Any], held: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in today.items():
        other = held.get(name, value)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _differences(value, other, f"{name}.")
        elif _plain(value) != _plain(other):
            yield f"{prefix}{name} {other} (this run: {value})"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
