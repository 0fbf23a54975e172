"""Settings of the strategy that a module leaves unused: results are right, but devices repeat each other's work."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.params import named_specs


def warn_of_idle(module: LightningModule, layout: ParallelLayout, plan: RecomputePlan) -> None:
    """Warn of kinds of parallelism, or a plan of recomputation, that no part of a module with its model built uses."""
    name, specs = type(module).__name__, [spec for _, _, spec in named_specs(module)]
    if layout.tp > 1 and specs and all(spec.tp_dim is None for spec in specs):
        rank_zero_warn(
            f"tp={layout.tp}: no parameter of {name} is split over tensor-parallel ranks, so that each of them does all"
            f" of the work: build it of parallel layers such as ColumnParallelLinear, or use tp=1 for {layout.tp} times"
            " as many replicas"
        )
    if layout.ep > 1 and specs and not any(spec.is_expert for spec in specs):
        rank_zero_warn(f"ep={layout.ep}: {name} has no experts to share over ranks: use ep=1")
    if plan.granularity is not None and not _holds_a_plan(module):
        rank_zero_warn(
            f"recompute={plan.granularity!r}: nothing in {name} recomputes its forward: pass strategy.recompute to"
            " its layers, as GPTModule does, or use torch.utils.checkpoint in its forward"
        )


def _holds_a_plan(module: LightningModule) -> bool:
    return any(isinstance(getattr(part, "recompute", None), RecomputePlan) for part in module.modules())
