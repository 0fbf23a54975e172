"""Context-parallel attention: the implementations of ``cp_comm_type``, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from lightning_megatron.context_parallel.allgather import gathered_attention
from lightning_megatron.context_parallel.ring import ring_attention
from lightning_megatron.context_parallel.ulysses import ulysses_attention
from lightning_megatron.mesh import Axis
from lightning_megatron.ops.attention import IN_PARTS, attention_in_parts
from lightning_megatron.ops.blockwise_attention import PARTS, kernels_of_parts
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.flash.kernel_order import order_in_words
from lightning_megatron.ops.implementation import Op, OpChoice
from lightning_megatron.ops.registry import Ops

CoreAttention = Callable[..., Any]


class ContextAttention(Protocol):
    """Attention of this rank's queries to the whole sequence.

    Args:
        q: ``[S/R, B, N, D]``, this rank's zigzag shard.
        k: ``[S/R, B, G, D]``.
        v: ``[S/R, B, G, V]``.
        call: attention to the whole sequence: every rank has the whole key mask, and sinks of all heads.
        axis: context-parallel ranks.
        core: attention on one rank; for ``p2p`` a function of the same arguments that returns the kernels of parts,
            since not every kernel returns the log-sum-exp that merging needs.

    Returns:
        ``[S/R, B, N, V]``.
    """

    def __call__(  # noqa: D102
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, axis: Axis, core: CoreAttention = ...
    ) -> Tensor: ...


CONTEXT_ATTENTION: Mapping[str, ContextAttention] = {
    "p2p": ring_attention,
    "all_gather": gathered_attention,
    "a2a": ulysses_attention,
}


def core_attention(ops: Ops, axis: Axis, cp_comm_type: str) -> OpChoice[Any]:
    """Choice of the attention op of one rank, for context-parallel ranks that communicate by ``cp_comm_type``.

    Raises:
        ConfigError: if a kernel of the device is required and this ``cp_comm_type`` cannot use it.
    """
    if axis.size == 1 or cp_comm_type == "a2a":
        choice, order = ops.choose("attention"), order_in_words(ops.device)
        return replace(choice, why=f"{choice.why}: {order}") if order else choice
    op: Op[Any] = PARTS if cp_comm_type == "p2p" else IN_PARTS
    if ops.device is None or ops.device in (each.device for each in op.implementations):
        choice = ops.choose(op)
    else:
        reason = f"cp_comm_type={cp_comm_type}: partial results are merged by their log-sum-exp"
        run = kernels_of_parts if op is PARTS else attention_in_parts
        choice = ops.custom("attention", "block by block", reason, run)
    # A ring saves only its inputs and output. An all-gather saves all keys, which recomputation would gather again.
    return replace(choice, candidates=((None, True),) if op is PARTS else ())
