"""A decoder-only language model: GPT and LLaMA by configuration.

GPT: LayerNorm, learned positions, GELU, biases, tied embeddings. LLaMA: RMSNorm, rotary positions, SwiGLU, grouped
queries, no biases. The residual stream is ``[S, B, H]``; callers see ``[B, S]`` and ``[B, S, V]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_megatron.comm.collectives import copy_to_region, reduce_from_region
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.context_parallel.inputs import SequenceSharding, ShardedInputs, shard_inputs
from lightning_megatron.errors import Problem, multiples_around, raise_if_any
from lightning_megatron.layers.attention import KVCache
from lightning_megatron.layers.cross_entropy import IGNORE_INDEX
from lightning_megatron.layers.fp8_linear import use_fp8
from lightning_megatron.layers.init import draw_seed, seeded
from lightning_megatron.layers.rotary import RotaryEmbedding
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.transformer import Block, Embedding, Head
from lightning_megatron.moe.aux_loss import attach_aux_loss
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.recompute import NO_RECOMPUTE, RecomputePlan, recomputed
from lightning_megatron.stage import BackwardScale, StageBoundary, StageLayers


class GPTModel(nn.Module):
    """Embedding, blocks, head; on a mesh of one rank the reference for all layouts.

    Layers carry their global number, so a parameter has one name in every layout. In a pipeline the model holds the
    stages of this rank, and a call runs the stage that the boundary names.

    All context-parallel ranks are called with whole sequences. Each takes its shard before the embedding, and the loss
    or the logits are those of all tokens, on every rank.

    Args:
        config: shape of the model.
        mesh: mesh of the ranks; ``None`` for one process.
        parts: stages on this rank; ``None`` for a model in one piece.
        boundary: boundary of the pipeline's stages; needed with ``parts``.
        recompute: plan of activation recomputation.
        ops: implementations of the ops.

    Raises:
        ConfigError: if ``recompute`` does not fit this model or mesh, or ``ops`` requires a kernel that is missing.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh | None = None,
        parts: Sequence[StageLayers] | None = None,
        boundary: StageBoundary | None = None,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__()
        mesh = mesh or ParallelMesh.single()
        raise_if_any(recompute.problems(mesh.layout, config) + ops.model_problems(mesh.layout, config))
        self.config, self.axis = config, mesh.tp
        self.rng, self.recompute = mesh.rng, recompute
        self.sequence_parallel = mesh.layout.uses_sequence_parallel
        self._shard_saved_over = mesh.tp if recompute.shard_saved else None
        self._sharding = SequenceSharding(mesh.cp, mesh.layout.sequence_multiple)
        self._boundary = boundary
        self._parts = {part.stage: part for part in parts or (StageLayers.whole(config.num_layers),)}
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
        """Logits, or with labels the loss; on a stage that is not the last, the end of the step.

        Args:
            tokens: ``[B, S]``.
            labels: ``[B, S]``; -100 is ignored.
            loss_mask: ``[B, S]``, weight of each token in the loss; ``None`` for 1.
            position_ids: ``[B, S]``; ``None`` for ``0 .. S-1``.
            caches: key/value caches for decoding, one per layer; this call appends to them.

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
            logits = self.head(hidden, self.tied_weight, keep=keep)  # [S/cp, B, V]
            return self._sharding.gather(logits, length).transpose(0, 1)
        return _with_aux_losses(self._mean_loss(hidden, labels, loss_mask), aux_losses)

    def hidden(self, tokens: Tensor, position_ids: Tensor | None = None, scale: BackwardScale | None = None) -> Tensor:
        """Hidden states before the output layer, whole on every rank; on an earlier stage, the end of the step.

        All ranks that share a sequence must compute the same from them: the gradient of the result is taken as whole on
        each rank, as in one process.

        Args:
            tokens: ``[B, S]``.
            position_ids: ``[B, S]``; ``None`` for ``0 .. S-1``.
            scale: factor of the caller's loss in the backward pass, which the experts' losses take too; ``None`` for 1.

        Returns:
            ``[B, S, H]``, after the final norm.
        """
        stream, aux_losses = self._stream(tokens, position_ids, None)
        assert self.head is not None
        whole = self._sharding.gather(self.head.final(stream), tokens.shape[1]).transpose(0, 1)  # [B, S, H]
        return _with_aux_losses(whole, aux_losses, scale or BackwardScale())

    def token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Losses of all tokens, ``[B, S]`` fp32, 0 where the label is -100; whole on every rank.

        Args:
            hidden: ``[B, S, H]``, result of :meth:`hidden`.
            labels: ``[B, S]``.
        """
        assert self.head is not None
        own = self._sharding.shard(hidden.transpose(0, 1), 0)  # [S/cp, B, H]
        losses = self.head(own, self.tied_weight, labels=self._own_labels(labels).t(), is_final=True)
        return self._sharding.gather(losses, hidden.shape[1]).t()

    def mean_loss(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
        """Mean loss as of :meth:`forward`, computed from hidden states.

        Args:
            hidden: ``[B, S, H]``, result of :meth:`hidden`.
            labels: ``[B, S]``.
            loss_mask: ``[B, S]``.
        """
        own = self._sharding.shard(hidden.transpose(0, 1), 0)  # [S/cp, B, H]
        return self._mean_loss(own, labels, loss_mask, is_final=True)

    def _stream(
        self, tokens: Tensor, position_ids: Tensor | None, caches: Sequence[KVCache] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """This rank's shard of the residual stream after the last block, and the losses of experts.

        On a stage that is not the last this ends the step instead.
        """
        stage, length = self._current_stage(), tokens.shape[1]
        first = caches[0].length if caches else 0
        raise_if_any(self._length_problems(length, first, decodes=bool(caches)))
        inputs = shard_inputs(tokens, position_ids, self._sharding, first)
        hidden = self._stage_input(stage, inputs)  # [S/cp, B, H], under sequence parallelism [S/(cp tp), B, H]
        hidden, aux_losses = self._run_layers(stage.layers, hidden, self._rotary_table(inputs, hidden), caches)
        for cache in caches or ():
            cache.truncate(first + length)
        if not stage.has_loss:
            assert self._boundary is not None
            self._boundary.leave(_with_aux_losses(hidden, aux_losses, self._boundary.loss_scale))
        return hidden, aux_losses

    def hidden_shape(self, tokens: Tensor) -> tuple[int, int, int]:
        """Shape of the activations between stages for ``tokens`` ``[B, S]``: ``[S, B, H]``, or a sequence shard."""
        batch, length = tokens.shape
        ranks = self._sharding.axis.size * (self.axis.size if self.sequence_parallel else 1)
        return (length + self._sharding.padding(length)) // ranks, batch, self.config.hidden_size

    def _current_stage(self) -> StageLayers:
        if self._boundary is None:
            return next(iter(self._parts.values()))
        if self._boundary.stage is None:
            raise RuntimeError("the model is cut into pipeline stages: call it inside a step of a Trainer")
        return self._parts[self._boundary.stage]

    def _length_problems(self, length: int, first: int, *, decodes: bool) -> list[Problem]:
        """Faults of a sequence of ``length`` tokens that begins at position ``first``."""
        found, config, sharding = [], self.config, self._sharding
        if config.position_embedding == "learned" and first + length > config.max_position_embeddings:
            reason = f"longer than max_position_embeddings={config.max_position_embeddings}"
            found.append(Problem("seq_length", first + length, reason))
        if decodes and sharding.axis.size > 1:
            reason = "decoding with caches needs every token on every rank: load the checkpoint with cp=1"
            found.append(Problem("cp", sharding.axis.size, reason, (1,)))
        if sharding.padding(length) and config.num_experts and self.training and torch.is_grad_enabled():
            reason = f"padding to a multiple of {sharding.multiple} would be routed and counted like tokens"
            found.append(Problem("seq_length", length, reason, multiples_around(length, sharding.multiple)))
        return found

    def _stage_input(self, stage: StageLayers, inputs: ShardedInputs) -> Tensor:
        """Embedded tokens, or the activation that the previous stage has sent."""
        if stage.has_embedding:
            assert self.embedding is not None
            embedded: Tensor = self.embedding(inputs.tokens, inputs.positions)
            return embedded
        assert self._boundary is not None
        assert self._boundary.hidden is not None
        return self._boundary.hidden

    def _rotary_table(self, inputs: ShardedInputs, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines ``[S/cp, 1 or B, 1, D]`` of this rank's positions."""
        if self.rotary is None:
            return None
        if inputs.span is None:
            own: tuple[Tensor, Tensor] = self.rotary(inputs.positions, hidden.dtype)
            return own
        cos, sin = self.rotary.first(inputs.span.stop, hidden.device, hidden.dtype)
        return self._sharding.shard(cos[inputs.span.start :], 0), self._sharding.shard(sin[inputs.span.start :], 0)

    def _run_layers(
        self,
        layers: Sequence[int],
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        caches: Sequence[KVCache] | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The stage's layers, in the groups of the recomputation plan."""
        plan = NO_RECOMPUTE if caches else self.recompute  # recomputation would append to the caches twice
        aux_losses: list[Tensor] = []
        for group in plan.groups(layers):
            inputs = hidden, rotary, group.layers, caches
            if group.recomputed:
                hidden, aux = recomputed(self._run_group, *inputs, rng=self.rng, shard_over=self._shard_saved_over)
            else:
                hidden, aux = self._run_group(*inputs)
            aux_losses += aux
        return hidden, aux_losses

    def _run_group(
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
        """Mean loss over the whole sequence, weighted by the mask; 0 if the mask keeps no token.

        Args:
            hidden: this rank's shard of ``[S, B, H]``.
            labels: ``[B, S]``, whole.
            loss_mask: ``[B, S]``, whole.
            is_final: True if the final norm has been applied and all tensor-parallel ranks hold the same.
        """
        assert self.head is not None
        kept = labels != IGNORE_INDEX
        weights = kept.float() if loss_mask is None else loss_mask.float() * kept
        total = weights.sum()
        weights = weights / torch.where(total == 0, 1.0, total)
        # Every rank has all labels, so it knows the weight of a token in the mean; only sums of losses are exchanged.
        labels, weights = self._own_labels(labels), self._sharding.shard(weights, 1)  # [B, S/cp]
        part = self.head(hidden, self.tied_weight, labels=labels.t(), token_weights=weights.t(), is_final=is_final)
        return reduce_from_region(copy_to_region(part, self._sharding.axis), self._sharding.axis)

    @property
    def tied_weight(self) -> Tensor | None:
        """Weight of the embedding if the output layer shares it."""
        return self.embedding.word.weight if self.config.tie_embeddings and self.embedding is not None else None

    def _own_labels(self, labels: Tensor) -> Tensor:
        return self._sharding.shard(labels, 1, IGNORE_INDEX)


def _with_aux_losses(carrier: Tensor, aux_losses: Sequence[Tensor], scale: BackwardScale | None = None) -> Tensor:
    """The loss, or an activation before it, whose backward differentiates the losses of experts too.

    They are no part of the logged loss, which is the same in every layout and known on the last stage only.
    """
    return attach_aux_loss(carrier, torch.stack(list(aux_losses)).sum(), scale) if aux_losses else carrier
