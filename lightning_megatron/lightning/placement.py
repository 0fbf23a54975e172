"""The ranks that a module's layers are cut over, and their move to the ranks of another Trainer.

A script may have one Trainer to fit and another to test. A strategy whose layout is that of the one before stands on
the same mesh, so that whatever was built there goes on. For another layout our modules build their model anew and carry
the weights over; other modules with parallel layers are refused.
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
    """All that a model is built from beside its configuration.

    Attributes:
        mesh: the ranks.
        boundary: of the pipeline; ``None`` for a model in one piece.
        parts: the stages on this rank; ``None`` for a model in one piece.
        recompute: what is computed again.
        ops: what its arithmetic is chosen from.
        compile_backend: what its blocks are compiled with; ``None`` for no compilation.
    """

    mesh: ParallelMesh
    boundary: StageBoundary | None = None
    parts: tuple[StageLayers, ...] | None = None
    recompute: RecomputePlan = NO_RECOMPUTE
    ops: Ops = ANY_DEVICE
    compile_backend: str | None = None

    @property
    def is_whole(self) -> bool:
        """True if each rank holds the whole model, and runs it by itself."""
        layout = self.mesh.layout
        return layout.tp == layout.pp == layout.cp == layout.ep == layout.expert_tensor_parallel_size == 1

    def suits(self, layout: ParallelLayout, device: torch.device) -> bool:
        """True if a strategy of this layout can stand on the same mesh."""
        return self.mesh.layout == layout and self.mesh.rng.device == device and self.mesh.is_alive

    def serves(self, wanted: Placement) -> bool:
        """True if a model that stands here need not be built anew to stand there."""
        ours, theirs = self.ops, wanted.ops
        # Ops of no device in particular go by the device of their tensors, so they do on any.
        same_ops = (ours.modes or None, ours.fp8) == (theirs.modes or None, theirs.fp8)
        return same_ops and ours.device in (None, theirs.device) and replace(self, ops=theirs) == wanted


def placement_of(module: nn.Module | None) -> Placement | None:
    """The ranks that the parallel layers of a module were cut over, by the Trainer before if there was one."""
    if module is None:
        return None
    found = (vars(part).get("_megatron_placement") for part in module.modules())
    return next((placement for placement in found if isinstance(placement, Placement)), None)


def settle(module: nn.Module, now: Placement, before: Placement | None) -> None:
    """Note where the parallel layers of a module stand, once its model is built.

    Args:
        module: the user's.
        now: where this Trainer's ranks stand.
        before: where its layers stood when this Trainer began.

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
    """Give a model the weights of the one in whose place it was built; all ranks call this.

    Beside parameters and buffers it takes over which parameters are frozen, and whether it is in training. What the
    module holds beside its model, every pipeline stage has; it learns on the last one, where the loss is, and the
    others take its values.

    Args:
        module: the user's.
        model: as it was.
        before: where it stood.
        built: the new one, of the same configuration.
        now: where that stands.

    Raises:
        ConfigError: if weights are spread over ranks that do not come to give them.
        CheckpointError: on every rank, if the model had been changed since it was built.
    """
    over = now.mesh
    if not over.is_distributed and not before.is_whole:
        _assemble(before.mesh)
        over = before.mesh
    # Of a model that no Trainer has placed each rank has its own; as everywhere in torch that of rank 0 counts.
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
    """Parameters and buffers that are no part of the model, and that every rank holds whole."""
    inside, specs = {id(value) for value in local_tensors(model).values()}, spec_registry(module)
    cut = {name for name, spec in specs.items() if spec.cuts(ShardRanks())}
    return {name: value for name, value in local_tensors(module).items() if id(value) not in inside and name not in cut}


def _frozen(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if not param.requires_grad]


def _assemble(mesh: ParallelMesh) -> None:
    """Wait for all ranks, but not for long: a Trainer without this strategy may have been made on some of them only."""
    reason = f"its weights are spread over ranks ({_told(mesh.layout)})"
    advice = "save a checkpoint and load it in one process with load_from_checkpoint"
    if not mesh.is_alive:
        raise ConfigError([Problem("model", "the weights", f"{reason} of a job that has ended: {advice}")])
    try:
        dist.monitored_barrier(mesh.host_group, timeout=_PATIENCE)
    except RuntimeError as error:
        reason += f", and all of them must run this Trainer to put them together; {error}. Or {advice}"
        raise ConfigError([Problem("model", "the weights", reason)]) from error
