"""Blockwise attention, whole and in pieces, against softmax(q k^T) v in plain torch and fp64."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatron.config.score_rule import PLAIN, ScoreRule, alibi_slopes
from lightning_megatron.ops.attention import ATTENTION, attention, attention_reference
from lightning_megatron.ops.blockwise_attention import (
    PartialAttention,
    attention_backward,
    attention_forward,
    blockwise_attention,
    merge_partials_,
    row_dot,
)
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.testing.parity import assert_same

B, D = 2, 8


class Case(NamedTuple):
    queries: int
    keys: int
    heads: int = 4
    groups: int = 4
    causal: bool = True
    first_query: int = 0
    rule: ScoreRule = PLAIN

    @property
    def call(self) -> AttentionCall:
        return AttentionCall(causal=self.causal, first_query=self.first_query, rule=self.rule)


CASES = {
    "causal": Case(9, 9),
    "causal, groups": Case(9, 9, heads=6, groups=2),
    "causal, one group": Case(8, 8, heads=3, groups=1),
    "not causal": Case(5, 11, heads=6, groups=3, causal=False),
    "later queries": Case(4, 12, groups=2, first_query=8),
    "later queries, more keys": Case(4, 16, groups=2, first_query=6),
    "queries beyond all keys": Case(5, 7, first_query=4),
    "a single token": Case(1, 1),
    "a window": Case(13, 13, heads=4, groups=2, rule=ScoreRule(window=4)),
    "a window of one": Case(5, 5, rule=ScoreRule(window=1)),
    "a window longer than all": Case(5, 5, rule=ScoreRule(window=9)),
    "a window, later queries": Case(5, 12, rule=ScoreRule(window=3), first_query=7),
    "a window, one query": Case(1, 12, heads=4, groups=2, rule=ScoreRule(window=5), first_query=11),
    "capped": Case(9, 9, heads=4, groups=2, rule=ScoreRule(softcap=0.5)),
    "capped, not causal": Case(5, 7, causal=False, rule=ScoreRule(softcap=2.0)),
    "another scale": Case(9, 9, rule=ScoreRule(scale=0.7)),
    "slopes": Case(9, 9, rule=ScoreRule(slopes=(0.5, 0.25, 0.125, 1.0))),
    "slopes, groups, later queries": Case(5, 12, groups=2, first_query=7, rule=ScoreRule(slopes=(2, 1, 0.5, 3))),
    "all at once": Case(11, 11, heads=6, groups=2, rule=ScoreRule(0.6, 1.5, 6, slopes=alibi_slopes(6))),
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
    repeated, values = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    scores = torch.einsum("sbnd,tbnd->sbnt", q, repeated) * (case.rule.scale or 1 / math.sqrt(D))
    if case.rule.softcap:
        scores = case.rule.softcap * (scores / case.rule.softcap).tanh()
    positions = torch.arange(case.queries)[:, None, None, None] + case.first_query
    keys = torch.arange(case.keys)
    if case.rule.slopes:
        scores = scores - torch.tensor(case.rule.slopes).double()[:, None] * (positions - keys)
    if case.causal:
        scores = scores.masked_fill(keys > positions, float("-inf"))
    if case.rule.window:
        scores = scores.masked_fill(positions - keys >= case.rule.window, float("-inf"))
    out = torch.einsum("sbnt,tbnd->sbnd", scores.softmax(-1), values)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad.detach())
    return {"out": out.detach(), "lse": scores.detach().logsumexp(-1), "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_output_log_sum_exp_and_gradients_are_exact_in_blocks_of_any_size(case, block_bytes):
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, grad = (x.to(dtype) for x in inputs(case))
        out, lse = attention_forward(q, k, v, case.call, block_bytes=block_bytes)
        dq, dk, dv = attention_backward(grad, q, k, v, lse, row_dot(out, grad), case.call, block_bytes=block_bytes)
        found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        assert {x.dtype for x in found.values()} == {torch.float32}
        # The inputs are the same numbers in both dtypes, and nothing is rounded to bf16 on the way.
        assert_same(found, truth(case), rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_function_with_gradients_rounds_only_results(case, dtype):
    q, k, v, grad = (x.to(dtype) for x in inputs(case))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = blockwise_attention(*leaves, case.call)
    out.backward(grad)
    grads = {f"d{name}": x.grad for name, x in zip("qkv", leaves, strict=True) if x.grad is not None}
    found = {"out": out.detach(), **grads}
    assert {x.dtype for x in found.values()} == {dtype}
    expected = {name: x for name, x in truth(case).items() if name != "lse"}
    # What is kept for the inner product with the gradient is the rounded output, whose error dq and dk have on top.
    assert_same(found, expected, rtol=2e-6 if dtype == torch.float32 else 2**-6)


def test_it_equals_the_op_that_one_rank_uses():
    q, k, v = (x.float() for x in inputs(Case(16, 16, heads=4, groups=2))[:3])
    call = AttentionCall(causal=True)
    assert_same({"out": blockwise_attention(q, k, v, call)}, {"out": attention(q, k, v, call)})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_op_in_plain_torch_and_the_one_for_a_cpu_are_of_the_same_definition(case):
    q, k, v = (x.float() for x in inputs(case)[:3])
    for op in (attention, attention_reference):
        assert_same({"out": op(q, k, v, case.call)}, {"out": truth(case)["out"]}, rtol=2e-6)


def test_rules_that_no_kernel_knows_are_computed_block_by_block_and_told():
    q, k, v = torch.randn(3, 40, 1, 2, D)
    choice = ATTENTION.choose("cpu")
    choice.run(q, k, v, AttentionCall(causal=True, rule=ScoreRule(window=40)))
    assert choice.fallbacks == {}
    choice.run(q, k, v, AttentionCall(causal=True, rule=ScoreRule(window=39, softcap=50.0)))
    choice.run(q, k, v, AttentionCall(causal=True, rule=ScoreRule(window=39), dropout=0.1))
    choice.run(q, k, v, AttentionCall(causal=True, rule=ScoreRule(slopes=(0.5, 0.25))))
    told = {"scores capped at 50, a window of 39": "block by block", "a window of 39": "block by block"}
    assert choice.fallbacks == told | {"dropout of weights": "reference", "ALiBi": "block by block"}


def test_sinks_take_a_share_of_the_weights_and_learn():
    """As one more key for each head, whose value is 0."""
    q, k, v, grad = (x.double() for x in inputs(Case(9, 9, heads=6, groups=2)))
    sinks, rule = torch.randn(6).double(), ScoreRule(window=4, has_sinks=True)

    def run(op, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, sinks)]
        out = op(*leaves[:3], AttentionCall(causal=True, rule=rule, sinks=leaves[3]))
        grads = torch.autograd.grad(out, leaves, grad.to(dtype))
        return {"out": out.detach(), **dict(zip(("dq", "dk", "dv", "d_sinks"), grads, strict=True))}

    def by_hand(q, k, v, call):
        scores = torch.einsum("sbnd,tbnd->sbnt", q, k.repeat_interleave(3, 2)) / math.sqrt(D)
        distance = torch.arange(9)[:, None] - torch.arange(9)
        exps = scores.exp() * ((distance >= 0) & (distance < rule.window))[:, None, None]
        weights = exps / (exps.sum(-1, keepdim=True) + call.sinks.exp()[:, None])
        return torch.einsum("sbnt,tbnd->sbnd", weights, v.repeat_interleave(3, 2))

    expected = run(by_hand, torch.float64)
    for op in (blockwise_attention, attention_reference, attention):
        assert_same(run(op, torch.float32), expected, rtol=2e-6)
    assert_same(run(blockwise_attention, torch.float64), expected, rtol=1e-12)


def test_chunks_of_keys_before_the_queries_merge_by_their_distance():
    """What context-parallel ranks do with each pair of chunks; a chunk may be out of sight for some queries."""
    case = Case(4, 12, heads=4, groups=2, first_query=8, rule=ScoreRule(0.0, 3.0, 6, slopes=(0.5, 0.1, 1.0, 0.3)))
    q, k, v, grad = (x.float() for x in inputs(case))
    cuts = [slice(0, 4), slice(8, 12), slice(4, 8)]
    whole = PartialAttention.nothing(q, v.shape[-1])
    call = AttentionCall(causal=True, rule=case.rule)
    for cut in cuts:
        merge_partials_(whole, attention_forward(q, k[cut], v[cut], call._replace(first_query=8 - cut.start)))
    delta = row_dot(whole.out, grad)
    grads = [
        attention_backward(grad, q, k[cut], v[cut], whole.lse, delta, call._replace(first_query=8 - cut.start))
        for cut in sorted(cuts, key=lambda cut: cut.start)
    ]
    dk, dv = (torch.cat([part[i] for part in grads]) for i in (1, 2))
    assert_same({**whole._asdict(), "dq": sum(part[0] for part in grads), "dk": dk, "dv": dv}, truth(case), rtol=2e-6)


def test_pieces_of_the_keys_merge_to_all_of_them_and_their_gradients_add_up():
    case = Case(6, 12, heads=4, groups=2, causal=False)
    q, k, v, grad = (x.float() for x in inputs(case))
    cuts = [slice(0, 5), slice(5, 6), slice(6, 12)]
    parts = [attention_forward(q, k[cut], v[cut], AttentionCall(causal=False)) for cut in cuts]
    for order in ([0, 1, 2], [2, 0, 1]):
        whole, *rest = (PartialAttention(*(x.clone() for x in parts[i])) for i in order)
        for part in rest:
            merge_partials_(whole, part)
        delta = row_dot(whole.out, grad)
        grads = [attention_backward(grad, q, k[c], v[c], whole.lse, delta, AttentionCall(causal=False)) for c in cuts]
        dk, dv = (torch.cat([part[i] for part in grads]) for i in (1, 2))
        found = {**whole._asdict(), "dq": sum(part[0] for part in grads), "dk": dk, "dv": dv}
        assert_same(found, truth(case), rtol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_hidden_keys_take_no_weight_and_get_no_gradient(causal: bool) -> None:
    """Of the third sample all keys are hidden: its outputs and gradients are 0, and nothing is NaN."""
    q, k, v, grad = (torch.randn(11, 3, 4, D, generator=torch.Generator().manual_seed(i)).double() for i in range(4))
    mask = torch.arange(11) < torch.tensor([[11], [4], [0]])
    found, expected = [], []
    for op, results in ((blockwise_attention, found), (attention_reference, expected)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = op(*leaves, AttentionCall(causal=causal, key_mask=mask))
        out.backward(grad)
        results += [out.detach(), *(x.grad for x in leaves)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[:, :2], theirs[:, :2], rtol=1e-5, atol=1e-5)  # its softmax is fp32
        assert not ours[:, 2].any()


def test_merging_holds_where_one_part_outweighs_the_other_by_more_than_fp32_can_say():
    for first, second in ((-200.0, 200.0), (200.0, -200.0)):
        whole, part = (PartialAttention(torch.full((1, 1, 1, 2), x), torch.full((1, 1, 1), x)) for x in (first, second))
        merge_partials_(whole, part)
        assert whole.out.flatten().tolist() == [200.0, 200.0]
        assert whole.lse.item() == 200.0


def test_gradients_by_finite_differences():
    case = Case(3, 5, heads=2, groups=1, first_query=2)
    leaves = [x.double().requires_grad_() for x in inputs(case)[:3]]
    for rule in (PLAIN, ScoreRule(0.9, 2.0, 2), ScoreRule(softcap=2.0, slopes=(0.5, 0.3))):
        assert torch.autograd.gradcheck(
            partial(blockwise_attention, call=AttentionCall(causal=True, first_query=2, rule=rule)), leaves
        )


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


def test_a_window_computes_little_more_than_its_scores():
    length, window = 512, 32
    q, k, v = (torch.randn(length, 1, 1, 4) for _ in range(3))
    products = 0

    class Counted(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal products
            if func in (torch.matmul, Tensor.matmul):
                products += args[0].shape[-2] * args[1].shape[-1] * args[0].shape[-1]
            return func(*args, **kwargs or {})

    with Counted():
        attention_forward(q, k, v, AttentionCall(causal=True, rule=ScoreRule(window=window)))
    assert products <= 2 * 4 * length * (window + 64)


def test_scores_never_exist_whole():
    length = 512
    q, k, v = (torch.randn(length, 1, 1, 4) for _ in range(3))
    with Largest() as seen:
        out, lse = attention_forward(q, k, v, AttentionCall(causal=True), block_bytes=1 << 14)
        attention_backward(out, q, k, v, lse, row_dot(out, out), AttentionCall(causal=True), block_bytes=1 << 14)
    assert seen.elements <= (1 << 14) // 4 < length * length
