"""Expert capacity: number of rows that each expert takes from one rank, whatever the routing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil

from lightning_megatron.config.moe import MoEConfig


def expert_capacity(tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Tokens of one rank that an expert takes: ``ceil(T k / E x factor)``, Megatron-LM's rule."""
    return ceil(tokens * topk / num_experts * factor)


def lowest_capacity(tokens: int, topk: int, num_experts: int) -> int:
    """Rows of every expert if the load is even: no forward needs less."""
    return ceil(topk * tokens / num_experts)


def first_edges(low: int, high: int, count: int, base: float, alignment: int) -> list[int]:
    """Capacities above ``low`` and up to ``high``; each bin is ``base`` times as wide as the one before.

    Returns:
        Multiples of ``alignment``, ascending; fewer than ``count`` where several fall on one multiple.
    """
    widths = [base**i for i in range(count)]
    shares = [share / sum(widths) for share in accumulate(widths)]
    # A sum of shares can miss 1 by a rounding error, which must not cost another multiple.
    return sorted({ceil(round((low + (high - low) * share) / alignment, 9)) * alignment for share in shares})


def edges_of(config: MoEConfig, tokens: int) -> list[int]:
    """Capacities of the bins before they are adjusted to their use, for the tokens of one rank."""
    low = lowest_capacity(tokens, config.moe_router_topk, config.num_experts)
    base, alignment = config.moe_capacity_bins_base, config.moe_capacity_bins_alignment
    return first_edges(low, tokens, config.moe_capacity_bins, base, alignment)


def smallest_that_holds(edges: Sequence[int], rows: int) -> int:
    """The first capacity of at least ``rows``; ``rows`` itself if there is none."""
    return next((edge for edge in edges if edge >= rows), rows)


def padded_rows(config: MoEConfig, tokens: int, imbalance: float = 1.0) -> int | None:
    """Rows to which every expert is padded for the tokens of one rank; ``None`` without padding.

    Args:
        tokens: tokens of one rank.
        imbalance: tokens of the fullest expert over the mean.
    """
    if config.moe_capacity_bins:
        most = lowest_capacity(tokens, config.moe_router_topk, config.num_experts)
        return smallest_that_holds(edges_of(config, tokens), min(tokens, ceil(most * imbalance)))
    if config.moe_pad_to_capacity:
        return expert_capacity(tokens, config.moe_router_topk, config.num_experts, config.moe_capacity_factor)
    return None
