"""Self-attention: heads are sharded over the tensor-parallel ranks, tokens over the context-parallel ranks."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.context_parallel.attention import CONTEXT_ATTENTION, core_attention
from lightning_megatron.errors import Problem, divisors, nearest_to, raise_if_any
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.recompute import NO_RECOMPUTE, RecomputePlan


class KVCache:
    """Keys and values of the tokens decoded so far, of one layer."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""
        return 0 if self._keys is None else self._keys.shape[0]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``[S, B, G, D]`` and return the keys and values of all tokens."""
        self._keys = k if self._keys is None else torch.cat((self._keys, k))
        self._values = v if self._values is None else torch.cat((self._values, v))
        return self._keys, self._values

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens only (the appended ones may end in padding)."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[:length], self._values[:length]


class SelfAttention(nn.Module):
    """Grouped-query attention.

    Queries, keys and values come from one matrix, fused per group: ``[G, N/G + 2, D]`` rows, i.e. the queries of a
    group, its key, its value. A tensor-parallel rank holds whole groups, so its shard is a plain slice. Fewer groups
    than ranks is refused: a replicated key would need its own gradient sum.

    Context-parallel ranks hold zigzag shards of the sequence (``context_parallel/zigzag.py``) and attend to all of it
    with the layout's ``cp_comm_type``.

    Args:
        config: shape of the model.
        mesh: mesh of the ranks.
        sequence_parallel: True if input and output are sequence shards.
        causal: True if a position sees only the positions before it and itself.
        recompute: plan of activation recomputation, for core attention.
        ops: implementations of the ops.

    Raises:
        ConfigError: if the groups do not split over the tensor-parallel ranks, or the remaining heads do not split over
            the context-parallel ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh,
        *,
        sequence_parallel: bool,
        causal: bool = True,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__()
        num_heads, num_groups = config.num_attention_heads, config.num_query_groups
        found = mesh.layout.context_problems(num_heads, config.attention_dropout)
        if num_groups % mesh.tp.size:
            reason = f"{num_groups} query groups (key/value heads) do not split over {mesh.tp.size} ranks"
            found.append(Problem("tp", mesh.tp.size, reason, nearest_to(mesh.tp.size, divisors(num_groups))))
        raise_if_any(found)
        self.head_dim, self.heads_per_group = config.head_dim, num_heads // num_groups
        self.causal, self.dropout, self.rng = causal, config.attention_dropout, mesh.rng
        self.recompute = recompute
        self.context, self.share_context = mesh.cp, CONTEXT_ATTENTION[mesh.layout.cp_comm_type]
        self.rope, self.attention = ops.choose("rope"), core_attention(ops, mesh.cp, mesh.layout.cp_comm_type)
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            (num_heads + 2 * num_groups) * config.head_dim,
            mesh,
            bias=config.add_bias_linear,
            sequence_parallel=sequence_parallel,
            init_std=config.init_std,
        )
        self.out = RowParallelLinear(
            num_heads * config.head_dim,
            config.hidden_size,
            mesh,
            bias=config.add_bias_linear,
            sequence_parallel=sequence_parallel,
            init_std=config.output_init_std,
        )

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, cache: KVCache | None = None) -> Tensor:
        """``[S, B, H] -> [S, B, H]``, or shards of it.

        Args:
            x: input.
            rotary: cosines and sines of the positions, or ``None``.
            cache: keys and values of earlier tokens; this call appends to them.
        """
        groups = self.qkv(x).unflatten(-1, (-1, self.heads_per_group + 2, self.head_dim))  # [S, B, G/tp, N/G + 2, D]
        # One split, not three slices: its backward is one concatenation.
        q, k, v = (part.flatten(2, 3) for part in groups.split((self.heads_per_group, 1, 1), dim=3))
        if rotary is not None:
            # A copy of the values: as a view they would keep the whole of `groups` alive until the backward.
            q, k, v = self.rope.run(q, *rotary), self.rope.run(k, *rotary), v.contiguous()
        first = 0
        if cache is not None:
            first = cache.length
            k, v = cache.extend(k, v)
        core = self.recompute.run("core_attn", self._core, q, k, v, first, rng=self.rng)  # [S, B, N/tp, D]
        return self.out(core.flatten(2, 3))

    def _core(self, q: Tensor, k: Tensor, v: Tensor, first_query: int) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        with self.rng.tensor_parallel() if dropout else nullcontext():
            if self.context.size > 1:
                core = self.attention.run
                return self.share_context(q, k, v, self.context, core, causal=self.causal, dropout=dropout)
            out: Tensor = self.attention.run(q, k, v, causal=self.causal, dropout=dropout, first_query=first_query)
            return out
