"""Operators of one layer's attention, counted on tensors without memory: on an accelerator each starts a kernel.

A kernel that takes less time than its start (about 5 us) leaves the device idle. The bounds are those of the heads of
LLaMA 3.1 8B, 32,768 tokens, and one of eight context-parallel ranks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aten_operators import Kernels
from torch import Tensor

from lightning_megatron.context_parallel import ring
from lightning_megatron.mesh import Axis
from lightning_megatron.ops.blockwise_attention import FLASH
from lightning_megatron.ops.core.attention_call import AttentionCall

TOKENS, RANKS, HEADS, GROUPS, FEATURES = 32_768, 8, 32, 8, 128


def layer() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a rank, in bf16."""
    shapes = ((TOKENS // RANKS, 1, heads, FEATURES) for heads in (HEADS, GROUPS, GROUPS))
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes)
    return q, k, v


def operators(monkeypatch: pytest.MonkeyPatch, rank: int, **how: Any) -> tuple[int, int]:
    """Operators of a ring's forward and backward on one of its ranks, without messages."""
    monkeypatch.setattr(ring, "start_rotation", lambda x, axis: SimpleNamespace(wait=lambda: torch.empty_like(x)))
    with Kernels() as forward:
        out = ring.ring_attention(*layer(), AttentionCall(causal=True), Axis("cp", RANKS, rank), **how)
    grad = torch.empty_like(out)
    with Kernels() as backward:
        out.backward(grad)
    return forward.found.total(), backward.found.total()


@pytest.mark.parametrize("rank", [0, RANKS // 2, RANKS - 1])
def test_blocks_of_a_ring_are_large_where_each_operator_starts_a_kernel(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Blocks that fit a processor's caches took 36,184 operators forward, and 52,344 backward."""
    forward, backward = operators(monkeypatch, rank)
    assert forward <= 700
    assert backward <= 1_000


@pytest.mark.parametrize("rank", [0, RANKS // 2, RANKS - 1])
def test_a_ring_of_flash_kernels_starts_few_more_than_these(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Eight kernels each way are attention itself; the others merge outputs and add gradients."""
    forward, backward = operators(monkeypatch, rank, core=lambda *_: FLASH)
    assert forward <= 60
    assert backward <= 100
