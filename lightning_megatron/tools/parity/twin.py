"""A small job with the layout of a large one, for a comparison on a laptop.

Every axis except data parallelism keeps its size; every size of the model is the smallest that the axes divide.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig

HEAD_DIM = 16
VOCABULARY = 512
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


def twin_config(config: TransformerConfig, layout: ParallelLayout) -> TransformerConfig:
    """The model with few heads, features, experts and words, and two layers or one for each stage.

    Dropout is off, since replicas draw different random numbers.
    """
    groups = layout.tp * layout.cp  # all-to-all shares the heads over cp too
    heads = groups if config.num_query_groups == config.num_attention_heads else 2 * groups
    layers = max(2, layout.pp * layout.vpp)
    changes: dict[str, Any] = {
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "head_dim": HEAD_DIM,
        "hidden_size": heads * HEAD_DIM,
        "ffn_hidden_size": 2 * heads * HEAD_DIM,
        "vocab_size": VOCABULARY,
        "vocab_multiple": 1,
        "max_position_embeddings": twin_seq_length(layout),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if config.rope_head_dim:
        changes["rope_head_dim"] = HEAD_DIM // 2
    if config.has_latents:
        sizes = {"kv_lora_rank": HEAD_DIM, "v_head_dim": HEAD_DIM}
        changes |= sizes | {"q_lora_rank": HEAD_DIM if config.q_lora_rank else 0}
    if config.sliding_window:
        changes["sliding_window"] = min(config.sliding_window, twin_seq_length(layout) // 4)
        if config.sliding_window_layers:
            changes["sliding_window_layers"] = _below(layers, config.sliding_window_layers)
    if config.num_experts:
        changes |= _experts(config, layout, layers, 2 * HEAD_DIM * heads)
    return config.replace(**changes)


def _experts(config: TransformerConfig, layout: ParallelLayout, layers: int, features: int) -> dict[str, Any]:
    return {
        "num_experts": 2 * layout.ep,
        "moe_router_topk": min(2, config.moe_router_topk),
        "moe_layers": _below(layers, config.moe_layers) if config.moe_layers else (),
        "moe_router_num_groups": 0,
        "moe_router_group_topk": 0,
        "moe_router_group_score_topk": 0,
        "moe_ffn_hidden_size": features if config.moe_ffn_hidden_size else 0,
        "moe_shared_expert_ffn_hidden_size": features if config.moe_shared_expert_ffn_hidden_size else 0,
        "moe_input_jitter_eps": 0.0,
        # A capacity applies to a rank's tokens, so the dropped choices would depend on the layout.
        "moe_capacity_factor": 0.0,
        "moe_capacity_bins": 0,
        "moe_pad_to_capacity": False,
    }


def _below(layers: int, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of a list of layers that the twin has too, or its last layer if there are none."""
    return tuple(number for number in numbers if number < layers) or (layers - 1,)
