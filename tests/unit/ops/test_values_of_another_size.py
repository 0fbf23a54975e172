"""Attention whose values have other numbers of features than keys, by every implementation, against the definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_megatron.config.score_rule import ScoreRule
from lightning_megatron.ops.attention import attention_cpu, attention_reference, attention_torch
from lightning_megatron.ops.blockwise_attention import blockwise_attention
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.cpu.attention_blocks import attention_blocks

KERNELS: dict[str, Callable[..., Tensor]] = {
    "torch": attention_torch,
    "cpu": attention_cpu,
    "blocks of queries": lambda q, k, v, call: attention_blocks(q, k, v, call.first_query),
    "block by block": blockwise_attention,
}


def results(attend: Callable[..., Tensor], shapes: list[tuple[int, ...]], call: AttentionCall) -> list[Tensor]:
    """Output and gradients."""
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    out = attend(*operands, call)
    out.backward(torch.randn(out.shape, generator=generator))
    return [out, *(operand.grad for operand in operands if operand.grad is not None)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("features", [4, 20])
@pytest.mark.parametrize("groups", [4, 1])
@pytest.mark.parametrize(("queries", "first"), [(48, 0), (40, 8), (1, 47)])
def test_every_implementation_equals_the_definition(
    kernel: str, features: int, groups: int, queries: int, first: int
) -> None:
    shapes = [(queries, 2, 4, 12), (48, 2, groups, 12), (48, 2, groups, features)]
    call = AttentionCall(causal=True, first_query=first)
    for found, expected in zip(
        results(KERNELS[kernel], shapes, call), results(attention_reference, shapes, call), strict=True
    ):
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [ScoreRule(scale=0.2), ScoreRule(window=7), ScoreRule(softcap=3.0)])
def test_rules_of_scores_too(rule: ScoreRule) -> None:
    shapes = [(33, 1, 4, 12), (33, 1, 2, 12), (33, 1, 2, 5)]
    for found, expected in zip(
        results(blockwise_attention, shapes, AttentionCall(causal=True, rule=rule)),
        results(attention_reference, shapes, AttentionCall(causal=True, rule=rule)),
        strict=True,
    ):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_scores_are_kept_for_the_backward(dtype: torch.dtype) -> None:
    """torch's fused kernel of a CPU takes values of the keys' size; others would have it keep all scores."""
    q, k = (torch.randn(64, 1, 2, 12, dtype=dtype, requires_grad=True) for _ in range(2))
    v, kept = torch.randn(64, 1, 2, 8, dtype=dtype, requires_grad=True), []

    def look(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(look, lambda x: x):
        attention_torch(q, k, v, AttentionCall(causal=True))
    assert max(kept) <= q.numel() < 64 * 64 * 2
