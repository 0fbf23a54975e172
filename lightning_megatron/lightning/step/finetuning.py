"""Parameters that finetuning callbacks and hooks unfreeze, restored when a run resumes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_megatron.checkpoint import CheckpointError, OpenCheckpoint, State
from lightning_megatron.checkpoint.tensors.keys import groups_key
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs


def take_own_groups(opened: OpenCheckpoint, module: LightningModule) -> None:
    """Limit the saved groups of ``BaseFinetuning`` to parameters of this pipeline stage; all ranks call this.

    The saved state names parameters of the first stage, and the callback looks up every name when a fit begins.

    Raises:
        CheckpointError: for a single file, whose groups have no names.
    """
    own = {name for name, _ in module.named_parameters()}
    for callback in _callbacks(module) if opened.mesh.pp.size > 1 else ():
        saved = opened.meta.get("callbacks", {}).get(callback.state_key, {}).get("internal_optimizer_metadata", {})
        groups: State = {groups_key(index): None for index in saved}
        opened.fill(groups, strict=False)
        for index in saved:
            if (named := groups[groups_key(index)]) is None:
                name = type(callback).__name__
                raise CheckpointError(f"{opened}: {name} resumes in a pipeline from a directory only, not from a file")
            here = ({**group, "params": [name for name in group["params"] if name in own]} for group in named)
            saved[index] = [group for group in here if group["params"]]


def rejoin_groups(
    checkpoint: Mapping[str, Any], module: LightningModule, optimizers: Sequence[ShardedOptimizer]
) -> None:
    """Add the groups that ``BaseFinetuning`` had added when a checkpoint was saved, and unfreeze their parameters.

    Lightning puts the groups into the optimizers only after their state is loaded here; and it leaves the parameters
    frozen, so that a resumed run would not train them.
    """
    for callback in _callbacks(module):
        saved = checkpoint.get("callbacks", {}).get(callback.state_key, {})
        for index, groups in saved.get("internal_optimizer_metadata", {}).items():
            rejoin(groups, module, optimizers[index])


def rejoin(groups: Sequence[Mapping[str, Any]] | None, module: LightningModule, target: ShardedOptimizer) -> None:
    """Add this rank's parameters of saved groups that no group holds yet; no action without a callback."""
    present = {name for names in target.group_names() for name in names}
    params = {name: param for name, param, _ in named_specs(module) if name not in present}
    for group in groups or () if _callbacks(module) else ():
        joining = [params[name].requires_grad_() for name in group["params"] if name in params]
        if joining:
            target.optimizer.add_param_group({**group, "params": joining})
    target.add_new_params()


def rejoin_frozen(trained: Callable[[], Collection[str]], module: LightningModule, target: ShardedOptimizer) -> None:
    """Take in this rank's frozen parameters whose state a checkpoint has: a hook may unfreeze them later in the run.

    Args:
        trained: function that finds the global names of parameters with state.
        module: the module.
        target: their optimizer.
    """
    unassigned = (p for group in target.optimizer.param_groups for p in group["params"] if not target.holds(p))
    frozen = {id(p) for p in unassigned if not p.requires_grad}
    names = trained() if frozen else ()
    joining = [p for name, p, spec in named_specs(module) if id(p) in frozen and (spec.tied_with or name) in names]
    for param in joining:
        param.requires_grad_()
    target.add_new_params()
    for param in joining:
        param.requires_grad_(False)


def _callbacks(module: LightningModule) -> list[BaseFinetuning]:
    return [c for c in module.trainer.callbacks if isinstance(c, BaseFinetuning)]  # type: ignore[attr-defined]
