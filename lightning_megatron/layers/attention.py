"""Self-attention: heads are sharded over the tensor-parallel ranks, tokens over the context-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.context_parallel.attention import CONTEXT_ATTENTION, core_attention
from lightning_megatron.documents import Documents
from lightning_megatron.errors import Problem, divisors, nearest_to, raise_if_any
from lightning_megatron.layers.init import normal_
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.norm import RMSNorm, model_norm
from lightning_megatron.layers.parts import Mixer
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.attention import document_attention
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.params import ParamSpec
from lightning_megatron.recompute import run_part


class KVCache:
    """Keys and values of one layer for the tokens decoded so far; or the two tensors from which they are computed.

    Args:
        window: number of tokens that a token sees in this layer, itself included; 0 for all. Older ones are dropped.
    """

    def __init__(self, window: int = 0) -> None:
        self._window, self._forgotten = window, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def held(self) -> int:
        """Number of tokens in the cache."""
        return 0 if self._keys is None else self._keys.shape[0]

    @property
    def length(self) -> int:
        """Number of tokens decoded so far."""
        return self._forgotten + self.held

    @property
    def nbytes(self) -> int:
        """Memory of the tokens in the cache."""
        return sum(each.nbytes for each in (self._keys, self._values) if each is not None)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``[S, ...]`` to both tensors, and return both for all tokens in the cache."""
        self._keys = k if self._keys is None else torch.cat((self._keys, k))
        self._values = v if self._values is None else torch.cat((self._values, v))
        return self._keys, self._values

    def truncate(self, length: int) -> None:
        """Keep of the first ``length`` tokens those that the next token sees; appended tokens may end in padding."""
        if self._keys is None or self._values is None:
            return
        first = max(self._forgotten, length - self._window + 1) if self._window else 0
        kept = slice(first - self._forgotten, length - self._forgotten)
        self._keys, self._values, self._forgotten = self._keys[kept], self._values[kept], first


class HeadAttention(Mixer):
    """Attention of the heads on one rank; a subclass computes their queries, keys and values.

    Context-parallel ranks hold zigzag shards of the sequence (``context_parallel/zigzag.py``) and attend to all of it
    with the layout's ``cp_comm_type``.

    Args:
        layer: number of the layer, by which layers may differ.
        causal: True if a position sees only the positions before it and itself.
        recompute: plan of activation recomputation, for core attention.

    Raises:
        ConfigError: if the groups do not split over the tensor-parallel ranks, or the remaining heads do not split over
            the context-parallel ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh,
        *,
        layer: int = 0,
        causal: bool = True,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__()
        num_groups = config.num_query_groups
        found = mesh.layout.context_problems(config.num_attention_heads, config.attention_dropout)
        if num_groups % mesh.tp.size:
            reason = f"{num_groups} query groups (key/value heads) do not split over {mesh.tp.size} ranks"
            found.append(Problem("tp", mesh.tp.size, reason, nearest_to(mesh.tp.size, divisors(num_groups))))
        raise_if_any(found)
        self.causal, self.dropout, self.rng = causal, config.attention_dropout, mesh.rng
        self.recompute, self.rule = recompute, config.score_rule(layer).of_heads(mesh.tp.rank, mesh.tp.size)
        self._communicates = {"core_attn": mesh.cp.size > 1, "attention": mesh.cp.size > 1 or mesh.tp.size > 1}
        self.context, self.share_context = mesh.cp, CONTEXT_ATTENTION[mesh.layout.cp_comm_type]
        self.rope, self.attention = ops.choose("rope"), core_attention(ops, mesh.cp, mesh.layout.cp_comm_type)
        self.documents = self.attention.run  # a ring is given the kernels of parts, and finds the documents itself
        if mesh.cp.size == 1 or mesh.layout.cp_comm_type != "p2p":
            self.documents = document_attention(self.attention, ops.device, ops.mode("attention"))
        self.sinks: nn.Parameter | None = None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        first_query: int = 0,
        key_mask: Tensor | None = None,
        bias: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """``[S, B, N/tp, V]`` from queries ``[S, B, N/tp, D]``, keys ``[T, B, G/tp, D]``, values ``[T, B, G/tp, V]``.

        Args:
            q: queries.
            k: keys.
            v: values.
            first_query: position of the first query among the keys.
            key_mask: ``[B, T]``, True for the keys that are seen; ``None`` for all.
            bias: ``[1 or B, N/tp, S, T]``, added to the scores; ``None`` for none.
            documents: documents; attention stays inside each. ``None`` for whole sequences.
        """
        call = AttentionCall(
            causal=self.causal,
            dropout=self.dropout if self.training else 0.0,
            first_query=first_query,
            key_mask=key_mask,
            rule=self.rule,
            sinks=self.sinks,
            bias=bias,
            documents=documents,
        )
        # Recomputation around a kernel that itself recomputes its weights would save nothing.
        repeats = self.recompute.wraps("core_attn") and self.attention.recomputes(q, k, v, call)
        plan, is_pure = NO_RECOMPUTE if repeats else self.recompute, self.is_pure("core_attn")
        out: Tensor = run_part(plan, "core_attn", self._core, q, k, v, call, rng=self.rng, is_pure=is_pure)
        return out

    def new_cache(self) -> KVCache:
        """An empty cache for decoding."""
        return KVCache(self.rule.window)

    def is_pure(self, module: str) -> bool:
        """True if ``"core_attn"`` or the whole ``"attention"`` draws no random numbers and communicates nothing."""
        return not self._communicates[module] and not (self.dropout and self.training)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        core = self.attention.run if call.documents is None else self.documents
        with self.rng.tensor_parallel() if call.dropout else nullcontext():
            if self.context.size > 1:
                return self.share_context(q, k, v, call, self.context, core)
            out: Tensor = core(q, k, v, call)
            return out


class SelfAttention(HeadAttention):
    """Grouped-query attention.

    Queries, keys and values come from one matrix, fused per group: ``[G, N/G + 2, D]`` rows, i.e. the queries of a
    group, its key, its value. A tensor-parallel rank holds whole groups, so its shard is a plain slice. Fewer groups
    than ranks is refused: a replicated key would need its own gradient sum.

    Arguments and errors as of :class:`HeadAttention`; ``sequence_parallel`` is True if input and output are sequence
    shards.

    Attributes:
        query_parts: vectors of a head among the queries; a subclass with a gate for each query has two.
    """

    query_parts: ClassVar[int] = 1

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh,
        *,
        layer: int = 0,
        sequence_parallel: bool,
        causal: bool = True,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__(config, mesh, layer=layer, causal=causal, recompute=recompute, ops=ops)
        num_heads, num_groups = config.num_attention_heads, config.num_query_groups
        self.num_heads, self.head_dim, self.heads_per_group = num_heads, config.head_dim, num_heads // num_groups
        self.turned = config.rotary_dim
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            (self.query_parts * num_heads + 2 * num_groups) * config.head_dim,
            mesh,
            bias=config.has_qkv_bias,
            sequence_parallel=sequence_parallel,
            init_std=config.init_stds.qkv,
        )
        self.out = RowParallelLinear(
            num_heads * config.head_dim,
            config.hidden_size,
            mesh,
            bias=config.has_attention_out_bias,
            sequence_parallel=sequence_parallel,
            init_std=config.init_stds.out,
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:  # each rank norms its own heads, so the gradients of the weights are summed over tp
            self.q_norm, self.k_norm = (model_norm(config, config.head_dim, mesh, True, ops) for _ in range(2))
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(num_heads // mesh.tp.size))
            normal_(self.sinks, self.param_specs()["sinks"], mesh.shard_ranks, config.init_std)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Each rank holds the sinks of its heads."""
        return {} if self.sinks is None else {"sinks": ParamSpec((self.num_heads,), tp_dim=0, decay=False)}

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: KVCache | None = None,
        key_mask: Tensor | None = None,
        bias: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """``[S, B, H] -> [S, B, H]``, or shards of it.

        Args:
            rotary: cosines and sines of the positions, or ``None``.
            cache: keys and values of earlier tokens; this call appends to them.
            key_mask: ``[B, T]`` of the whole sequence, True for the keys that are seen; ``None`` for all.
            bias: ``[1 or B, N/tp, S, T]``, added to the scores of this rank's heads; ``None`` for none.
            documents: documents; attention stays inside each. ``None`` for whole sequences.
        """
        groups = self.qkv(x).unflatten(-1, (-1, self.heads_per_group + 2, self.head_dim))  # [S, B, G/tp, N/G + 2, D]
        # One split, not three slices: its backward is one concatenation.
        q, k, v = (part.flatten(2, 3) for part in groups.split((self.heads_per_group, 1, 1), dim=3))
        if self.q_norm is not None and self.k_norm is not None:
            # Copies: norms keep their inputs, and as views those would keep all of `groups`.
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        if rotary is not None:
            # A copy of the values: as a view they would keep the whole of `groups` alive until the backward.
            q, k, v = self._rotated(q, *rotary), self._rotated(k, *rotary), v.contiguous()
        first = 0
        if cache is not None:
            first = cache.held
            k, v = cache.extend(k, v)
        core = self.attend(q, k, v, first, key_mask, bias, documents)  # [S, B, N/tp, D]
        return self.out(core.flatten(2, 3))

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads ``[S, B, N, D]`` with the first features of each rotated, or all; a copy in either case."""
        if self.turned == self.head_dim:
            return self.rope.run(x, cos, sin)
        turned, rest = x.split((self.turned, self.head_dim - self.turned), dim=-1)
        return torch.cat((self.rope.run(turned, cos, sin), rest), dim=-1)
