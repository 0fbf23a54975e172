"""Rotary position embedding (Su et al. 2021): channels are turned in pairs of halves, or in pairs of neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from simulated_hpu.ops.registry import define_op

BLOCKWISE, PAIRWISE = 0, 1


def _turn(x: Tensor, mode: int) -> Tensor:
    """``(a, b) -> (-b, a)`` of each pair."""
    if mode == BLOCKWISE:
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _angles(table: Tensor, position_ids: Tensor | None, x: Tensor) -> Tensor:
    if position_ids is not None:
        # [..., positions, D] of any rank, and ids [B, S] -> [B, 1, S, D]
        table = table.reshape(-1, table.shape[-1])[position_ids].unsqueeze(1)
    return table if torch.float32 in (x.dtype, table.dtype) else table.to(x.dtype)


def _check(offset: int) -> None:
    if offset != 0:
        raise NotImplementedError("rotary_pos_embedding is simulated for offset 0 only")


def _forward(input: Tensor, sin: Tensor, cos: Tensor, position_ids: Tensor | None, offset: int, mode: int) -> Tensor:
    _check(offset)
    return input * _angles(cos, position_ids, input) + _turn(input, mode) * _angles(sin, position_ids, input)


def _backward(grad_in: Tensor, sin: Tensor, cos: Tensor, position_ids: Tensor | None, offset: int, mode: int) -> Tensor:
    _check(offset)
    turned = _turn(grad_in * _angles(sin, position_ids, grad_in), mode)  # its transpose is its negative
    return grad_in * _angles(cos, position_ids, grad_in) - turned


def define() -> None:
    """Define forward and backward: the sine comes before the cosine."""
    rest = "Tensor sin, Tensor cos, Tensor? position_ids, int offset, int mode) -> Tensor"
    define_op(f"rotary_pos_embedding(Tensor input, {rest}", _forward)
    define_op(f"rotary_pos_embedding_backward(Tensor grad_in, {rest}", _backward)
