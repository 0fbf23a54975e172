"""Rotary embedding: the helpers have a gradient, the bare function has none."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor


class RotaryPosEmbeddingMode(Enum):
    """Pairs of channels that are rotated together: those of two halves, or neighbours."""

    BLOCKWISE = 0
    PAIRWISE = 1


_BLOCKWISE, _PAIRWISE = RotaryPosEmbeddingMode.BLOCKWISE.value, RotaryPosEmbeddingMode.PAIRWISE.value


class RotaryPosEmbeddingHelperV1(torch.autograd.Function):
    """``apply(p, cos, sin, offset)``."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, cos: Tensor, sin: Tensor, offset: int) -> Tensor:
        """Turn ``p``."""
        ctx.save_for_backward(cos, sin)
        ctx.offset = offset
        return torch.ops.hpu.rotary_pos_embedding(p, sin, cos, None, offset, _BLOCKWISE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Rotate the gradient back."""
        cos, sin = ctx.saved_tensors
        return (
            torch.ops.hpu.rotary_pos_embedding_backward(grad, sin, cos, None, ctx.offset, _BLOCKWISE), None, None, None
        )  # fmt: skip


class RotaryPosEmbeddingHelperV2(torch.autograd.Function):
    """``apply(p, cos, sin, position_ids)``: rows of the tables by position."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> Tensor:
        """Turn ``p``, ``[B, heads, S, D]``."""
        ctx.save_for_backward(cos, sin, position_ids)
        return torch.ops.hpu.rotary_pos_embedding(p, sin, cos, position_ids, 0, _BLOCKWISE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Rotate the gradient back."""
        cos, sin, position_ids = ctx.saved_tensors
        return (
            torch.ops.hpu.rotary_pos_embedding_backward(grad, sin, cos, position_ids, 0, _BLOCKWISE), None, None, None
        )  # fmt: skip


def _pairwise_tables(rope_cache: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[S, 1 or B, 1, channels]`` from a cache ``[positions, ..., channels / 2, 2]``."""
    cut = rope_cache[:length]
    cut = cut.reshape(length, -1, 1, cut.shape[-2], 2)
    return cut[..., 0].repeat_interleave(2, -1), cut[..., 1].repeat_interleave(2, -1)


class RotaryPosEmbeddingHelperV3(torch.autograd.Function):
    """``apply(p, rope_cache)``: rotates neighbours among the first channels of ``p [S, B, heads, D]``."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, rope_cache: Tensor) -> Tensor:
        """Turn the first channels of ``p``."""
        ctx.save_for_backward(rope_cache)
        return _turn_first(p, rope_cache, torch.ops.hpu.rotary_pos_embedding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Turn them back."""
        (rope_cache,) = ctx.saved_tensors
        return _turn_first(grad, rope_cache, torch.ops.hpu.rotary_pos_embedding_backward), None


def _turn_first(p: Tensor, rope_cache: Tensor, turn: Any) -> Tensor:
    cos, sin = _pairwise_tables(rope_cache, p.shape[0])
    first, rest = p.split((cos.shape[-1], p.shape[-1] - cos.shape[-1]), -1)
    return torch.cat((turn(first, sin, cos, None, 0, _PAIRWISE), rest), -1)


def apply_rotary_pos_emb(p: Tensor, *args: Any) -> Tensor:
    """Turn ``p`` without a gradient.

    Args:
        p: tensor to rotate.
        *args: ``cos, sin, position_ids=None, offset=0, mode=BLOCKWISE``, or ``rope_cache``.
    """
    if len(args) == 1:
        return _turn_first(p, args[0], torch.ops.hpu.rotary_pos_embedding)
    return _turn(p, *args)


def _turn(
    p: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
) -> Tensor:
    return torch.ops.hpu.rotary_pos_embedding(p, sin, cos, position_ids, offset, mode.value)
