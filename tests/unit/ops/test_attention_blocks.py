"""Attention in blocks of queries against the definition in fp64, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_megatron.ops.attention import attention_cpu, attention_reference, attention_torch
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.cpu import attention_blocks as blocks
from lightning_megatron.testing.parity import assert_same

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
SHAPES = {  # queries, keys, first query, sequences, heads, groups, head size
    "equal heads": (70, 70, 0, 2, 4, 4, 8),
    "grouped heads": (33, 33, 0, 2, 6, 3, 16),
    "one key head": (64, 64, 0, 1, 8, 1, 5),
    "later queries": (40, 75, 35, 2, 4, 2, 8),
    "more keys than are seen": (40, 75, 3, 1, 4, 2, 8),
}


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    queries, keys, _, batch, heads, groups, size = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = ((queries, heads), (keys, groups), (keys, groups), (queries, heads))
    return [torch.randn(n, batch, h, size, generator=generator).bfloat16().to(dtype) for n, h in sizes]


def gradients(function, tensors: list[Tensor], *options) -> dict[str, Tensor]:
    *leaves, dy = tensors
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = function(*leaves, *options)
    assert out.dtype == dy.dtype
    return {"out": out.detach(), **dict(zip("qkv", torch.autograd.grad(out, leaves, dy), strict=True))}


def exact(q: Tensor, k: Tensor, v: Tensor, first_query: int | None) -> Tensor:
    """The definition, with a softmax in fp64 too."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * q.shape[-1] ** -0.5
    first = len(k) if first_query is None else first_query
    ahead = torch.arange(k.shape[0]) > torch.arange(q.shape[0])[:, None] + first
    weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
    return torch.einsum("bnst,tbnd->sbnd", weights, v)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all keys"])
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_equal_the_definition_in_fp64(name, causal, dtype, monkeypatch):
    monkeypatch.setattr(blocks, "ROWS", 24)
    monkeypatch.setattr(blocks, "FEWEST_QUERIES", 7)  # several blocks, the last one smaller
    monkeypatch.setattr(blocks, "SCORE_BYTES", 4 * 75 * 24 * 3)  # three groups of heads at a time
    first_query = SHAPES[name][2] if causal else None
    truth = gradients(exact, [x.double() for x in operands(SHAPES[name], dtype)], first_query)
    ours = gradients(blocks.attention_blocks, operands(SHAPES[name], dtype), first_query)
    assert_same(ours, truth, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("native", [True, False], ids=["bf16 arithmetic", "none"])
def test_a_processor_without_bf16_arithmetic_multiplies_in_fp32(native, monkeypatch):
    monkeypatch.setattr(blocks, "multiplies_bf16", lambda device: native)
    shape = SHAPES["grouped heads"]
    truth = gradients(exact, [x.double() for x in operands(shape, torch.bfloat16)], 0)
    assert_same(gradients(blocks.attention_blocks, operands(shape, torch.bfloat16), 0), truth, rtol=2**-7)


def test_blocks_are_not_less_exact_than_torchs_kernel():
    shape = (128, 128, 0, 2, 4, 2, 64)
    truth = gradients(exact, [x.double() for x in operands(shape, torch.bfloat16)], 0)

    def error(function, how) -> dict[str, float]:
        found = gradients(function, operands(shape, torch.bfloat16), how)
        return {name: (x - truth[name]).pow(2).mean().sqrt().item() for name, x in found.items()}

    ours, torchs = error(blocks.attention_blocks, 0), error(attention_torch, AttentionCall(causal=True))
    assert all(ours[name] < 1.2 * torchs[name] for name in "qkv"), (ours, torchs)
    assert ours["out"] < 1.5 * torchs["out"]


def test_operands_of_any_strides_are_taken_and_only_they_are_saved():
    shape = SHAPES["grouped heads"]
    plain = operands(shape, torch.float32)
    strided = [torch.stack((x, x), -1).mT.flatten(-2)[..., : x.shape[-1]] for x in plain]
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in strided]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        blocks.attention_blocks(*(x.clone().requires_grad_() for x in plain[:3]), 0)
    assert [x.shape for x in kept] == [x.shape for x in plain[:3]]
    expected = gradients(attention_reference, strided, AttentionCall(causal=True))
    assert_same(gradients(blocks.attention_blocks, strided, 0), expected, rtol=1e-5)


def test_short_sequences_take_blocks_and_others_torchs_kernel(monkeypatch):
    called: list[str] = []
    for name in ("attention_blocks", "attention_torch"):
        monkeypatch.setattr(f"lightning_megatron.ops.attention.{name}", lambda *a, n=name: called.append(n))
    q, k, v, _ = operands((64, 64, 0, 1, 2, 2, 8), torch.float32)
    attention_cpu(q, k, v, AttentionCall(causal=True))
    attention_cpu(q, k, v, AttentionCall(causal=True, dropout=0.1))
    attention_cpu(q[:1], k, v, AttentionCall(causal=True, first_query=63))
    attention_cpu(q.double(), k.double(), v.double(), AttentionCall(causal=True))
    with torch.autocast("cpu", torch.bfloat16):
        attention_cpu(q, k, v, AttentionCall(causal=True))
    long = torch.zeros(blocks.MOST_KEYS + 1, 1, 2, 8)
    attention_cpu(long, long, long, AttentionCall(causal=True))
    assert called == ["attention_blocks", *["attention_torch"] * 5]
