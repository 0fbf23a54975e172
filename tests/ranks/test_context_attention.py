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
from torch import Tensor

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.context_parallel.attention import CONTEXT_ATTENTION
from lightning_megatron.context_parallel.zigzag import gather_context, split_context
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.ops.attention import attention_reference
from lightning_megatron.testing.parity import differences

B, D = 2, 8


class Case(NamedTuple):
    length: int
    heads: int
    groups: int
    causal: bool = True


CASES = {
    "every head its own": Case(16, 8, 8),
    "groups": Case(24, 8, 4),
    "fewer groups than ranks": Case(16, 4, 1),
    "groups that do not split": Case(32, 24, 6),
    "not causal": Case(16, 8, 2, causal=False),
}


def cp_axis() -> Axis:
    size = torch.distributed.get_world_size()
    return ParallelMesh.create(ParallelLayout(cp=size), torch.device("cpu")).cp


def inputs(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(case.length, B, n, D) for n in (case.heads, case.groups, case.groups, case.heads)]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def run(op: Any, leaves: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = op(*leaves)
    out.backward(grad)
    grads = {f"d{name}": x.grad for name, x in zip("qkv", leaves, strict=True) if x.grad is not None}
    return {"out": out.detach(), **grads}


def check_attention(comm_type: str, dtype: torch.dtype, rtol: float) -> dict[str, Any]:
    axis = cp_axis()
    wrong: dict[str, Any] = {}
    for name, case in CASES.items():
        *leaves, grad = (x.to(dtype) for x in inputs(case))
        ours = partial(CONTEXT_ATTENTION[comm_type], axis=axis, causal=case.causal)
        shards = [split_context(x, axis) for x in leaves]
        found = run(ours, shards, split_context(grad, axis))
        assert {x.dtype for x in found.values()} == {dtype}
        *leaves, grad = (x.double() for x in inputs(case))
        expected = run(partial(attention_reference, causal=case.causal), leaves, grad)
        wrong[name] = differences(found, {key: split_context(x, axis) for key, x in expected.items()}, rtol=rtol)
    return {name: faults for name, faults in wrong.items() if faults}


@pytest.mark.parametrize("comm_type", CONTEXT_ATTENTION)
@pytest.mark.parametrize("size", [2, 4])
def test_output_and_all_gradients_equal_full_attention(ranks, size, comm_type):
    assert ranks(size, check_attention, comm_type, torch.float32, 1e-5) == [{}] * size
    assert ranks(size, check_attention, comm_type, torch.bfloat16, 2**-6) == [{}] * size


def test_a_ring_of_odd_size(ranks):
    """Neither heads nor groups split over three ranks; a ring does not ask."""
    assert ranks(3, check_odd) == [{}] * 3


def check_odd() -> dict[str, str]:
    axis = cp_axis()
    *leaves, grad = (x.float() for x in inputs(Case(18, 4, 2)))
    expected = run(partial(attention_reference, causal=True), leaves, grad)
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
    out = CONTEXT_ATTENTION[comm_type](*shards, axis, causal=False, dropout=0.25)
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
        CONTEXT_ATTENTION["p2p"](x, x, x, cp_axis(), dropout=0.1)


def test_a_ring_refuses_dropout(ranks):
    ranks(2, check_refusal)
