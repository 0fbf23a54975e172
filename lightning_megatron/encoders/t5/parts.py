"""Differences of T5's parts from those of the other models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.encoders.t5.config import T5Config
from lightning_megatron.encoders.t5.cross_attention import CrossAttention, MemoryCache
from lightning_megatron.layers.attention import KVCache, SelfAttention
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.layers.init import normal_
from lightning_megatron.layers.norm import model_norm
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.transformer import Block, Head
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.params import ParamSpec
from lightning_megatron.recompute import run_part


class Memory(NamedTuple):
    """Output of the encoder, as the decoder sees it.

    Attributes:
        hidden: ``[S, B, H]``, or this rank's shard of it.
        key_mask: ``[B, S]`` of the whole sequence, True for tokens; ``None`` where there is no padding.
    """

    hidden: Tensor
    key_mask: Tensor | None


class DecoderCache(NamedTuple):
    """Keys and values of one layer of the decoder: of the tokens decoded so far, and of the encoder's output."""

    own: KVCache
    memory: MemoryCache


def relative_buckets(distance: Tensor, buckets: int, most: int, *, both_sides: bool) -> Tensor:
    """Classes of distances: one for each small distance, then ranges that grow with it (T5, section 2.1).

    Args:
        distance: position of the key minus position of the query.
        buckets: number of classes.
        most: distance from which on all belong to one class.
        both_sides: True for separate classes of keys before and after the query; False if later keys are never seen.
    """
    if both_sides:
        buckets //= 2
        side, distance = (distance > 0).long() * buckets, distance.abs()
    else:
        side, distance = torch.zeros_like(distance), (-distance).clamp(min=0)
    exact = buckets // 2
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(most / exact)
    far = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    return side + torch.where(distance < exact, distance, far)


class RelativeBias(nn.Module):
    """Score for each head and class of distances between query and key; all layers of a stack share it.

    Args:
        both_sides: True in the encoder; False in the decoder, where keys after the query are hidden.
    """

    def __init__(self, config: T5Config, mesh: ParallelMesh, *, both_sides: bool) -> None:
        super().__init__()
        self.most, self.both_sides = config.relative_distance, both_sides
        self._shape = (config.num_attention_heads, config.relative_buckets)
        self.weight = nn.Parameter(torch.empty(self._shape[0] // mesh.tp.size, self._shape[1]))
        normal_(self.weight, self.param_specs()["weight"], mesh.shard_ranks, config.init_stds.qkv)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Each rank holds the scores of its heads."""
        return {"weight": ParamSpec(self._shape, tp_dim=0)}

    def forward(self, queries: range, keys: int, key_mask: Tensor | None = None) -> Tensor:
        """``[1 or B, N/tp, S, T]``: the biases of this rank's heads, the lowest number where a key is hidden.

        Args:
            queries: positions of the queries.
            keys: number of keys, which begin at position 0.
            key_mask: ``[B, T]``, True for keys that are seen; ``None`` for all.
        """
        device = self.weight.device
        positions = torch.arange(queries.start, queries.stop, device=device)[:, None]
        distance = torch.arange(keys, device=device) - positions  # [S, T]
        classes = relative_buckets(distance, self._shape[1], self.most, both_sides=self.both_sides)
        bias = F.embedding(classes, self.weight.t()).permute(2, 0, 1).unsqueeze(0)
        hidden = None if self.both_sides else distance > 0
        if key_mask is not None:
            unseen = ~key_mask[:, None, None, :]
            hidden = unseen if hidden is None else unseen | hidden
        if hidden is not None:
            bias = bias.masked_fill(hidden, torch.finfo(bias.dtype).min)
        return bias.contiguous()


class T5Block(Block):
    """Block of either stack; in the decoder, attention to the encoder's output follows that of its own tokens.

    Arguments as of :class:`Block`; the number of the layer determines its stack.
    """

    def __init__(
        self,
        config: T5Config,
        mesh: ParallelMesh,
        *,
        layer: int = 0,
        sequence_parallel: bool,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        how = {"sequence_parallel": sequence_parallel, "recompute": recompute, "ops": ops}
        super().__init__(config, mesh, layer=layer, **how)  # type: ignore[arg-type]
        assert isinstance(self.attention, SelfAttention)
        self._shrink_queries(self.attention.qkv.weight, 3, config.head_dim)
        self.cross_norm: nn.Module | None = None
        self.cross: CrossAttention | None = None
        if layer in config.stacks["decoder"]:
            self.cross_norm = model_norm(config, config.hidden_size, mesh, sequence_parallel, ops)
            self.cross = CrossAttention(config, mesh, layer=layer, **how)  # type: ignore[arg-type]
            self._shrink_queries(self.cross.query.weight, 1, config.head_dim)

    @staticmethod
    @torch.no_grad()
    def _shrink_queries(weight: Tensor, parts: int, head_dim: int) -> None:
        """Scale the initial weights of queries, the first part of each head: T5 does not scale query-key products."""
        weight.unflatten(0, (-1, parts, head_dim))[:, 0].mul_(head_dim**-0.5)

    def forward(  # type: ignore[override]  # documents are for decoders alone
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: KVCache | None = None,
        key_mask: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        memory: Memory | None = None,
        memory_cache: MemoryCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``[S, B, H] -> [S, B, H]``; other arguments, and the result, as of :class:`Block`.

        T5 has no rotary positions. ``bias`` is the result of :class:`RelativeBias` for the stack, which the mask of
        keys is part of; layers of the decoder get the memory, too.
        """
        plan = self.recompute if cache is None else NO_RECOMPUTE
        is_pure = self.attention.is_pure("attention")
        out = run_part(plan, "attention", self._attend_own, x, cache, bias, rng=self.rng, is_pure=is_pure)
        x = x + self.dropout(out)
        if memory is not None:
            out = run_part(
                plan, "attention", self._attend_memory, x, *memory, memory_cache, rng=self.rng, is_pure=is_pure
            )
            x = x + self.dropout(out)
        fed, _ = run_part(plan, "mlp", self._feed, x, rng=self.rng, is_pure=self.mlp.is_pure)
        return x + self.dropout(fed), None

    def _attend_own(self, x: Tensor, cache: KVCache | None, bias: Tensor | None) -> Tensor:
        out: Tensor = self.attention(self.attention_norm(x), None, cache, None, bias)
        return out

    def _attend_memory(self, x: Tensor, memory: Tensor, key_mask: Tensor | None, cache: MemoryCache | None) -> Tensor:
        assert self.cross_norm is not None
        assert self.cross is not None
        out: Tensor = self.cross(self.cross_norm(x), memory, key_mask, cache)
        return out


class StackEnd(nn.Module):
    """Norm and dropout after the last layer of the encoder; arguments as of :class:`Block`."""

    def __init__(self, config: T5Config, mesh: ParallelMesh, *, sequence_parallel: bool, ops: Ops) -> None:
        super().__init__()
        self.norm = model_norm(config, config.hidden_size, mesh, sequence_parallel, ops)
        self.dropout = Dropout(config.hidden_dropout, mesh, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """``[S, B, H] -> [S, B, H]``, or shards of it."""
        out: Tensor = self.dropout(self.norm(x))
        return out


class T5Head(Head):
    """Final norm, dropout and output layer of the decoder; the input of a tied output layer is divided by ``sqrt(H)``.

    Arguments as of :class:`Head`.
    """

    def __init__(self, config: T5Config, mesh: ParallelMesh, *, sequence_parallel: bool, ops: Ops = ANY_DEVICE) -> None:
        super().__init__(config, mesh, sequence_parallel=sequence_parallel, ops=ops)
        self.dropout = Dropout(config.hidden_dropout, mesh, sequence_parallel=sequence_parallel)
        self.scale = config.hidden_size**-0.5 if config.tie_embeddings else 1.0

    def _normed(self, hidden: Tensor) -> Tensor:
        return self.dropout(super()._normed(hidden)) * self.scale
