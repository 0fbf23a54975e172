"""Attention over context-parallel ranks against attention of one rank to the whole sequence, in fp64 and fp32.

fp32 tolerance: sums in another order, 1e-5 of the largest element of each tensor. bf16: the inputs are the same bf16
numbers, the truth is computed in fp64; queries, keys and values are rounded nowhere, so that what is left is the
rounding of results, 2^-6 as for every op.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from flash_on_cpu import flash_on_cpu
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.score_rule import PLAIN, ScoreRule, alibi_slopes
from lightning_megatron.context_parallel.attention import CONTEXT_ATTENTION
from lightning_megatron.context_parallel.zigzag import gather_context, split_context
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.ops.attention import attention_reference
from lightning_megatron.ops.blockwise_attention import FLASH, PartialKernels, flash_attention
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.testing.parity import differences

B, D = 2, 8
CAUSAL = AttentionCall(causal=True)


class Case(NamedTuple):
    length: int
    heads: int
    groups: int
    causal: bool = True
    rule: ScoreRule = PLAIN
    seen: tuple[int, int] | None = None  # keys of each sample that are no padding

    def call(self) -> AttentionCall:
        key_mask = None if self.seen is None else torch.arange(self.length) < torch.tensor(self.seen)[:, None]
        return AttentionCall(causal=self.causal, rule=self.rule, key_mask=key_mask)


CASES = {
    "every head its own": Case(16, 8, 8),
    "groups": Case(24, 8, 4),
    "fewer groups than ranks": Case(16, 4, 1),
    "groups that do not split": Case(32, 24, 6),
    "not causal": Case(16, 8, 2, causal=False),
    "capped, not causal": Case(16, 8, 2, causal=False, rule=ScoreRule(0.5, 2.0)),
    "a window within a chunk": Case(32, 4, 2, rule=ScoreRule(window=3)),
    "slopes": Case(24, 8, 4, rule=ScoreRule(slopes=alibi_slopes(8))),
    "slopes, a window, capped": Case(32, 8, 4, rule=ScoreRule(0.5, 2.0, 13, slopes=alibi_slopes(8))),
    "a window over chunks, capped": Case(32, 8, 4, rule=ScoreRule(0.5, 2.0, 13)),
    "sinks": Case(16, 8, 4, rule=ScoreRule(has_sinks=True)),
    "padding": Case(16, 8, 4, causal=False, seen=(16, 3)),  # on some ranks nothing but padding
    "padding, causal": Case(24, 8, 8, seen=(11, 24)),
    "sinks and a window": Case(32, 8, 2, rule=ScoreRule(window=5, has_sinks=True)),
}


def cp_axis() -> Axis:
    size = torch.distributed.get_world_size()
    return ParallelMesh.create(ParallelLayout(cp=size), torch.device("cpu")).cp


def inputs(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(case.length, B, n, D) for n in (case.heads, case.groups, case.groups, case.heads)]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def run(op: Any, leaves: list[Tensor], grad: Tensor, call: AttentionCall = CAUSAL) -> dict[str, Tensor]:
    """Output and gradients; those of sinks are summed over the ranks of an operation that runs on several."""
    leaves = [x.clone().requires_grad_() for x in leaves]
    sinks = torch.linspace(-1, 1, leaves[0].shape[2]).to(leaves[0]).requires_grad_() if call.rule.has_sinks else None
    out = op(*leaves, call._replace(sinks=sinks))
    out.backward(grad)
    grads = {f"d{name}": x.grad for name, x in zip("qkv", leaves, strict=True) if x.grad is not None}
    if sinks is not None:
        assert sinks.grad is not None
        grads["d_sinks"] = sinks.grad
    return {"out": out.detach(), **grads}


def check_attention(comm_type: str, dtype: torch.dtype, rtol: float) -> dict[str, Any]:
    axis = cp_axis()
    wrong: dict[str, Any] = {}
    for name, case in CASES.items():
        *leaves, grad = (x.to(dtype) for x in inputs(case))
        ours = partial(CONTEXT_ATTENTION[comm_type], axis=axis)
        shards = [split_context(x, axis) for x in leaves]
        found = run(ours, shards, split_context(grad, axis), case.call())
        assert {x.dtype for x in found.values()} == {dtype}
        *leaves, grad = (x.double() for x in inputs(case))
        expected = run(attention_reference, leaves, grad, case.call())
        if "d_sinks" in found:
            own, whole = found.pop("d_sinks").double(), expected.pop("d_sinks")
            torch.distributed.all_reduce(own)
            torch.testing.assert_close(own, whole, rtol=2 * rtol, atol=2 * rtol * float(whole.abs().max()))
        wrong[name] = differences(found, {key: split_context(x, axis) for key, x in expected.items()}, rtol=rtol)
    return {name: faults for name, faults in wrong.items() if faults}


@pytest.mark.parametrize("comm_type", CONTEXT_ATTENTION)
@pytest.mark.parametrize("size", [2, 4])
def test_output_and_all_gradients_equal_full_attention(ranks, size, comm_type):
    assert ranks(size, check_attention, comm_type, torch.float32, 1e-5) == [{}] * size
    assert ranks(size, check_attention, comm_type, torch.bfloat16, 2**-6) == [{}] * size


def check_flash(comm_type: str) -> dict[str, Any]:
    axis = cp_axis()
    core: Any = partial(kernels, FLASH) if comm_type == "p2p" else flash_attention
    wrong: dict[str, Any] = {}
    for name, case in CASES.items():
        if case.seen is None and not (case.rule.softcap or case.rule.slopes):
            *leaves, grad = (x.double() for x in inputs(case))
            expected = run(attention_reference, leaves, grad, case.call())
            ours = partial(CONTEXT_ATTENTION[comm_type], axis=axis, core=core)
            shards = [split_context(x, axis) for x in leaves]
            with flash_on_cpu():
                found = run(ours, shards, split_context(grad, axis), case.call())
            if "d_sinks" in found:
                torch.distributed.all_reduce(found["d_sinks"])
            truth = {key: x if key == "d_sinks" else split_context(x, axis) for key, x in expected.items()}
            wrong[name] = differences(found, truth, rtol=1e-6)
    return {name: faults for name, faults in wrong.items() if faults} or {"cases": len(wrong)}


def kernels(given: PartialKernels, *_: Any) -> PartialKernels:
    return given


@pytest.mark.parametrize("comm_type", CONTEXT_ATTENTION)
def test_flash_kernels_of_parts_merge_to_plain_attention(ranks, comm_type):
    """The flash operators by their definition: zigzag halves, groups, windows, sinks, and all gradients, to 1e-6."""
    assert ranks(4, check_flash, comm_type) == [{"cases": 8}] * 4


def check_a_long_sequence(comm_type: str, length: int) -> dict[str, Any]:
    """32k tokens of one sample, against torch's own attention in this process: the scores would take 8 GiB."""
    axis = cp_axis()
    generator = torch.Generator().manual_seed(2)
    *leaves, grad = (torch.randn(length, 1, 2, D, generator=generator) for _ in range(4))
    shards = [split_context(x, axis) for x in leaves]
    found = run(partial(CONTEXT_ATTENTION[comm_type], axis=axis), shards, split_context(grad, axis))

    def whole(q: Tensor, k: Tensor, v: Tensor, _: AttentionCall) -> Tensor:
        out = F.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True)
        return out.permute(2, 0, 1, 3)

    expected = {name: split_context(x, axis) for name, x in run(whole, leaves, grad).items()}
    return differences(found, expected, rtol=2e-5)


@pytest.mark.exhaustive
def test_a_ring_of_32k_tokens(ranks):
    assert ranks(2, check_a_long_sequence, "p2p", 32 * 1024) == [{}] * 2


def test_a_ring_of_odd_size(ranks):
    """Neither heads nor groups split over three ranks; a ring does not ask."""
    assert ranks(3, check_odd) == [{}] * 3


def check_odd() -> dict[str, str]:
    axis = cp_axis()
    *leaves, grad = (x.float() for x in inputs(Case(18, 4, 2)))
    expected = run(attention_reference, leaves, grad)
    found = run(
        partial(CONTEXT_ATTENTION["p2p"], axis=axis),
        [split_context(x, axis) for x in leaves],
        split_context(grad, axis),
    )
    return differences(found, {key: split_context(x, axis) for key, x in expected.items()})


def check_gather() -> None:
    axis = cp_axis()
    whole = torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(2))
    mine = split_context(whole, axis, 1).requires_grad_()
    gathered = gather_context(mine, axis, 1)
    assert torch.equal(gathered, whole)
    # Every rank goes on to make a loss of its own of the whole sequence.
    weights = [torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(10 + r)) for r in range(axis.size)]
    (gathered * weights[axis.rank]).sum().backward()
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad, split_context(torch.stack(weights).sum(0), axis, 1))


def test_a_gathered_sequence_is_in_order_and_sums_gradients(ranks):
    ranks(2, check_gather)
    ranks(3, check_gather)


def check_dropout(comm_type: str) -> list[float]:
    """With equal values every output is that value times the share of weights kept, over the chance to be kept."""
    axis = cp_axis()
    q, k = torch.randn(2, 64, 1, 4, 8, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(axis.rank)
    shards = (split_context(x, axis) for x in (q, k, torch.ones_like(k)))
    out = CONTEXT_ATTENTION[comm_type](*shards, AttentionCall(causal=False, dropout=0.25), axis)
    return out[..., 0].flatten().tolist()


@pytest.mark.parametrize("comm_type", ["a2a", "all_gather"])
def test_attention_weights_are_dropped_and_the_mean_is_kept(ranks, comm_type):
    first, second = ranks(2, check_dropout, comm_type)
    assert first != second
    for found in (torch.tensor(first), torch.tensor(second)):
        assert found.std().item() > 0.01
        assert found.mean().item() == pytest.approx(1.0, abs=0.05)


def check_refusal() -> None:
    x = torch.zeros(4, 1, 1, 2)
    with pytest.raises(ValueError, match="cannot drop weights: use cp_comm_type='a2a' or 'all_gather'"):
        CONTEXT_ATTENTION["p2p"](x, x, x, AttentionCall(causal=True, dropout=0.1), cp_axis())


def test_a_ring_refuses_dropout(ranks):
    ranks(2, check_refusal)
