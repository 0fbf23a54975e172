"""A decoder-only language model: GPT and LLaMA by configuration.

GPT: LayerNorm, learned positions, GELU, biases, tied embeddings. LLaMA: RMSNorm, rotary positions, SwiGLU, grouped
queries, no biases. The residual stream is ``[S, B, H]``; callers see ``[B, S]`` and ``[B, S, V]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.config import ConfigError, Problem
from lightning_megatron.layers.attention import KVCache
from lightning_megatron.layers.cross_entropy import IGNORE_INDEX
from lightning_megatron.layers.init import draw_seed, seeded
from lightning_megatron.layers.rotary import RotaryEmbedding
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import Block, Embedding, Head


class GPTModel(nn.Module):
    """Embedding, blocks, head; on a mesh of one rank the reference for all layouts.

    Layers carry their global number, so that a parameter has one name on every layout.

    Args:
        config: the model's shape.
        mesh: the ranks; ``None`` for one process.
        layers: global numbers of the blocks to build; ``None`` for all.
        has_embedding: whether this part of the model begins with the embedding.
        has_head: whether it ends with the head.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh | None = None,
        *,
        layers: Sequence[int] | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
    ) -> None:
        super().__init__()
        mesh = mesh or ParallelMesh.single()
        self.config, self.axis = config, mesh.tp
        self.sequence_parallel = mesh.layout.uses_sequence_parallel
        base = draw_seed()
        numbers = range(config.num_layers) if layers is None else layers
        self.embedding: Embedding | None = None
        if has_embedding or (has_head and config.tie_embeddings):
            with seeded(base, 0):
                self.embedding = Embedding(config, mesh, sequence_parallel=self.sequence_parallel)
        self.layers = nn.ModuleDict()
        for number in numbers:
            with seeded(base, number + 1):
                self.layers[str(number)] = Block(config, mesh, sequence_parallel=self.sequence_parallel)
        self.head: Head | None = None
        if has_head:
            with seeded(base, config.num_layers + 1):
                self.head = Head(config, mesh, sequence_parallel=self.sequence_parallel)
        self.rotary: RotaryEmbedding | None = None
        if config.position_embedding == "rope":
            self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        caches: Sequence[KVCache] | None = None,
    ) -> Tensor:
        """Logits, or the loss where labels are given.

        Args:
            tokens: ``[B, S]``.
            labels: ``[B, S]``; -100 is ignored.
            loss_mask: ``[B, S]``, weight of each token in the loss; ``None`` for 1.
            position_ids: ``[B, S]``; ``None`` for ``0 .. S-1``.
            caches: one per layer, to decode with; grown by this call.

        Returns:
            ``[B, S, V]`` (``[B, 1, V]`` of the last token with caches), or the mean loss over tokens of weight 1.

        Raises:
            ConfigError: for a sequence longer than the learned positions.
        """
        assert self.embedding is not None
        length = tokens.shape[1]
        first = caches[0].length if caches else 0
        if self.embedding.position is not None and first + length > self.config.max_position_embeddings:
            reason = f"longer than max_position_embeddings={self.config.max_position_embeddings}"
            raise ConfigError([Problem("seq_length", first + length, reason)])
        tokens, labels, loss_mask, position_ids = self._padded(tokens, labels, loss_mask, position_ids)
        if position_ids is not None:
            positions = position_ids.t()
        else:
            positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
            positions[length:] = 0  # padding, which could lie beyond the learned positions
        hidden = self.decode(self.embedding(tokens.t(), positions), position_ids, first, tokens.shape[1], caches)
        for cache in caches or ():
            cache.truncate(first + length)
        if self.head is None:
            return hidden
        if labels is None:
            logits: Tensor = self.head(hidden, self.tied_weight, keep=slice(length - 1 if caches else 0, length))
            return logits.transpose(0, 1)
        return self.loss(hidden, labels, loss_mask)

    def decode(
        self,
        hidden: Tensor,
        position_ids: Tensor | None,
        first: int,
        length: int,
        caches: Sequence[KVCache] | None = None,
    ) -> Tensor:
        """Run this part's blocks on ``hidden`` ``[S, B, H]`` (a shard under sequence parallelism)."""
        rotary = self._angles(hidden, position_ids, first, length)
        for i, block in enumerate(self.layers.values()):
            hidden = block(hidden, rotary, caches[i] if caches else None)
        return hidden

    def loss(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None) -> Tensor:
        """Mean loss of ``hidden`` ``[S, B, H]`` against labels ``[B, S]``, weighted by the mask."""
        assert self.head is not None
        kept = labels != IGNORE_INDEX
        weights = kept.float() if loss_mask is None else loss_mask.float() * kept
        weights = weights / weights.sum().clamp_min(1.0)
        return self.head.loss(hidden, labels.t(), weights.t(), self.tied_weight)

    @property
    def tied_weight(self) -> Tensor | None:
        """The embedding's weight where the output layer shares it."""
        return self.embedding.word.weight if self.config.tie_embeddings and self.embedding is not None else None

    def _angles(
        self, hidden: Tensor, position_ids: Tensor | None, first: int, length: int
    ) -> tuple[Tensor, Tensor] | None:
        if self.rotary is None:
            return None
        if position_ids is not None:
            angles: tuple[Tensor, Tensor] = self.rotary(position_ids.t(), hidden.dtype)
            return angles
        cos, sin = self.rotary.first(first + length, hidden.device, hidden.dtype)
        return cos[first:], sin[first:]

    def _padded(
        self, tokens: Tensor, labels: Tensor | None, mask: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Lengthen a sequence that does not split over sequence-parallel ranks; causality keeps the rest untouched."""
        missing = -tokens.shape[1] % self.axis.size if self.sequence_parallel else 0
        if not missing:
            return tokens, labels, mask, positions

        def pad(x: Tensor | None, value: int) -> Tensor | None:
            return None if x is None else F.pad(x, (0, missing), value=value)

        return F.pad(tokens, (0, missing)), pad(labels, IGNORE_INDEX), pad(mask, 0), pad(positions, 0)
