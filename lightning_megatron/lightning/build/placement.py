"""Placement of a module's layers on ranks, and its change for another Trainer.

A script may have one Trainer to fit and another to test. A strategy with the same layout as the previous one reuses its
mesh, so the module's layers stay valid. For another layout this package's modules rebuild their model and copy the
weights; other modules with parallel layers are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightning_megatron.comm.objects import all_gather_object, barrier_with_limit
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.params import ParamSpec, ShardRanks, spec_registry
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

    def can_reuse_mesh(self, layout: ParallelLayout, device: torch.device) -> bool:
        """True if a strategy of this layout can reuse the mesh."""
        return self.mesh.layout == layout and self.mesh.rng.device == device and self.mesh.is_alive

    def is_valid_for(self, wanted: Placement) -> bool:
        """True if a model built for this placement can be reused for ``wanted``."""
        ours, theirs = self.ops, wanted.ops
        # Ops without a device of their own follow their tensors, so they are valid on any device.
        same_ops = (ours.modes or None, ours.fp8) == (theirs.modes or None, theirs.fp8)
        return same_ops and ours.device in (None, theirs.device) and replace(self, ops=theirs) == wanted


def placement_of(module: nn.Module | None) -> Placement | None:
    """Placement of a module's parallel layers by an earlier Trainer; ``None`` without one."""
    if module is None:
        return None
    found = (vars(part).get("_megatron_placement") for part in module.modules())
    return next((placement for placement in found if isinstance(placement, Placement)), None)


def store_placement(module: nn.Module, placement: Placement, previous: Placement | None) -> None:
    """Store the placement of a module's parallel layers, once its model is built.

    Raises:
        ConfigError: naming layers that an earlier Trainer built for other ranks.
    """
    axes = list(_axes(module))
    if previous is not None and previous.mesh is not placement.mesh:
        raise_if_any(_misplaced(module, previous.mesh, placement.mesh, axes))
    stored = placement_of(module)
    if axes and (stored is None or stored.mesh is not placement.mesh):
        module._megatron_placement = placement  # type: ignore[assignment] # on a module of any class


def _axes(module: nn.Module) -> Iterator[tuple[str, Axis]]:
    for name, part in module.named_modules():
        yield from ((name, value) for value in vars(part).values() if isinstance(value, Axis))


def _misplaced(
    module: nn.Module, previous: ParallelMesh, mesh: ParallelMesh, axes: list[tuple[str, Axis]]
) -> list[Problem]:
    def is_stale(axis: Axis) -> bool:
        present = getattr(mesh, axis.name, axis)
        return axis is getattr(previous, axis.name, None) and max(axis.size, present.size) > 1

    stale = [name for name, axis in axes if is_stale(axis)]
    if not stale:
        return []
    names = list(dict.fromkeys(name or "itself" for name in stale))
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    earlier, own = _layout_text(previous.layout), _layout_text(mesh.layout)
    reason = (
        f"its parallel layers ({shown}) were built for an earlier Trainer ({earlier}), and this one has {own}: make a"
        " new module and give this Trainer a checkpoint with ckpt_path, or give both Trainers the same layout and"
        " devices"
    )
    return [Problem("model", type(module).__name__, reason)]


def _layout_text(layout: ParallelLayout) -> str:
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "dp": layout.data_parallel_size}
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one rank"


def carry_over(
    module: nn.Module, model: nn.Module, previous: Placement, built: nn.Module, placement: Placement
) -> None:
    """Copy the weights of a model to ``built``, of the same configuration, in another placement; all ranks call this.

    Besides parameters and buffers it copies ``requires_grad`` and the training mode. Parameters of the module outside
    its model exist on every pipeline stage; only the last stage, which has the loss, trains them, so the others copy
    its values.

    Raises:
        ConfigError: if weights are on ranks that do not take part.
        CheckpointError: on every rank, if the model had been changed since it was built.
    """
    from lightning_megatron.checkpoint import local_tensors, model_state  # few runs need them
    from lightning_megatron.checkpoint.reshard import reshard

    mesh = placement.mesh
    if not mesh.is_distributed and not previous.mesh.layout.is_whole:
        _wait_for_all_ranks(previous.mesh)
        mesh = previous.mesh
    # A model that no Trainer has placed may differ between ranks; as elsewhere in torch, that of rank 0 is used.
    contributes = previous.mesh.is_distributed or mesh.rank == 0
    source = model_state(local_tensors(model), spec_registry(model), previous.mesh) if contributes else {}
    reshard(source, model_state(local_tensors(built), spec_registry(built), placement.mesh), mesh)
    if previous.mesh.pp.size > 1:
        tensors = _outside_model(local_tensors(module), local_tensors(built), spec_registry(module))
        is_last_stage = previous.mesh.pp.rank == previous.mesh.pp.size - 1
        source = model_state(tensors, {}, previous.mesh) if is_last_stage else {}
        reshard(source, model_state(tensors, {}, placement.mesh), mesh)
    own = (_frozen(model), _modes(model)) if contributes else ([], {})
    gathered = all_gather_object(mesh, own)
    frozen = {name for names, _ in gathered for name in names}
    for name, param in built.named_parameters():
        param.requires_grad_(name not in frozen)
    modes = {name: mode for _, each in gathered for name, mode in each.items()}
    for name, part in built.named_modules():
        part.training = modes.get(name, model.training)


def _outside_model(
    tensors: Mapping[str, Any], of_model: Mapping[str, Any], specs: Mapping[str, ParamSpec]
) -> dict[str, Any]:
    """Parameters and buffers outside the model, which every rank holds whole."""
    inside = {id(value) for value in of_model.values()}
    cut = {name for name, spec in specs.items() if spec.sharded_dims(ShardRanks())}
    return {name: value for name, value in tensors.items() if id(value) not in inside and name not in cut}


def _frozen(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if not param.requires_grad]


def _modes(model: nn.Module) -> dict[str, bool]:
    return {name: part.training for name, part in model.named_modules()}


def _wait_for_all_ranks(mesh: ParallelMesh) -> None:
    """Wait for all ranks, but not forever: a Trainer without this strategy may exist on some of them only."""
    reason = f"its weights are spread over ranks ({_layout_text(mesh.layout)})"
    advice = "save a checkpoint and load it in one process with load_from_checkpoint"
    if not mesh.is_alive:
        raise ConfigError([Problem("model", "the weights", f"{reason} of a job that has ended: {advice}")])
    try:
        barrier_with_limit(mesh, _PATIENCE)
    except RuntimeError as error:
        reason += f", and all of them must run this Trainer to put them together; {error}. Or {advice}"
        raise ConfigError([Problem("model", "the weights", reason)]) from error
