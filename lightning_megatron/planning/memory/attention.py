"""Memory of the attention half of a layer, from ``layers/attention.py`` and ``context_parallel/``."""

from __future__ import annotations

from typing import NamedTuple

from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.planning.memory.half import ATTENTION, RESIDUAL, Half, recomputed_half
from lightning_megatron.planning.memory.shapes import Shapes

SCORE_BLOCKS = 3 * (4 << 20)
"""Scores of a block of queries and their copies, where attention goes block by block."""


class Core(NamedTuple):
    """Bytes of core attention.

    Attributes:
        kept: bytes for backward beside queries, keys and values, the layer's output among them.
        replaces: True if queries, keys and values are not kept as they came.
        forward: most bytes of its forward.
        backward: most bytes of its backward beside what is kept.
        output: bytes of its output, the input of the output projection.
    """

    kept: int
    replaces: bool
    forward: int
    backward: int
    output: int


def attention_half(x: Shapes, plan: RecomputePlan) -> Half:
    """Norm, attention and the sum with the residual stream."""
    plain = _half(x, plan.wraps("core_attn"))
    if plan.wraps("attention"):
        return recomputed_half(plain, {RESIDUAL: x.residual, ATTENTION: x.mask})
    return plain


def _half(x: Shapes, recomputes_core: bool) -> Half:
    c, core = x.config, _core(x)
    heads = x.queries + 2 * x.keys
    # Without rotary positions queries, keys and values are views of the product, which is then kept as a whole.
    if c.position_embedding == "rope":
        turned = inputs = heads
        beside_gathered = x.queries  # kept where core attention keeps gathered keys and values itself
    else:
        turned = x.queries if c.num_query_groups < c.num_attention_heads else 0
        inputs, beside_gathered = heads + turned, heads
    if recomputes_core:
        kept_core, again, inside = core.output, core.kept - core.output, core.kept
    else:
        kept_core, again, inside = core.kept, 0, core.kept - core.output
        if core.replaces:
            inputs = beside_gathered if x.layout.cp_comm_type == "all_gather" else 0
    own = x.residual + x.norm_statistics + x.head_norms + inputs + kept_core + x.mask + x.post_norm
    local = x.head_norms + heads + turned  # what the function holds until it returns
    out = x.whole + x.summed
    forward = max(
        x.norm_copies + x.residual,
        x.residual + x.gathered + heads,
        x.residual + local + core.forward,
        x.residual + x.norm_statistics + local + kept_core + out,
        own + (3 if x.mask else 2) * x.residual,
    )
    h, query_features = c.hidden_size, c.num_attention_heads * c.head_dim // x.tp
    row = h * query_features
    column = h * (query_features + 2 * c.num_query_groups * c.head_dim // x.tp)
    before = x.gathered + x.queries + x.product(row)
    freed = inputs + kept_core
    backward = max(
        x.norm_gradients if x.post_norm else 0,
        before,
        x.queries - core.output + x.gradient(row),
        again + x.queries + core.backward - (core.output if inside >= core.output else 0),
        2 * heads + turned - freed,
        heads - freed + x.column_gradients(column),
        x.residual - freed + x.gradient(column),
        x.residual - freed + x.norm_gradients,
    )
    deferred = x.whole + heads + x.queries + x.whole
    return Half(
        {RESIDUAL: x.residual, ATTENTION: own},
        forward,
        backward,
        deferred,
        x.gradient(max(row, column)),
        core.output + x.gathered,
        again,
    )


def _core(x: Shapes) -> Core:
    if x.layout.cp == 1:
        if x.attention == "reference":
            return _reference(x)
        return _blocks(x) if x.config.blockwise_share(x.seq_length) else _flash(x)
    return {"p2p": _ring, "all_gather": _gathered, "a2a": _exchanged}[x.layout.cp_comm_type](x)


def _flash(x: Shapes) -> Core:
    """A fused kernel keeps its output and one number for each query and head."""
    out, grads = x.queries, x.queries + 2 * x.keys
    return Core(out + x.log_sums, False, out + x.log_sums, grads, out)


def _reference(x: Shapes) -> Core:
    """Plain torch keeps the weights in fp32 and in the dtype of the values, and keys and values for every head."""
    weights = x.scores * (4 + x.item) if x.item < 4 else x.scores * 4
    repeated = 2 * x.queries if x.keys < x.queries else 0
    mask = x.seq_length * x.seq_length
    kept = weights + repeated + mask + x.queries
    return Core(kept, False, kept + 8 * x.scores, 12 * x.scores + 3 * x.queries, x.queries)


def _wide(x: Shapes, size: int) -> int:
    """Bytes of a tensor's fp32 copy."""
    return size * 4 // x.item


def _blocks(x: Shapes) -> Core:
    """Scores that a fused kernel cannot make come block by block, in fp32."""
    pair = 2 * x.keys
    forward = x.queries + _wide(x, pair + 2 * x.queries) + SCORE_BLOCKS
    backward = x.queries + pair + _wide(x, 2 * pair + 3 * x.queries) + SCORE_BLOCKS
    return Core(x.queries + x.log_sums, False, forward, backward, x.queries)


def _ring(x: Shapes) -> Core:
    """Keys and values travel while attention goes block by block, in fp32."""
    pair = 2 * x.keys
    forward = 2 * pair + _wide(x, pair + 2 * x.queries) + SCORE_BLOCKS
    backward = pair + _wide(x, 4 * pair + 2 * x.queries + x.keys) + SCORE_BLOCKS
    return Core(x.queries + x.log_sums, False, forward, backward, x.queries)


def _gathered(x: Shapes) -> Core:
    """Keys and values of the whole sequence are gathered; a rank's two chunks of queries attend in turn."""
    pair = 2 * x.keys * x.layout.cp
    kept = pair + 2 * x.queries + x.log_sums
    forward = pair + x.queries // 2 + _wide(x, pair + pair // 2 + x.queries) + SCORE_BLOCKS
    backward = _wide(x, 2 * pair + pair // 2 + x.queries + x.queries // 2) + SCORE_BLOCKS
    return Core(kept, True, forward, backward, x.queries)


def _exchanged(x: Shapes) -> Core:
    """Heads are exchanged for tokens; the exchanged tensors are what the kernel keeps."""
    pack = x.queries + 2 * x.exchanged_keys
    kept = pack + 2 * x.queries + x.log_sums
    if x.config.blockwise_share(x.seq_length):
        blocks = _blocks(x)
        return Core(kept, True, 2 * pack + blocks.forward, 2 * pack + blocks.backward, x.queries)
    return Core(kept, True, 4 * pack, 3 * pack + x.queries, x.queries)
