"""Memory of the feed-forward half of a layer: ``layers/mlp.py``, and experts from ``moe/``."""

from __future__ import annotations

from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.tools.planning.memory.half import EXPERTS, MLP, RESIDUAL, ROUTER, Half, recomputed_half
from lightning_megatron.tools.planning.memory.shapes import Shapes


def feed_forward_half(x: Shapes, plan: RecomputePlan, has_experts: bool) -> Half:
    """Norm, feed-forward layer or experts, and the sum with the residual stream."""
    plain = _experts(x, plan.wraps("moe")) if has_experts else _mlp(x)
    if plan.wraps("mlp"):
        cause = EXPERTS if has_experts else MLP
        return recomputed_half(plain, {RESIDUAL: x.residual, cause: x.mask})
    return plain


def _mlp(x: Shapes) -> Half:
    c = x.config
    inner = x.inner(c.ffn_hidden_size)
    product = x.gates * inner
    kept_product = 0 if c.activation == "relu" else product  # its gradient needs the result only
    own = x.residual + x.norm_statistics + kept_product + inner + x.mask + x.post_norm
    forward = max(
        x.norm_copies + x.residual,
        x.residual + x.gathered + product,
        x.residual + product + inner,
        x.residual + x.norm_statistics + kept_product + inner + x.whole + x.summed,
        own + (3 if x.mask else 2) * x.residual,
    )
    features = c.ffn_hidden_size // x.tp
    row, column = c.hidden_size * features, c.hidden_size * features * x.gates
    freed = kept_product + inner
    backward = max(
        x.norm_gradients if x.post_norm else 0,
        x.gathered + inner + x.product(row),
        x.gradient(row),
        4 * inner if x.gates == 2 else product,  # gradients of both factors, of the product, and a factor again
        product - freed + x.column_gradients(column),
        x.residual - freed + x.gradient(column),
        x.residual - freed + x.norm_gradients,
    )
    deferred = 2 * x.whole + product + inner
    return Half({RESIDUAL: x.residual, MLP: own}, forward, backward, deferred, x.gradient(column), inner + x.gathered)


def _experts(x: Shapes, recomputes: bool) -> Half:
    c, etp = x.config, x.layout.expert_tensor_parallel_size
    h, rows, choices = c.hidden_size, x.expert_rows, x.tokens * c.moe_router_topk
    features = c.expert_ffn_hidden_size // etp
    row_in, inner = rows * h * x.item, rows * features * x.item
    product = x.gates * inner
    kept_product = 0 if c.activation == "relu" else product
    picked = choices * h * x.item  # one result a choice, whose sum weights it
    several = x.layout.ep * etp > 1 and c.num_experts // x.layout.ep > 1
    # The router computes in fp32, and keeps its input so.
    router = x.norm_statistics + x.tokens * h * 4 + x.tokens * c.num_experts * 4 + choices * 24
    if x.gathers_tokens:
        tokens = x.tokens * etp * x.layout.ep * h * x.item if etp * x.layout.ep > 1 else 0
        results, local = row_in, tokens + rows * h * (4 + x.item) + 2 * tokens
    else:
        results, local = picked, row_in * (2 if several else 1) + picked * (1 + etp if x.layout.ep * etp > 1 else 1)
        local += choices * h * 4
    inside = row_in + kept_product + inner + results
    again = inside if recomputes else 0
    shared = shared_kept = deferred = beside = 0
    if c.moe_shared_expert_ffn_hidden_size:
        shared = (x.gates + 1) * x.inner(c.moe_shared_expert_ffn_hidden_size)
        shared_kept, deferred = shared + x.residual, shared + 2 * x.whole
        beside = x.residual + x.whole + x.summed  # the routed experts' result, and the sum of the shared ones'
    copy = x.residual if x.item < 4 else 0
    y = copy if recomputes and not shared_kept else 0
    experts = inside - again + y + shared_kept + x.mask + x.post_norm
    kept = {RESIDUAL: x.residual, ROUTER: router, EXPERTS: experts}
    forward = max(
        x.norm_copies + x.residual, copy + router + inside + local, copy + router + inside + shared_kept + beside
    )
    here = x.experts_at_once * features * h  # weights whose gradients exist beside their sums in the buffer
    column = here * x.gates
    combined = choices * h * (8 + 2 * x.item)
    freed = kept_product + inner + results
    # The shared experts' backward comes first, and frees what they have kept.
    backward = (
        again
        - shared
        + max(
            combined,
            row_in + inner + x.product(here) - results,
            row_in - results + x.gradient(here),
            row_in + (4 * inner if x.gates == 2 else product) - results,
            product - freed + row_in + x.product(column),
            row_in - freed + x.gradient(column),
        )
    )
    return Half(kept, forward, max(forward, backward) if recomputes else backward, deferred, again=again)
