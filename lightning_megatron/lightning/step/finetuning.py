"""Groups that a callback added to an optimizer in mid-run, when the run goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_megatron.optim.zero import ShardedOptimizer


def rejoin_groups(
    checkpoint: Mapping[str, Any], module: LightningModule, optimizers: Sequence[ShardedOptimizer]
) -> None:
    """Add the groups that ``BaseFinetuning`` had added when a checkpoint was saved, and train what is in them.

    Lightning does it before ``fit`` begins, when this strategy has not loaded the callback's state yet; and it leaves
    the parameters frozen, so that a run that goes on does not train them any more.

    Args:
        checkpoint: what was saved beside tensors.
        module: the user's.
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
            optimizers[index].take_in_newcomers()
