"""Blockwise attention, whole and in pieces, against softmax(q k^T) v in plain torch and fp64."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatron.ops.attention import attention
from lightning_megatron.ops.blockwise_attention import (
    PartialAttention,
    attention_backward,
    attention_forward,
    blockwise_attention,
    merge_partials_,
    row_dot,
)
from lightning_megatron.testing.parity import assert_same

B, D = 2, 8


class Case(NamedTuple):
    queries: int
    keys: int
    heads: int = 4
    groups: int = 4
    causal: bool = True
    first_query: int = 0


CASES = {
    "causal": Case(9, 9),
    "causal, groups": Case(9, 9, heads=6, groups=2),
    "causal, one group": Case(8, 8, heads=3, groups=1),
    "not causal": Case(5, 11, heads=6, groups=3, causal=False),
    "later queries": Case(4, 12, groups=2, first_query=8),
    "later queries, more keys": Case(4, 16, groups=2, first_query=6),
    "queries beyond all keys": Case(5, 7, first_query=4),
    "a single token": Case(1, 1),
}
# A row of scores each, two or three rows, and all at once.
BLOCK_BYTES = (1, 1500, 1 << 20)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = random(case.queries, B, case.heads, D, seed=1)
    k, v = (random(case.keys, B, case.groups, D, seed=seed) for seed in (2, 3))
    return q, k, v, random(case.queries, B, case.heads, D, seed=4)


def truth(case: Case) -> dict[str, Tensor]:
    """fp64, scores and all."""
    *leaves, grad = (x.double().requires_grad_() for x in inputs(case))
    q, k, v = leaves
    repeats = case.heads // case.groups
    keys, values = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    scores = torch.einsum("sbnd,tbnd->sbnt", q, keys) / math.sqrt(D)
    if case.causal:
        positions = torch.arange(case.queries) + case.first_query
        scores = scores.masked_fill((torch.arange(case.keys) > positions[:, None])[:, None, None], float("-inf"))
    out = torch.einsum("sbnt,tbnd->sbnd", scores.softmax(-1), values)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad.detach())
    return {"out": out.detach(), "lse": scores.detach().logsumexp(-1), "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_output_log_sum_exp_and_gradients_are_exact_in_blocks_of_any_size(case, block_bytes):
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, grad = (x.to(dtype) for x in inputs(case))
        how = {"causal": case.causal, "first_query": case.first_query, "block_bytes": block_bytes}
        out, lse = attention_forward(q, k, v, **how)
        dq, dk, dv = attention_backward(grad, q, k, v, lse, row_dot(out, grad), **how)
        found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        assert {x.dtype for x in found.values()} == {torch.float32}
        # The inputs are the same numbers in both dtypes, and nothing is rounded to bf16 on the way.
        assert_same(found, truth(case), rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_function_with_gradients_rounds_only_results(case, dtype):
    q, k, v, grad = (x.to(dtype) for x in inputs(case))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = blockwise_attention(*leaves, causal=case.causal, first_query=case.first_query)
    out.backward(grad)
    grads = {f"d{name}": x.grad for name, x in zip("qkv", leaves, strict=True) if x.grad is not None}
    found = {"out": out.detach(), **grads}
    assert {x.dtype for x in found.values()} == {dtype}
    expected = {name: x for name, x in truth(case).items() if name != "lse"}
    # What is kept for the inner product with the gradient is the rounded output, whose error dq and dk have on top.
    assert_same(found, expected, rtol=2e-6 if dtype == torch.float32 else 2**-6)


def test_it_equals_the_op_that_one_rank_uses():
    q, k, v = (x.float() for x in inputs(Case(16, 16, heads=4, groups=2))[:3])
    assert_same({"out": blockwise_attention(q, k, v, causal=True)}, {"out": attention(q, k, v, causal=True)})


def test_pieces_of_the_keys_merge_to_all_of_them_and_their_gradients_add_up():
    case = Case(6, 12, heads=4, groups=2, causal=False)
    q, k, v, grad = (x.float() for x in inputs(case))
    cuts = [slice(0, 5), slice(5, 6), slice(6, 12)]
    parts = [attention_forward(q, k[cut], v[cut], causal=False) for cut in cuts]
    for order in ([0, 1, 2], [2, 0, 1]):
        whole, *rest = (PartialAttention(*(x.clone() for x in parts[i])) for i in order)
        for part in rest:
            merge_partials_(whole, part)
        delta = row_dot(whole.out, grad)
        grads = [attention_backward(grad, q, k[c], v[c], whole.lse, delta, causal=False) for c in cuts]
        dk, dv = (torch.cat([part[i] for part in grads]) for i in (1, 2))
        found = {**whole._asdict(), "dq": sum(part[0] for part in grads), "dk": dk, "dv": dv}
        assert_same(found, truth(case), rtol=2e-6)


def test_merging_holds_where_one_part_outweighs_the_other_by_more_than_fp32_can_say():
    for first, second in ((-200.0, 200.0), (200.0, -200.0)):
        whole, part = (PartialAttention(torch.full((1, 1, 1, 2), x), torch.full((1, 1, 1), x)) for x in (first, second))
        merge_partials_(whole, part)
        assert whole.out.flatten().tolist() == [200.0, 200.0]
        assert whole.lse.item() == 200.0


def test_gradients_by_finite_differences():
    case = Case(3, 5, heads=2, groups=1, first_query=2)
    leaves = [x.double().requires_grad_() for x in inputs(case)[:3]]
    assert torch.autograd.gradcheck(lambda q, k, v: blockwise_attention(q, k, v, causal=True, first_query=2), leaves)


class Largest(TorchFunctionMode):
    """Elements of the largest tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_scores_never_exist_whole():
    length = 512
    q, k, v = (torch.randn(length, 1, 1, 4) for _ in range(3))
    with Largest() as seen:
        out, lse = attention_forward(q, k, v, causal=True, block_bytes=1 << 14)
        attention_backward(out, q, k, v, lse, row_dot(out, out), causal=True, block_bytes=1 << 14)
    assert seen.elements <= (1 << 14) // 4 < length * length
