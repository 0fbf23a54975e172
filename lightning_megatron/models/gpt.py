"""A decoder-only language model: GPT and LLaMA by configuration.

GPT: LayerNorm, learned positions, GELU, biases, tied embeddings. LLaMA: RMSNorm, rotary positions, SwiGLU, grouped
queries, no biases. The residual stream is ``[S, B, H]``; callers see ``[B, S]`` and ``[B, S, V]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm.collectives import copy_to_region, reduce_from_region
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.context_parallel.zigzag import gather_context, split_context
from lightning_megatron.errors import ConfigError, Problem, multiples_around, raise_if_any
from lightning_megatron.layers.attention import KVCache
from lightning_megatron.layers.cross_entropy import IGNORE_INDEX
from lightning_megatron.layers.fp8_linear import use_fp8
from lightning_megatron.layers.init import draw_seed, seeded
from lightning_megatron.layers.rotary import RotaryEmbedding
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.transformer import Block, Embedding, Head
from lightning_megatron.moe.aux_loss import attach
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.recompute import NO_RECOMPUTE, RecomputePlan, recomputed
from lightning_megatron.stage import BackwardScale


class ModelPart(Protocol):
    """What one pipeline stage builds; ``pipeline.partition.StageLayers`` is one."""

    # ruff: noqa: D102
    @property
    def stage(self) -> int: ...
    @property
    def layers(self) -> Sequence[int]: ...
    @property
    def has_embedding(self) -> bool: ...
    @property
    def has_loss(self) -> bool: ...


class Boundary(Protocol):
    """Where a call begins and ends on this stage; ``pipeline.boundary.StageBoundary`` is one."""

    stage: int | None
    hidden: Tensor | None
    loss_scale: BackwardScale

    def leave(self, hidden: Tensor) -> NoReturn: ...


@dataclass(frozen=True)
class _Whole:
    layers: range
    stage: int = 0
    has_embedding: bool = True
    has_loss: bool = True


class GPTModel(nn.Module):
    """Embedding, blocks, head; on a mesh of one rank the reference for all layouts.

    Layers carry their global number, so that a parameter has one name on every layout. Of a pipeline, this builds the
    parts of the stages on this rank, and a call runs the stage that the boundary names.

    Context-parallel ranks are all called with whole sequences. Each takes its part before the embedding, and the loss
    or the logits are again those of all tokens, on every rank.

    Args:
        config: the model's shape.
        mesh: the ranks; ``None`` for one process.
        parts: the stages on this rank; ``None`` for a model in one piece.
        boundary: of the pipeline; needed with parts.
        recompute: what is computed again for its gradients.
        ops: what its arithmetic is chosen from.

    Raises:
        ConfigError: if nothing like ``recompute`` can be done with this model on this mesh, or ``ops`` has no
            kernel that is required.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh | None = None,
        parts: Sequence[ModelPart] | None = None,
        boundary: Boundary | None = None,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__()
        mesh = mesh or ParallelMesh.single()
        raise_if_any(recompute.problems(mesh.layout, config) + ops.model_problems(mesh.layout, config))
        self.config, self.axis, self.context = config, mesh.tp, mesh.cp
        self.rng, self.recompute = mesh.rng, recompute
        self.sequence_parallel = mesh.layout.uses_sequence_parallel
        self._shard_saved_over = mesh.tp if recompute.shard_saved else None
        self._multiple = mesh.layout.sequence_multiple
        self._boundary = boundary
        whole = (_Whole(range(config.num_layers)),)
        self._parts: dict[int, ModelPart] = {part.stage: part for part in parts or whole}
        embeds = any(part.has_embedding for part in self._parts.values())
        predicts = any(part.has_loss for part in self._parts.values())
        base = draw_seed()
        self.embedding: Embedding | None = None
        if embeds or (predicts and config.tie_embeddings):
            with seeded(base, 0):
                self.embedding = Embedding(
                    config, mesh, sequence_parallel=self.sequence_parallel, only_for_head=not embeds
                )
        self.layers = nn.ModuleDict()
        for number in (number for part in self._parts.values() for number in part.layers):
            with seeded(base, number + 1):
                self.layers[str(number)] = Block(
                    config,
                    mesh,
                    sequence_parallel=self.sequence_parallel,
                    has_experts=config.has_experts(number),
                    recompute=recompute,
                    ops=ops,
                )
        blocks = {int(number): block for number, block in self.layers.items()}
        self.fp8 = use_fp8(blocks, config.num_layers, ops, mesh)
        self.head: Head | None = None
        if predicts:
            with seeded(base, config.num_layers + 1):
                self.head = Head(config, mesh, sequence_parallel=self.sequence_parallel, ops=ops)
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
        """Logits, or the loss where labels are given; on a stage that is not the last, the end of the step.

        Args:
            tokens: ``[B, S]``.
            labels: ``[B, S]``; -100 is ignored.
            loss_mask: ``[B, S]``, weight of each token in the loss; ``None`` for 1.
            position_ids: ``[B, S]``; ``None`` for ``0 .. S-1``.
            caches: one per layer, to decode with; grown by this call.

        Returns:
            ``[B, S, V]`` (``[B, 1, V]`` of the last token with caches), or the mean loss over tokens of weight 1.

        Raises:
            ConfigError: for a sequence longer than the learned positions, or caches on context-parallel ranks.
            RuntimeError: if the model is cut into stages and no schedule is running.
        """
        length = tokens.shape[1]
        hidden, aux_losses = self._stream(tokens, position_ids, caches)
        assert self.head is not None
        if labels is None:
            keep = slice(length - 1, length) if caches else slice(None)
            logits = gather_context(self.head(hidden, self.tied_weight, keep=keep), self.context)
            return logits[:length].transpose(0, 1)
        return _with_aux_losses(self._mean_loss(hidden, labels, loss_mask), aux_losses)

    def hidden(self, tokens: Tensor, position_ids: Tensor | None = None, scale: BackwardScale | None = None) -> Tensor:
        """Hidden states that the output layer sees, whole on every rank; on an earlier stage, the end of the step.

        All ranks that share a sequence are meant to compute the same of it: a gradient that comes back is taken for
        that of the whole, as it is in one process.

        Args:
            tokens: ``[B, S]``.
            position_ids: ``[B, S]``; ``None`` for ``0 .. S-1``.
            scale: what a loss made of the result is multiplied with before backward, for the losses of experts, which
                are differentiated with it; ``None`` for 1.

        Returns:
            ``[B, S, H]``, after the final norm.
        """
        stream, aux_losses = self._stream(tokens, position_ids, None)
        assert self.head is not None
        whole = gather_context(self.head.final(stream), self.context)[: tokens.shape[1]].transpose(0, 1)
        return _with_aux_losses(whole, aux_losses, scale or BackwardScale())

    def token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Losses of all tokens, ``[B, S]`` fp32, 0 where the label is -100; whole on every rank.

        Args:
            hidden: ``[B, S, H]``, what :meth:`hidden` gave.
            labels: ``[B, S]``.
        """
        assert self.head is not None
        length, own, labels = hidden.shape[1], self._own_tokens(hidden.transpose(0, 1), 0), self._own_labels(labels)
        losses = self.head(own, self.tied_weight, labels=labels.t(), is_final=True)
        return gather_context(losses, self.context)[:length].t()

    def mean_loss(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
        """Mean loss as of :meth:`forward`, of hidden states that are there already.

        Args:
            hidden: ``[B, S, H]``, what :meth:`hidden` gave.
            labels: ``[B, S]``.
            loss_mask: ``[B, S]``.
        """
        return self._mean_loss(self._own_tokens(hidden.transpose(0, 1), 0), labels, loss_mask, is_final=True)

    def _stream(
        self, tokens: Tensor, position_ids: Tensor | None, caches: Sequence[KVCache] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The residual stream behind the last block, this rank's part of it, and the losses of experts."""
        part = self._part()
        length = tokens.shape[1]
        first = caches[0].length if caches else 0
        if self.config.position_embedding == "learned" and first + length > self.config.max_position_embeddings:
            reason = f"longer than max_position_embeddings={self.config.max_position_embeddings}"
            raise ConfigError([Problem("seq_length", first + length, reason)])
        if caches and self.context.size > 1:
            reason = "decoding with caches needs every token on every rank: load the checkpoint with cp=1"
            raise ConfigError([Problem("cp", self.context.size, reason, (1,))])
        tokens, position_ids = self._padded(tokens, position_ids)
        if position_ids is not None:
            positions = position_ids.t()
        else:
            positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
            positions[length:] = 0  # padding, which could lie beyond the learned positions
        hidden = self._begin(part, split_context(tokens, self.context, 1), split_context(positions, self.context))
        rotary = self._angles(hidden, position_ids, first, tokens.shape[1])
        plan = NO_RECOMPUTE if caches else self.recompute  # caches would grow twice
        aux_losses: list[Tensor] = []
        for group in plan.groups(part.layers):
            inputs = hidden, rotary, group.layers, caches
            if group.recomputed:
                hidden, aux = recomputed(self._through, *inputs, rng=self.rng, shard_over=self._shard_saved_over)
            else:
                hidden, aux = self._through(*inputs)
            aux_losses += aux
        for cache in caches or ():
            cache.truncate(first + length)
        if not part.has_loss:
            assert self._boundary is not None
            self._boundary.leave(_with_aux_losses(hidden, aux_losses, self._boundary.loss_scale))
        return hidden, aux_losses

    def hidden_shape(self, tokens: Tensor) -> tuple[int, int, int]:
        """Shape of the activations between stages for ``tokens`` ``[B, S]``: ``[S, B, H]``, or a sequence shard."""
        batch, length = tokens.shape
        ranks = self.context.size * (self.axis.size if self.sequence_parallel else 1)
        return -(-length // self._multiple) * self._multiple // ranks, batch, self.config.hidden_size

    def _part(self) -> ModelPart:
        if self._boundary is None:
            return next(iter(self._parts.values()))
        if self._boundary.stage is None:
            raise RuntimeError("the model is cut into pipeline stages: call it inside a step of a Trainer")
        return self._parts[self._boundary.stage]

    def _begin(self, part: ModelPart, tokens: Tensor, positions: Tensor) -> Tensor:
        if part.has_embedding:
            assert self.embedding is not None
            embedded: Tensor = self.embedding(tokens.t(), positions)
            return embedded
        assert self._boundary is not None
        assert self._boundary.hidden is not None
        return self._boundary.hidden

    def _through(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        layers: Sequence[int],
        caches: Sequence[KVCache] | None,
    ) -> tuple[Tensor, list[Tensor]]:
        aux_losses = []
        for i, number in enumerate(layers):
            hidden, aux_loss = self.layers[str(number)](hidden, rotary, caches[i] if caches else None)
            if aux_loss is not None:
                aux_losses.append(aux_loss)
        return hidden, aux_losses

    def _mean_loss(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None, *, is_final: bool = False) -> Tensor:
        """Mean loss over the whole sequence, weighted by the mask; 0 where the mask keeps nothing.

        Args:
            hidden: ``[S, B, H]``, or this rank's part of it.
            labels: ``[B, S]``, whole.
            loss_mask: ``[B, S]``, whole.
            is_final: the final norm has been applied, and all tensor-parallel ranks hold the same.
        """
        assert self.head is not None
        kept = labels != IGNORE_INDEX
        weights = kept.float() if loss_mask is None else loss_mask.float() * kept
        total = weights.sum()
        weights = weights / torch.where(total == 0, 1.0, total)
        # Every rank has all labels, so it knows what a token weighs in the mean; only sums of losses are exchanged.
        labels, weights = self._own_labels(labels), self._own_tokens(weights, 1)
        part = self.head(hidden, self.tied_weight, labels=labels.t(), token_weights=weights.t(), is_final=is_final)
        return reduce_from_region(copy_to_region(part, self.context), self.context)

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
            mine = split_context(position_ids, self.context, 1)
            angles: tuple[Tensor, Tensor] = self.rotary(mine.t(), hidden.dtype)
            return angles
        cos, sin = self.rotary.first(first + length, hidden.device, hidden.dtype)
        return split_context(cos[first:], self.context), split_context(sin[first:], self.context)

    def _padded(self, tokens: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Lengthen a sequence that does not split over the ranks that share it; causality keeps the rest untouched."""
        missing = self._missing(tokens.shape[1])
        if not missing:
            return tokens, positions
        if self.config.num_experts and self.training and torch.is_grad_enabled():
            reason = f"padding to a multiple of {self._multiple} would be routed and counted like tokens"
            near = multiples_around(tokens.shape[1], self._multiple)
            raise ConfigError([Problem("seq_length", tokens.shape[1], reason, near)])
        return F.pad(tokens, (0, missing)), None if positions is None else F.pad(positions, (0, missing))

    def _missing(self, length: int) -> int:
        return -length % self._multiple

    def _own_tokens(self, x: Tensor, dim: int, value: float = 0) -> Tensor:
        """This context-parallel rank's tokens of what all of them hold, lengthened like the sequence."""
        if missing := self._missing(x.shape[dim]):
            x = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing), value=value)
        return split_context(x, self.context, dim)

    def _own_labels(self, labels: Tensor) -> Tensor:
        return self._own_tokens(labels, 1, IGNORE_INDEX)


def _with_aux_losses(carrier: Tensor, aux_losses: Sequence[Tensor], scale: BackwardScale | None = None) -> Tensor:
    """The loss, or an activation before it, whose backward differentiates the losses of experts too.

    They are no part of the loss that is shown: that one is the same on every layout, and known on the last stage only.
    """
    return attach(carrier, torch.stack(list(aux_losses)).sum(), scale) if aux_losses else carrier
