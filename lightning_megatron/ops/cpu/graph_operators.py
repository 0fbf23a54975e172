"""Operators of torch for the graphs of ``torch.compile``, which run functions of this folder.

The compiler treats them as opaque. Otherwise it would unroll the loop of attention, and lower oneDNN's operator with a
copy of a transposed weight. This module is imported while a graph is traced: other programs need not wait for it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, library

from lightning_megatron.ops.cpu import attention_blocks as blocks
from lightning_megatron.ops.cpu.onednn import linear_onednn as linear_eager

attention_blocks = library.custom_op(
    "lightning_megatron::attention_blocks",
    blocks.forward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, int? first_query) -> Tensor",
)
"""Attention in blocks of queries."""

attention_blocks_backward = library.custom_op(
    "lightning_megatron::attention_blocks_backward",
    blocks.backward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor dy, Tensor q, Tensor k, Tensor v, int? first_query) -> (Tensor, Tensor, Tensor)",
)
"""Gradients of :data:`attention_blocks`; it has no gradient itself."""

linear_onednn = library.custom_op(
    "lightning_megatron::linear_onednn",
    linear_eager,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
)
"""``x W^T + b`` of fp32 operands by oneDNN; it has no gradient."""


@attention_blocks.register_fake
def _attention_blocks(q: Tensor, k: Tensor, v: Tensor, first_query: int | None) -> Tensor:
    return blocks.empty_result(q, k.shape[2], v.shape[3])


@attention_blocks_backward.register_fake
def _attention_blocks_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, first_query: int | None
) -> tuple[Tensor, ...]:
    return tuple(blocks.empty_result(x, k.shape[2]) for x in (q, k, v))


@linear_onednn.register_fake
def _linear_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int | None], output: Tensor) -> None:
    *operands, ctx.first_query = inputs
    ctx.save_for_backward(*operands)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v = ctx.saved_tensors
    return *attention_blocks_backward(dy, q, k, v, ctx.first_query), None


attention_blocks.register_autograd(_gradients, setup_context=_save)
