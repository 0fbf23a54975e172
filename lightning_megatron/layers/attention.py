"""Self-attention whose heads are shared by the tensor-parallel ranks, and its tokens by the context-parallel ones."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from lightning_megatron.context_parallel.attention import CONTEXT_ATTENTION, core_attention
from lightning_megatron.errors import Problem, divisors, nearest_to, raise_if_any
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.recompute import NO_RECOMPUTE, RecomputePlan


class KVCache:
    """Keys and values of the tokens already decoded, for one layer. Grows as :meth:`extend` is called."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return 0 if self._keys is None else self._keys.shape[0]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``[S, B, G, D]`` and return everything held."""
        self._keys = k if self._keys is None else torch.cat((self._keys, k))
        self._values = v if self._values is None else torch.cat((self._values, v))
        return self._keys, self._values

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens (what was appended may have ended in padding)."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[:length], self._values[:length]


class SelfAttention(nn.Module):
    """Grouped-query attention.

    Queries, keys and values come from one matrix, fused per group: ``[G, N/G + 2, D]`` rows, i.e. the queries of a
    group, its key, its value. A tensor-parallel rank holds whole groups, so its shard is a plain slice. Fewer groups
    than ranks is refused: a replicated key would need its own gradient sum.

    Context-parallel ranks hold zigzag shards of the sequence (``context.split``) and attend to all of it in the way
    that the layout's ``cp_comm_type`` says.

    Args:
        hidden_size: features ``H``.
        num_heads: query heads ``N`` over all ranks.
        num_groups: key/value heads ``G`` over all ranks.
        head_dim: ``D``.
        mesh: the ranks.
        bias: whether the projections have biases.
        sequence_parallel: input and output are sequence shards.
        causal: whether a position sees only what precedes it.
        dropout: probability of dropping an attention weight.
        recompute: whether core attention is computed again for its gradients.
        ops: what its arithmetic is chosen from.
        init_std: standard deviation of the initial qkv weight.
        output_init_std: the same for the output projection.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ConfigError: if the groups do not split over the tensor-parallel ranks, or the context-parallel ranks cannot
            share the heads that are left.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_groups: int,
        head_dim: int,
        mesh: ParallelMesh,
        *,
        bias: bool,
        sequence_parallel: bool,
        causal: bool = True,
        dropout: float = 0.0,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
        init_std: float,
        output_init_std: float,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        found = mesh.layout.context_problems(num_heads, dropout)
        if num_groups % mesh.tp.size:
            reason = f"{num_groups} query groups (key/value heads) do not split over {mesh.tp.size} ranks"
            found.append(Problem("tp", mesh.tp.size, reason, nearest_to(mesh.tp.size, divisors(num_groups))))
        raise_if_any(found)
        self.head_dim, self.heads_per_group = head_dim, num_heads // num_groups
        self.causal, self.dropout, self.rng = causal, dropout, mesh.rng
        self.recompute = recompute
        self.context, self.share_context = mesh.cp, CONTEXT_ATTENTION[mesh.layout.cp_comm_type]
        self.rope, self.attention = ops.choose("rope"), core_attention(ops, mesh.cp, mesh.layout.cp_comm_type)
        self.qkv = ColumnParallelLinear(
            hidden_size,
            (num_heads + 2 * num_groups) * head_dim,
            mesh,
            bias=bias,
            sequence_parallel=sequence_parallel,
            init_std=init_std,
            dtype=dtype,
            device=device,
        )
        self.out = RowParallelLinear(
            num_heads * head_dim,
            hidden_size,
            mesh,
            bias=bias,
            sequence_parallel=sequence_parallel,
            init_std=output_init_std,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, cache: KVCache | None = None) -> Tensor:
        """``[S, B, H] -> [S, B, H]``, or shards of it.

        Args:
            x: the input.
            rotary: cosines and sines of the positions, or ``None``.
            cache: keys and values of earlier tokens, which this call extends.
        """
        groups = self.qkv(x).unflatten(-1, (-1, self.heads_per_group + 2, self.head_dim))
        # One split, not three slices: its backward is one concatenation.
        q, k, v = (part.flatten(2, 3) for part in groups.split((self.heads_per_group, 1, 1), dim=3))
        if rotary is not None:
            # A copy of the values, or the little that they are of `groups` keeps all of it alive for the backward.
            q, k, v = self.rope.run(q, *rotary), self.rope.run(k, *rotary), v.contiguous()
        first = 0
        if cache is not None:
            first = cache.length
            k, v = cache.extend(k, v)
        core = self.recompute.run("core_attn", self._core, q, k, v, first, rng=self.rng)
        return self.out(core.flatten(2, 3))

    def _core(self, q: Tensor, k: Tensor, v: Tensor, first_query: int) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        with self.rng.tensor_parallel() if dropout else nullcontext():
            if self.context.size > 1:
                core = self.attention.run
                return self.share_context(q, k, v, self.context, core, causal=self.causal, dropout=dropout)
            out: Tensor = self.attention.run(q, k, v, causal=self.causal, dropout=dropout, first_query=first_query)
            return out
