"""Memory of the attention half of a layer, from ``layers/attention.py`` and ``context_parallel/``."""

from __future__ import annotations

from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.tools.planning.memory.core_attention import core_of
from lightning_megatron.tools.planning.memory.half import ATTENTION, RESIDUAL, Half, recomputed_half
from lightning_megatron.tools.planning.memory.latents import latent_half
from lightning_megatron.tools.planning.memory.shapes import Shapes


def attention_half(x: Shapes, plan: RecomputePlan) -> Half:
    """Norm, attention and the sum with the residual stream."""
    make = latent_half if x.config.has_latents else _half
    plain = make(x, plan.wraps("core_attn"))
    if plan.wraps("attention"):
        return recomputed_half(plain, {RESIDUAL: x.residual, ATTENTION: x.mask})
    return plain


def _half(x: Shapes, recomputes_core: bool) -> Half:
    c, core = x.config, core_of(x)
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
