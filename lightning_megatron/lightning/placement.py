"""Placement of a module's layers on ranks, and its change for another Trainer.

A script may have one Trainer to fit and another to test. A strategy with the same layout as the previous one reuses its
mesh, so the module's layers stay valid. For another layout this package's modules build their model anew and carry the
weights over; other modules with parallel layers are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.checkpoint import local_tensors, model_state
from lightning_megatron.checkpoint.reshard import reshard
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.params import ShardRanks, spec_registry
from lightning_megatron.recompute import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.stage import StageBoundary, StageLayers

_PATIENCE = timedelta(minutes=1)
_SHOWN = 4


@dataclass(frozen=True)
class Placement:
    """Arguments of a model besides its configuration.

    Attributes:
        mesh: mesh of the ranks.
        boundary: boundary of the pipeline's stages; ``None`` for a model in one piece.
        parts: stages on this rank; ``None`` for a model in one piece.
        recompute: plan of activation recomputation.
        ops: implementations of the ops.
        compile_backend: backend of ``torch.compile`` for the blocks; ``None`` for no compilation.
    """

    mesh: ParallelMesh
    boundary: StageBoundary | None = None
    parts: tuple[StageLayers, ...] | None = None
    recompute: RecomputePlan = NO_RECOMPUTE
    ops: Ops = ANY_DEVICE
    compile_backend: str | None = None

    @property
    def is_whole(self) -> bool:
        """True if each rank holds the whole model."""
        layout = self.mesh.layout
        return layout.tp == layout.pp == layout.cp == layout.ep == layout.expert_tensor_parallel_size == 1

    def suits(self, layout: ParallelLayout, device: torch.device) -> bool:
        """True if a strategy of this layout can reuse the mesh."""
        return self.mesh.layout == layout and self.mesh.rng.device == device and self.mesh.is_alive

    def serves(self, wanted: Placement) -> bool:
        """True if a model with this placement need not be built anew for ``wanted``."""
        ours, theirs = self.ops, wanted.ops
        # Ops of no device in particular go by the device of their tensors, so they do on any.
        same_ops = (ours.modes or None, ours.fp8) == (theirs.modes or None, theirs.fp8)
        return same_ops and ours.device in (None, theirs.device) and replace(self, ops=theirs) == wanted


def placement_of(module: nn.Module | None) -> Placement | None:
    """Placement of a module's parallel layers by an earlier Trainer; ``None`` without one."""
    if module is None:
        return None
    found = (vars(part).get("_megatron_placement") for part in module.modules())
    return next((placement for placement in found if isinstance(placement, Placement)), None)


def settle(module: nn.Module, now: Placement, before: Placement | None) -> None:
    """Store the placement of a module's parallel layers, once its model is built.

    Args:
        module: module of the user.
        now: placement by this Trainer.
        before: placement of its layers at the start of this Trainer.

    Raises:
        ConfigError: naming layers that an earlier Trainer built for other ranks.
    """
    axes = list(_axes(module))
    if before is not None and before.mesh is not now.mesh:
        raise_if_any(_misplaced(module, before.mesh, now.mesh, axes))
    noted = placement_of(module)
    if axes and (noted is None or noted.mesh is not now.mesh):
        module._megatron_placement = now  # type: ignore[assignment] # on a module of any class


def _axes(module: nn.Module) -> Iterator[tuple[str, Axis]]:
    for name, part in module.named_modules():
        yield from ((name, value) for value in vars(part).values() if isinstance(value, Axis))


def _misplaced(
    module: nn.Module, before: ParallelMesh, now: ParallelMesh, axes: list[tuple[str, Axis]]
) -> list[Problem]:
    def is_stale(axis: Axis) -> bool:
        today = getattr(now, axis.name, axis)
        return axis is getattr(before, axis.name, None) and max(axis.size, today.size) > 1

    others = [name for name, axis in axes if is_stale(axis)]
    if not others:
        return []
    names = list(dict.fromkeys(name or "itself" for name in others))
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    reason = (
        f"its parallel layers ({shown}) were built for an earlier Trainer ({_told(before.layout)}), and this one has"
        f" {_told(now.layout)}: make the module anew and give this Trainer a checkpoint with ckpt_path, or give both"
        " Trainers the same layout and devices"
    )
    return [Problem("model", type(module).__name__, reason)]


def _told(layout: ParallelLayout) -> str:
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "dp": layout.data_parallel_size}
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one rank"


def carry_over(module: nn.Module, model: nn.Module, before: Placement, built: nn.Module, now: Placement) -> None:
    """Copy the weights of a model to its replacement in another placement; all ranks call this.

    Besides parameters and buffers it copies ``requires_grad`` and the training mode. Parameters of the module outside
    its model exist on every pipeline stage; only the last stage, which has the loss, trains them, and the others take
    its values.

    Args:
        module: module of the user.
        model: old model.
        before: placement of the old model.
        built: new model, of the same configuration.
        now: placement of the new model.

    Raises:
        ConfigError: if weights are on ranks that do not take part.
        CheckpointError: on every rank, if the model had been changed since it was built.
    """
    over = now.mesh
    if not over.is_distributed and not before.is_whole:
        _assemble(before.mesh)
        over = before.mesh
    # A model that no Trainer has placed differs between ranks; as elsewhere in torch, that of rank 0 counts.
    speaks = before.mesh.is_distributed or over.rank == 0
    source = model_state(local_tensors(model), spec_registry(model), before.mesh) if speaks else {}
    reshard(source, model_state(local_tensors(built), spec_registry(built), now.mesh), over)
    if before.mesh.pp.size > 1:
        beside, learns = _beside(module, built), before.mesh.pp.rank == before.mesh.pp.size - 1
        reshard(model_state(beside, {}, before.mesh) if learns else {}, model_state(beside, {}, now.mesh), over)
    frozen = {name for names in all_gather_object(over, _frozen(model) if speaks else []) for name in names}
    for name, param in built.named_parameters():
        param.requires_grad_(name not in frozen)
    built.train(model.training)


def _beside(module: nn.Module, model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers outside the model, which every rank holds whole."""
    inside, specs = {id(value) for value in local_tensors(model).values()}, spec_registry(module)
    cut = {name for name, spec in specs.items() if spec.sharded_dims(ShardRanks())}
    return {name: value for name, value in local_tensors(module).items() if id(value) not in inside and name not in cut}


def _frozen(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if not param.requires_grad]


def _assemble(mesh: ParallelMesh) -> None:
    """Wait a limited time for all ranks: a Trainer without this strategy may exist on some of them only."""
    reason = f"its weights are spread over ranks ({_told(mesh.layout)})"
    advice = "save a checkpoint and load it in one process with load_from_checkpoint"
    if not mesh.is_alive:
        raise ConfigError([Problem("model", "the weights", f"{reason} of a job that has ended: {advice}")])
    try:
        dist.monitored_barrier(mesh.host_group, timeout=_PATIENCE)
    except RuntimeError as error:
        reason += f", and all of them must run this Trainer to put them together; {error}. Or {advice}"
        raise ConfigError([Problem("model", "the weights", reason)]) from error
