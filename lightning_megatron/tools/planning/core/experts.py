"""Number of rows that the experts of a rank compute; memory and time depend on it."""

from __future__ import annotations

from math import ceil

from lightning_megatron.config.capacity import expert_capacity, padded_rows
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig


def gathers_tokens(config: TransformerConfig) -> bool:
    """True if every rank gets all tokens, False if each token is sent to the ranks of its experts."""
    return config.moe_dynamic or config.moe_token_dispatcher == "allgather"


def expert_rows(config: TransformerConfig, layout: ParallelLayout, tokens: int, imbalance: float) -> int:
    """Rows that this rank's experts compute for one micro-batch; each rank also sends this number.

    Args:
        tokens: tokens whose residual stream a rank holds.
        imbalance: tokens of the most loaded rank's experts over the mean.
    """
    etp = layout.expert_tensor_parallel_size
    if not gathers_tokens(config):
        padded = padded_rows(config, tokens, imbalance)
        if padded is not None:
            return config.num_experts * etp * padded
    choices = tokens * config.moe_router_topk
    if config.moe_capacity_factor:
        experts, topk = config.num_experts, config.moe_router_topk
        choices = min(choices, experts * expert_capacity(tokens, topk, experts, config.moe_capacity_factor))
    return ceil(choices * etp * imbalance)
