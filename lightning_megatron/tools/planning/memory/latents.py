"""Memory of the attention half of a layer whose keys and values come from latents: ``layers/latent_attention.py``."""

from __future__ import annotations

from lightning_megatron.tools.planning.memory.core_attention import core_of
from lightning_megatron.tools.planning.memory.half import ATTENTION, RESIDUAL, Half
from lightning_megatron.tools.planning.memory.shapes import Shapes


def latent_half(x: Shapes, recomputes_core: bool) -> Half:
    """Norm, attention with latents, and the sum with the residual stream."""
    c, core = x.config, core_of(x)
    own, whole = x.tokens * x.item, x.positions * x.item  # bytes of a feature here, and gathered
    heads = c.num_attention_heads // x.tp
    turned, unturned = whole * heads * c.rotary_dim, c.head_dim - c.rotary_dim
    rows = x.queries  # the product, of which the rotation and the concatenation after it make other tensors
    pairs = whole * heads * (unturned + c.value_dim)  # keys without the turned part, beside the values
    # A latent is kept as the input of its norm, and as the norm's output.
    norms = 2 if c.q_lora_rank else 1
    latents = own * 2 * (c.q_lora_rank + c.kv_lora_rank) + 4 * x.tokens * norms
    gathered = whole if x.is_sharded else 0
    inputs = x.queries + x.keys + x.values
    if recomputes_core:
        kept_core, again, inside = core.output, core.kept - core.output, core.kept
    else:
        kept_core, again, inside = core.kept, 0, core.kept - core.output
        if core.replaces:
            inputs = x.queries if x.layout.cp_comm_type == "all_gather" else 0
    kept = x.residual + x.norm_statistics + latents + inputs + kept_core + x.mask
    local = rows + turned + whole * c.rotary_dim  # what the function holds until it returns
    made = inputs if core.replaces else x.queries + x.keys + x.values
    sharpened = x.queries if c.query_factor != 1.0 else 0
    before = x.residual + latents + local
    forward = max(
        x.norm_copies + x.residual,
        before + gathered * c.kv_lora_rank + pairs,
        before + pairs + x.keys + x.values + x.queries + sharpened,
        before + pairs + x.queries + x.keys + x.values + core.forward,
        before + x.norm_statistics + made + kept_core + x.whole + x.summed,
        kept + (3 if x.mask else 2) * x.residual,
    )
    h, features = c.hidden_size, heads * c.head_dim
    row, to_heads = h * heads * c.value_dim, c.kv_lora_rank * heads * (unturned + c.value_dim)
    to_queries = (c.q_lora_rank or h) * features
    freed = inputs + kept_core
    shared = own * (c.kv_lora_rank + c.rotary_dim)
    down = max(c.q_lora_rank, c.kv_lora_rank + c.rotary_dim) * h
    backward = max(
        x.gathered + x.outputs + x.product(row),
        x.outputs - core.output + x.gradient(row),
        again + x.outputs + core.backward - (core.output if inside >= core.output else 0),
        x.queries + x.keys + x.values + pairs - freed,
        x.queries + pairs + (whole + gathered) * c.kv_lora_rank + x.product(to_heads) - freed,
        2 * x.queries + turned + shared + x.residual - freed,
        x.queries + x.residual + _column(x, c.q_lora_rank or h) + x.product(to_queries) - freed,
        2 * x.residual + own * c.q_lora_rank + x.returned(down) - freed,
        x.residual - freed - latents + x.norm_gradients,
    )
    deferred = x.whole + x.outputs + pairs + x.queries + whole * (c.kv_lora_rank + (c.q_lora_rank or h))
    largest = x.gradient(max(row, to_heads, to_queries))
    held = core.output + x.gathered
    return Half({RESIDUAL: x.residual, ATTENTION: kept}, forward, backward, deferred, largest, held, again)


def _column(x: Shapes, features: int) -> int:
    """Gradient of the input of the queries' last matrix, and that input where it is gathered."""
    whole = x.positions * x.item * features
    return 2 * whole if x.is_sharded else whole
