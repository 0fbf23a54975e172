"""Attention of a decoder to the output of an encoder; heads are sharded over the tensor-parallel ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.recompute import run_part


class MemoryCache:
    """Keys and values of an encoder's output for one layer of a decoder, computed at the first token."""

    def __init__(self) -> None:
        self.held: tuple[Tensor, Tensor] | None = None


class CrossAttention(nn.Module):
    """Queries of one sequence, keys and values of another; each head has keys of its own.

    Keys and values come from one matrix, fused per head: ``[N, 2, D]`` rows, so that a rank's shard is a plain slice.

    Args:
        layer: number of the layer, by which layers may differ.
        sequence_parallel: True if both inputs and the output are sequence shards.
        recompute: plan of activation recomputation, for core attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh,
        *,
        layer: int = 0,
        sequence_parallel: bool,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__()
        inner, stds = config.num_attention_heads * config.head_dim, config.init_stds
        self.head_dim, self.dropout, self.rng = config.head_dim, config.attention_dropout, mesh.rng
        self.recompute, self.rule = recompute, config.score_rule(layer)
        self.attention = ops.choose("attention")
        how: dict[str, Any] = {"bias": config.add_bias_linear, "sequence_parallel": sequence_parallel}
        self.query = ColumnParallelLinear(config.hidden_size, inner, mesh, init_std=stds.qkv, **how)
        self.key_value = ColumnParallelLinear(config.hidden_size, 2 * inner, mesh, init_std=stds.qkv, **how)
        self.out = RowParallelLinear(inner, config.hidden_size, mesh, init_std=stds.out, **how)

    def forward(
        self, x: Tensor, memory: Tensor, key_mask: Tensor | None = None, cache: MemoryCache | None = None
    ) -> Tensor:
        """``[S, B, H], [T, B, H] -> [S, B, H]``, or shards of them.

        Args:
            x: input of the queries.
            memory: output of the encoder.
            key_mask: ``[B, T]`` of the whole memory, True for the keys that are seen; ``None`` for all.
            cache: keys and values of the memory, which the first call fills.
        """
        q = self.query(x).unflatten(-1, (-1, self.head_dim))  # [S, B, N/tp, D]
        k, v = self._keys_and_values(memory, cache)
        dropout = self.dropout if self.training else 0.0
        call = AttentionCall(causal=False, dropout=dropout, rule=self.rule, key_mask=key_mask)
        repeats = self.recompute.wraps("core_attn") and self.attention.recomputes(q, k, v, call)
        plan = NO_RECOMPUTE if repeats else self.recompute
        is_pure = not dropout  # nothing is communicated: every rank has the whole sequences
        core = run_part(plan, "core_attn", self._core, q, k, v, call, rng=self.rng, is_pure=is_pure)
        return self.out(core.flatten(2, 3))

    def _keys_and_values(self, memory: Tensor, cache: MemoryCache | None) -> tuple[Tensor, Tensor]:
        if cache is not None and cache.held is not None:
            return cache.held
        heads = self.key_value(memory).unflatten(-1, (-1, 2, self.head_dim))  # [T, B, N/tp, 2, D]
        k, v = heads.unbind(3)
        if cache is not None:
            cache.held = k, v
        return k, v

    def _core(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        with self.rng.tensor_parallel() if call.dropout else nullcontext():
            out: Tensor = self.attention.run(q, k, v, call)
            return out
