"""Memory of attention that is computed block by block, held against the largest tensor that the op itself makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.score_rule import ScoreRule
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.ops.blockwise_attention import attention_forward
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.memory.core_attention import core_of
from lightning_megatron.tools.planning.memory.shapes import ACCELERATOR, ADDING, HOST, Kernels, shapes_of

HEADS, FEATURES = 16, 64
LAYOUT = ParallelLayout().resolve(1)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operator gives."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.size = max(self.size, found.numel() * found.element_size())
        return found


def block_of_the_op(length: int) -> int:
    """Bytes of the largest block of scores, on tensors of an accelerator without memory."""
    q, k, v = (torch.empty(length, 1, HEADS, FEATURES, device="meta") for _ in range(3))
    with Largest() as largest:
        attention_forward(q, k, v, AttentionCall(causal=True, rule=ScoreRule(softcap=50.0)))
    return largest.size


def forward(kernels: Kernels, length: int, precision: str = "bf16-mixed", **rule: Any) -> int:
    """Most bytes of a forward of one layer's attention."""
    config = TransformerConfig(1, HEADS * FEATURES, HEADS, 256, length, position_embedding="rope", **rule)
    return core_of(shapes_of(PlannedJob(config, LAYOUT, length, 1, 1, precision=precision), kernels)).forward


@pytest.mark.parametrize("length", [1024, 8192])
def test_blocks_on_an_accelerator_are_those_of_the_op(length: int) -> None:
    """A sequence of 1,024 tokens has fewer scores than a block may have."""
    more = forward(ACCELERATOR, length, attention_softcap=50.0) - forward(HOST, length, attention_softcap=50.0)
    assert more == pytest.approx(3 * (block_of_the_op(length) - (4 << 20)), rel=0.02)


def test_a_flash_kernel_for_parts_needs_no_blocks() -> None:
    """It takes windows in 16 bits, and no soft caps."""
    window = {"sliding_window": 1024}
    assert forward(ADDING, 8192, **window) == forward(HOST, 8192, **window) < forward(ACCELERATOR, 8192, **window)
    assert forward(ADDING, 8192, "32-true", **window) == forward(ACCELERATOR, 8192, "32-true", **window)
    capped = {"attention_softcap": 50.0}
    assert forward(ADDING, 8192, **capped) == forward(ACCELERATOR, 8192, **capped)
