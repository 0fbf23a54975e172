"""Parameters of all pipeline stages; in a run, each rank gets them from the others at the start."""

from __future__ import annotations

import torch
from torch import nn

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.lightning.build.placement import Placement
from lightning_megatron.lightning.modules.transformer import TransformerModule
from lightning_megatron.mesh import ParallelMesh, dense_grid, rank_groups
from lightning_megatron.params import named_specs
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.pipeline.tied_embeddings import StageParameters
from lightning_megatron.stage import StageBoundary
from lightning_megatron.tools.rehearsal.errors import RehearsalError


def survey_stages(
    module: object, layout: ParallelLayout, split: LayerSplit, recompute: RecomputePlan
) -> list[StageParameters]:
    """Parameters of each pipeline rank of a resolved layout, from models without memory; empty without a pipeline.

    Raises:
        RehearsalError: for a pipeline whose module builds its stages itself.
    """
    if layout.pp == 1:
        return []
    usual = TransformerModule.configure_model
    if not isinstance(module, TransformerModule) or type(module).configure_model is not usual:
        raise RehearsalError(
            f"{type(module).__name__} builds its pipeline stages itself: a rehearsal knows the parameters of other"
            " stages only for this package's modules and for subclasses that do not override configure_model"
        )
    config, found = module.config, []
    stages = split.stages(config.num_layers, layout.pp, layout.vpp, config.loss_cost)
    for rank in rank_groups(dense_grid(layout), ["pp"])[0]:
        mesh = ParallelMesh(layout, rank)
        parts = [stage for stage in stages if stage.rank == mesh.pp.rank]
        with torch.device("meta"):
            boundary = StageBoundary(layout.pp * layout.vpp)
            model = module.build_model(Placement(mesh, boundary, tuple(parts), recompute))
        found.append(StageParameters.of(named_specs(nn.ModuleDict({"model": model}))))
    return found
