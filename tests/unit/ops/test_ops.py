"""Each op against its reference and against others' implementations, forward and backward.

Tolerances, relative to the largest element: fp32 1e-5 (order of sums). bf16: inputs are the same bf16 numbers and the
truth is computed in fp32; an op may round a few times, so 2^-6 = 4 units of bf16's last place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from lightning_megatron.config.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from lightning_megatron.layers.rotary import RotaryEmbedding
from lightning_megatron.ops.activation import gelu_tanh, swiglu, swiglu_clamped
from lightning_megatron.ops.attention import attention, attention_reference
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.dropout import dropout
from lightning_megatron.ops.grouped_linear import grouped_in_place, grouped_linear, grouped_product
from lightning_megatron.ops.norm import layer_norm, rms_norm, rms_norm_reference
from lightning_megatron.ops.rope import rope, rope_reference
from lightning_megatron.testing.parity import assert_same
from lightning_megatron.weight_grad_store import GradPlace

S, B, N, G, D, H = 9, 2, 6, 3, 8, 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
Op = Callable[..., Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def run(op: Op, inputs: list[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of ``op`` on bf16-representable inputs in ``dtype``."""
    leaves = [x.bfloat16().to(dtype).requires_grad_() for x in inputs]
    out = op(*leaves)
    assert out.dtype == dtype
    out.backward(random(*out.shape, seed=1).bfloat16().to(dtype))
    grads = {f"gradient {i}": x.grad for i, x in enumerate(leaves) if x.grad is not None}
    assert len(grads) == len(leaves)
    return {"output": out.detach(), **grads}


def swiglu_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_clamped_reference(x: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def causal(op: Op) -> Op:
    return lambda q, k, v: op(q, k, v, AttentionCall(causal=True))


def not_causal(op: Op) -> Op:
    return lambda q, k, v: op(q, k, v, AttentionCall(causal=False))


def hardly_dropping(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Attention in the way it is computed with dropout."""
    return attention(q, k, v, call._replace(dropout=1e-9))


def at_positions(op: Op) -> Op:
    return lambda x: op(x, *RotaryEmbedding(D).first(S, x.device, x.dtype))


GROUPED, FULL = [(S, B, N, D), (S, B, G, D), (S, B, G, D)], [(S, B, N, D)] * 3
OPS: dict[str, tuple[Op, Op, list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: rms_norm_reference(x, w, 1e-5), [(S, B, H), (H,)]),
    "layer_norm": (
        lambda x, w, b: layer_norm(x, w, b, 1e-5),
        lambda x, w, b: (x - x.mean(-1, True)) * (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt() * w + b,
        [(S, B, H), (H,), (H,)],
    ),
    "swiglu": (swiglu, swiglu_reference, [(S, B, 2 * H)]),
    "clamped swiglu": (
        lambda x: swiglu_clamped(x, 1.3, 0.75),  # a fourth and a half of the values lie beyond
        lambda x: swiglu_clamped_reference(x, 1.3, 0.75),
        [(S, B, 2 * H)],
    ),
    "gelu_tanh": (gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), [(S, B, H)]),
    "rope": (at_positions(rope), at_positions(rope_reference), [(S, B, N, D)]),
    "causal attention": (causal(attention), causal(attention_reference), FULL),
    "causal attention, grouped": (causal(attention), causal(attention_reference), GROUPED),
    "attention": (not_causal(attention), not_causal(attention_reference), GROUPED),
    "causal attention with dropout": (causal(hardly_dropping), causal(attention_reference), FULL),
    "causal attention with dropout, grouped": (causal(hardly_dropping), causal(attention_reference), GROUPED),
    "attention with dropout": (not_causal(hardly_dropping), not_causal(attention_reference), GROUPED),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_ops_equal_their_fp32_reference_forward_and_backward(name, dtype):
    op, reference, shapes = OPS[name]
    inputs = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
    assert_same(run(op, inputs, dtype), run(reference, inputs, torch.float32), rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rope", "causal attention, grouped"])
def test_references_hold_in_bf16_too(name):
    _, reference, shapes = OPS[name]
    inputs = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
    ours = run(reference, inputs, torch.bfloat16)
    assert_same(ours, run(reference, inputs, torch.float32), rtol=TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("queries", [1, 2, 5])
def test_queries_that_begin_later_see_what_they_would_have_seen_in_the_whole(queries):
    q, k, v = random(S, B, N, D), random(S, B, G, D, seed=1), random(S, B, G, D, seed=2)
    whole = attention(q, k, v, AttentionCall(causal=True))
    for op in (attention, attention_reference):
        last = op(q[-queries:], k, v, AttentionCall(causal=True, first_query=S - queries))
        assert_same({"out": last}, {"out": whole[-queries:]})


def test_attention_dropout_keeps_the_mean_and_drops_something():
    q, k, v = (random(S, B, N, D, seed=i) for i in range(3))
    torch.manual_seed(0)
    dropped = torch.stack([attention(q, k, v, AttentionCall(causal=True, dropout=0.2)) for _ in range(200)])
    assert not torch.equal(dropped[0], dropped[1])
    assert dropped.mean(0).sub(attention(q, k, v, AttentionCall(causal=True))).abs().mean().item() < 0.05


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dropout_scales_what_it_keeps_and_remembers_it_in_one_byte_an_element(dtype):
    torch.manual_seed(0)
    x = random(64, 64).to(dtype).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = dropout(x, 0.25)
    (gradient,) = torch.autograd.grad(out, x, torch.full_like(x, 3.0))
    alive = out != 0
    assert alive.float().mean().item() == pytest.approx(0.75, abs=0.03)  # 4 standard deviations
    truth = {"out": x.detach().float() * alive / 0.75, "gradient": 3.0 * alive / 0.75}
    assert_same({"out": out.detach(), "gradient": gradient}, truth, rtol=TOLERANCE[dtype])
    assert sum(t.untyped_storage().nbytes() for t in kept) == x.numel()


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
ROPE_KINDS = {
    "plain": (RotaryEmbedding(D, 10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
    "llama 3.1": (
        RotaryEmbedding(64, 500000.0, Llama3Scaling()),
        {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    "llama 3.2": (
        RotaryEmbedding(64, 500000.0, Llama3Scaling(factor=32.0)),
        {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    "linear": (RotaryEmbedding(64, 10000.0, LinearScaling(3.0)), {"rope_type": "linear", "factor": 3.0}),
    "dynamic": (RotaryEmbedding(64, 10000.0, DynamicScaling(2.5, 4096)), {"rope_type": "dynamic", "factor": 2.5}),
    "yarn": (RotaryEmbedding(64, 10000.0, YarnScaling(8.0, 4096)), YARN),
    "yarn, by hand": (
        RotaryEmbedding(64, 150000.0, YarnScaling(32.0, 4096, 24.0, 2.0, 1.2, truncate=False)),
        YARN
        | {"rope_theta": 150000.0, "factor": 32.0, "beta_fast": 24.0, "beta_slow": 2.0}
        | {"attention_factor": 1.2, "truncate": False},
    ),
    "yarn of two scales": (
        RotaryEmbedding(64, 10000.0, YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=0.707)),
        YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    ),
}


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_rotary_embedding_equals_transformers(kind):
    ours, parameters = ROPE_KINDS[kind]
    config = LlamaConfig(
        hidden_size=ours.head_dim * N,
        num_attention_heads=N,
        max_position_embeddings=4096 if parameters["rope_type"] == "dynamic" else 131072,
        rope_theta=parameters.get("rope_theta", 10000.0),
        rope_scaling=dict(parameters),
    )
    for last in (1000, 4095, 4096, 20000):
        positions = torch.tensor([[0, 1, 5, 999, last // 2, last]])
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
        our_cos, our_sin = ours(positions[0], torch.float32)
        assert_same({"cos": our_cos[:, 0, 0], "sin": our_sin[:, 0, 0]}, {"cos": cos[0], "sin": sin[0]}, atol=1e-6)
        whole, _ = ours.first(last + 1, torch.device("cpu"), torch.float32)
        assert torch.equal(whole[positions[0]], our_cos)
    q, k = random(6, B, N, ours.head_dim), random(6, B, N, ours.head_dim, seed=1)
    angles = our_cos[None, :, 0, 0], our_sin[None, :, 0, 0]
    their_q, their_k = apply_rotary_pos_emb(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), *angles)
    assert_same(
        {"q": rope(q, our_cos, our_sin), "k": rope(k, our_cos, our_sin)},
        {"q": their_q.permute(2, 0, 1, 3), "k": their_k.permute(2, 0, 1, 3)},
    )


def test_rotary_tables_are_kept_and_serve_training_after_inference():
    rotary = RotaryEmbedding(D)
    with torch.inference_mode():
        kept = rotary.first(S, torch.device("cpu"), torch.float32)
    assert rotary.first(S, torch.device("cpu"), torch.float32) is kept
    x = random(S, B, N, D).requires_grad_()
    rope(x, *kept).sum().backward()
    assert rotary.first(S + 1, torch.device("cpu"), torch.float32)[0].shape == (S + 1, 1, 1, D)
    for dtype in (torch.bfloat16, torch.float32):
        for table, wide in zip(rotary.first(S, torch.device("cpu"), dtype), kept, strict=True):
            assert table.dtype == dtype
            assert torch.equal(table, wide.to(dtype))
    assert not list(rotary.parameters())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rms_norm_equals_transformers(dtype):
    theirs = LlamaRMSNorm(H, eps=1e-6)
    x = random(S, B, H).to(dtype)
    assert_same(
        {"out": rms_norm(x, theirs.weight.to(dtype), 1e-6)}, {"out": theirs.to(dtype)(x)}, rtol=TOLERANCE[dtype]
    )


def test_gradients_of_own_functions_by_finite_differences():
    x = random(3, 2, 2, 4).double().requires_grad_()
    cos, sin = (t.double() for t in RotaryEmbedding(4).first(3, x.device, torch.float64))
    assert torch.autograd.gradcheck(swiglu, (x,))
    assert torch.autograd.gradcheck(lambda x: rope(x, cos, sin), (x,))


def products_of_groups(function, dtype):
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in ((9, 16), (4, 8, 16)))
    counts = [3, 0, 5, 1]
    out = function(x, weight, counts)
    out.backward(torch.randn(9, 8, generator=generator).to(dtype))
    return out, x.grad, weight.grad


def test_grouped_products_are_those_of_each_group():
    def one_by_one(x, weight, counts):
        return torch.cat([rows @ w.t() for rows, w in zip(x.split(counts), weight, strict=True)])

    for ours, right in zip(*(products_of_groups(f, torch.float32) for f in (grouped_linear, one_by_one)), strict=True):
        torch.testing.assert_close(ours, right)


has_kernel = pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="torch has no grouped product")


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (grouped_in_place, torch.float32),
        (grouped_in_place, torch.bfloat16),
        pytest.param(grouped_product, torch.bfloat16, marks=has_kernel),
    ],
)
@pytest.mark.parametrize("is_new", [True, False])
def test_gradients_of_groups_are_added_to_their_sums(is_new, function, dtype):
    total = torch.full((4, 2, 4, 16), float("nan") if is_new else 1.0)
    _, dx, none = products_of_groups(partial(function, find_sum=lambda: GradPlace(total, is_new)), dtype)
    _, right_dx, right = products_of_groups(grouped_linear, torch.float32)
    assert none is None
    close = {"rtol": 2**-6, "atol": 2**-4} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(total.view(4, 8, 16), right + (0 if is_new else 1), **close)
    torch.testing.assert_close(dx.float(), right_dx, **close)
    assert torch.equal(total[1], torch.full_like(total[1], 0 if is_new else 1)), "a group without rows"


@has_kernel
def test_the_kernel_for_all_groups_means_the_same():
    ours, right = (products_of_groups(f, torch.bfloat16) for f in (grouped_product, grouped_linear))
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)
