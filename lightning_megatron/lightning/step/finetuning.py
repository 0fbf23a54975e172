"""Optimizer groups added by finetuning callbacks, restored when a run resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_megatron.optim.zero import ShardedOptimizer


def rejoin_groups(
    checkpoint: Mapping[str, Any], module: LightningModule, optimizers: Sequence[ShardedOptimizer]
) -> None:
    """Add the groups that ``BaseFinetuning`` had added when a checkpoint was saved, and unfreeze their parameters.

    Lightning puts the groups into the optimizers only after their state is loaded here; and it leaves the parameters
    frozen, so that a resumed run would not train them.

    Args:
        checkpoint: the saved values that are no tensors.
        module: the user's module.
        optimizers: the distributed optimizers.
    """
    callbacks = [c for c in module.trainer.callbacks if isinstance(c, BaseFinetuning)]  # type: ignore[attr-defined]
    params = dict(module.named_parameters())
    for callback in callbacks:
        saved = checkpoint.get("callbacks", {}).get(callback.state_key, {})
        for index, groups in saved.get("internal_optimizer_metadata", {}).items():
            optimizer = optimizers[index].optimizer
            for group in groups[len(optimizer.param_groups) :]:
                joining = [params[name].requires_grad_() for name in group["params"] if name in params]
                optimizer.add_param_group({**group, "params": joining})
            optimizers[index].add_new_params()
