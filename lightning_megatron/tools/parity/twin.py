"""A small job with the layout of a large one, for a comparison on a laptop.

Every axis except data parallelism keeps its size; ``TransformerConfig.small`` is the model.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_megatron.config.layout import ParallelLayout

MOST_REPLICAS = 2


def twin_layout(layout: ParallelLayout) -> ParallelLayout:
    """The layout with at most two replicas, or with as many as the experts are distributed over."""
    dp = layout.data_parallel_size
    experts = layout.ep * (layout.etp or layout.tp) // (layout.tp * layout.cp) or 1
    return replace(layout, dp=min(dp, max(MOST_REPLICAS, experts)))


def twin_seq_length(layout: ParallelLayout) -> int:
    """Tokens of a sample, a multiple of tp x cp."""
    return max(64, 4 * layout.tp * layout.cp)


def twin_micro_batches(layout: ParallelLayout) -> int:
    """Number of micro-batches of a replica that every schedule accepts."""
    return 2 * max(1, layout.pp)
