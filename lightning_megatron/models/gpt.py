"""A decoder-only language model: GPT and LLaMA by configuration.

GPT: LayerNorm, learned positions, GELU, biases, tied embeddings. LLaMA: RMSNorm, rotary positions, SwiGLU, grouped
queries, no biases. The residual stream is ``[S, B, H]``; callers see ``[B, S]`` and ``[B, S, V]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm.collectives import copy_to_region, local_shard, reduce_from_region
from lightning_megatron.config.recompute_plan import NO_RECOMPUTE
from lightning_megatron.config.rope_scaling import DynamicScaling
from lightning_megatron.config.transformer import Rotary
from lightning_megatron.context_parallel.inputs import ShardedInputs, shard_inputs
from lightning_megatron.documents import Documents
from lightning_megatron.errors import Problem, multiples_around, raise_if_any
from lightning_megatron.layers.cross_entropy import IGNORE_INDEX
from lightning_megatron.layers.init import draw_seed, seeded
from lightning_megatron.layers.parts import Cache, Mixer
from lightning_megatron.layers.rotary import RotaryEmbedding
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.compiled import without_graphs
from lightning_megatron.models.multi_token import NextTokenModule, later
from lightning_megatron.models.stages import StagedModel, in_own_dtype, mean_weights, one_for_none, token_weights
from lightning_megatron.models.transformer import Block
from lightning_megatron.moe.aux_loss import attach_aux_loss
from lightning_megatron.moe.tokens import RoutedTokens, up_to_the_last
from lightning_megatron.ops.registry import Ops
from lightning_megatron.stage import BackwardScale, StageLayers

RotaryTables = Mapping[Rotary | None, tuple[Tensor, Tensor] | None]
"""Cosines and sines by the kind of rotary embedding."""


class GPTModel(StagedModel):
    """Embedding, blocks, head; on a mesh of one rank the reference for all layouts.

    All context-parallel ranks are called with whole sequences. Each takes its shard before the embedding, and the loss
    or the logits are those of all tokens, on every rank. Arguments and errors as of :class:`StagedModel`.

    Attributes:
        mtp: modules of the last stage that predict further tokens in training.
        mtp_losses: mean loss of each ``mtp`` module in the last training forward, before weighting.
        mtp_tokens: number of tokens of each of these means, by their weights.
    """

    def _add_parts(self, mesh: ParallelMesh, ops: Ops) -> None:
        config = self.config
        how: dict[str, Any] = {"sequence_parallel": self.sequence_parallel, "recompute": self.recompute, "ops": ops}
        self.mtp = nn.ModuleList()
        self.mtp_losses: tuple[Tensor, ...] = ()
        self.mtp_tokens: tuple[Tensor, ...] = ()
        base = draw_seed() if config.mtp_num_layers else 0  # on all stages, so that later draws agree
        for depth in range(config.mtp_num_layers if self.head is not None else 0):
            with seeded(base, depth):
                self.mtp.append(NextTokenModule(config, mesh, **how))
        self._rotary_of = {int(number): config.rotary(int(number)) for number in self.layers}
        self._mtp_rotary = config.rotary(config.num_layers - 1) if self.mtp else None
        kinds = dict.fromkeys((*self._rotary_of.values(), self._mtp_rotary))
        self._rotaries = {each: RotaryEmbedding(config.rotary_dim, *each) for each in kinds if each}

    @property
    def _mixers(self) -> list[Mixer]:
        """Mixers of this rank's layers, in their order."""
        return [block.attention for block in self.layers.values() if isinstance(block, Block)]

    def new_caches(self) -> list[Cache]:
        """Empty caches for decoding, one per layer."""
        return [mixer.new_cache() for mixer in self._mixers]

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        documents: Documents | None = None,
        per_token: bool = False,
    ) -> Tensor:
        """Logits, or with labels the loss; on a stage that is not the last, the end of the step.

        The losses of experts and, in training, of the ``mtp`` modules are in the gradients of the loss, but not in its
        value, which so stays comparable with a validation loss.

        Args:
            tokens: ``[B, S]``.
            labels: ``[B, S]``; -100 is ignored.
            loss_mask: ``[B, S]``, weight of each token in the loss; ``None`` for 1.
            position_ids: ``[B, S]``; ``None`` for ``0 .. S-1``, restarting in each document.
            caches: key/value caches for decoding, one per layer; this call appends to them.
            documents: documents; attention stays inside each. ``None`` for whole sequences. Padding between them visits
                no expert; ``labels`` and ``loss_mask`` decide if it counts in the loss.
            per_token: True if the caller multiplies the loss by its number of tokens, to add such sums. The losses of
                ``mtp`` modules are then divided by that number, too, and not by the smaller number of their own tokens.

        Returns:
            ``[B, S, V]`` (``[B, 1, V]`` of the last token with caches), or the mean loss over tokens of weight 1.

        Raises:
            ConfigError: for a sequence or document longer than the learned positions, caches on context-parallel ranks,
                or documents that would need different angles under dynamic scaling.
            RuntimeError: if the model is cut into stages and no schedule is running.
        """
        with in_own_dtype(self):
            position_ids = _places(position_ids, documents, tokens.device)
            if labels is None:
                # Decoding grows keys and values with every token: each length would compile another graph.
                with without_graphs(self.layers.values()) if caches else nullcontext():
                    return self._logits(tokens, position_ids, caches, documents)
            routed = self._routed(tokens, documents, kept_tokens(tokens, labels, loss_mask), gives_loss=True)
            hidden, aux_losses = self._stream(tokens, position_ids, caches, documents, routed)
            if not (self.mtp and self.training):
                return _with_aux_losses(self._mean_loss(hidden, labels, loss_mask), aux_losses)
            assert self.head is not None
            normed = self.head.norm(hidden)
            loss = self._mean_loss(normed, labels, loss_mask, is_normed=True)
            given = tokens, labels, loss_mask, position_ids, documents, routed, per_token
            return _with_aux_losses(loss, aux_losses + self._further_losses(normed, *given))

    def _further_losses(
        self,
        hidden: Tensor,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None,
        position_ids: Tensor | None,
        documents: Documents | None,
        routed: RoutedTokens | None,
        per_token: bool,
    ) -> list[Tensor]:
        """Losses of the modules that predict further tokens, weighted, and those of their experts.

        ``hidden`` is this rank's shard of ``[S, B, H]``, after the model's norm; the others are whole, ``[B, S]``.
        Predictions beyond the end of a document have no loss.
        """
        assert self.embedding is not None
        losses, counts, of_experts = [], [], []
        (group,) = self.recompute.groups((0,))
        for places, module in enumerate(self.mtp, 1):
            inputs = shard_inputs(later(tokens, places, 0, documents), position_ids, self._sharding)
            embedded = self.embedding(inputs.tokens, inputs.positions)
            table = self._rotary_tables(inputs, hidden)[self._mtp_rotary]
            hidden, aux = self._planned(module, group)(hidden, embedded, table, documents, routed)
            of_experts += aux
            mask = None if loss_mask is None else later(loss_mask, places, 0, documents)
            further = later(labels, places, IGNORE_INDEX, documents)
            losses.append(self._mean_loss(hidden, further, mask, is_normed=True))
            counts.append(token_weights(further, mask).sum())
        self.mtp_losses, self.mtp_tokens = tuple(loss.detach() for loss in losses), tuple(counts)
        means, weight = torch.stack(losses), self.config.mtp_loss_scaling_factor / len(losses)
        if per_token:
            means = means * torch.stack(counts) / one_for_none(token_weights(labels, loss_mask).sum())
        return [weight * means.sum(), *of_experts]

    def _logits(
        self,
        tokens: Tensor,
        position_ids: Tensor | None,
        caches: Sequence[Cache] | None,
        documents: Documents | None,
    ) -> Tensor:
        length = tokens.shape[1]
        routed = self._routed(tokens, documents)
        hidden, _ = self._stream(tokens, position_ids, caches, documents, routed)
        assert self.head is not None
        keep = slice(length - 1, length) if caches else slice(None)
        logits = self.head(hidden, self.tied_weight, keep=keep)  # [S/cp, B, V]
        return self._sharding.gather(logits, length).transpose(0, 1)

    def hidden(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        scale: BackwardScale | None = None,
        documents: Documents | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        """Hidden states before the output layer, whole on every rank; on an earlier stage, the end of the step.

        All ranks that share a sequence must compute the same from them: each rank's gradient of the result is taken as
        the whole gradient, as in one process.

        Args:
            tokens: ``[B, S]``.
            position_ids: ``[B, S]``; ``None`` for ``0 .. S-1``, restarting in each document.
            scale: factor of the caller's loss in backward, applied to the experts' losses too; ``None`` for 1.
            documents: documents; attention stays inside each. ``None`` for whole sequences.
            kept: bool ``[B, S]``, tokens that are no padding; routers count no later ones. ``None`` for all.

        Returns:
            ``[B, S, H]``, after the final norm.
        """
        with in_own_dtype(self):
            position_ids = _places(position_ids, documents, tokens.device)
            routed = self._routed(tokens, documents, kept)
            stream, aux_losses = self._stream(tokens, position_ids, None, documents, routed)
            assert self.head is not None
            whole = self._sharding.gather(self.head.final(stream), tokens.shape[1]).transpose(0, 1)  # [B, S, H]
            return _with_aux_losses(whole, aux_losses, scale or BackwardScale())

    def token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Losses of all tokens, ``[B, S]`` fp32, 0 where the label is -100; whole on every rank.

        Args:
            hidden: ``[B, S, H]``, result of :meth:`hidden`.
            labels: ``[B, S]``.
        """
        with in_own_dtype(self):
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
        with in_own_dtype(self):
            own = self._sharding.shard(hidden.transpose(0, 1), 0)  # [S/cp, B, H]
            return self._mean_loss(own, labels, loss_mask, is_final=True)

    def _stream(
        self,
        tokens: Tensor,
        position_ids: Tensor | None,
        caches: Sequence[Cache] | None,
        documents: Documents | None,
        routed: RoutedTokens | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """This rank's shard of the residual stream after the last block, and the losses of experts.

        On a stage that is not the last this ends the step instead.
        """
        self.mtp_losses = ()
        stage, length = self._current_stage(), tokens.shape[1]
        first = caches[0].length if caches else 0
        reach = first + length if documents is None else documents.longest
        raise_if_any(
            self._length_problems(length, reach, decodes=bool(caches))
            + self._document_problems(documents, decodes=bool(caches))
        )
        self._refresh()
        inputs = shard_inputs(tokens, position_ids, self._sharding, first)
        hidden = self._stage_input(stage, inputs)  # [S/cp, B, H], under sequence parallelism [S/(cp tp), B, H]
        tables = self._rotary_tables(inputs, hidden)
        plan = NO_RECOMPUTE if caches else self.recompute  # recomputation would append to the caches twice
        aux_losses: list[Tensor] = []
        for group in plan.groups(stage.layers):
            run = self._planned(self._run_group, group)
            hidden, aux = run(hidden, tables, group.layers, caches, documents, routed)
            aux_losses += aux
        for cache in caches or ():
            cache.truncate(first + length)
        if not stage.has_loss:
            assert self._boundary is not None
            self._boundary.leave(_with_aux_losses(hidden, aux_losses, self._boundary.loss_scale))
        return hidden, aux_losses

    def _routed(
        self, tokens: Tensor, documents: Documents | None, kept: Tensor | None = None, *, gives_loss: bool = False
    ) -> RoutedTokens | None:
        """This rank's tokens that visit experts, and those that routers count; ``None`` for all.

        Args:
            tokens: ``[B, S]``.
            documents: documents; padding between them visits no expert.
            kept: bool ``[B, S]``, tokens that are no padding; no later ones count. ``None`` for all.
            gives_loss: True if the caller gets nothing but the loss, so that what does not count need not be computed.
        """
        has_padding = documents is not None and documents.has_padding
        if not self.config.num_experts or (kept is None and not has_padding):
            return None
        ends = None if documents is None else documents.ends().to(tokens.device, non_blocking=True)
        present = torch.ones_like(tokens, dtype=torch.bool) if ends is None else ends > 0
        counted = present if kept is None else up_to_the_last(kept, ends)
        visiting = self._own_tokens(counted if gives_loss else present)
        return RoutedTokens(visiting, self._own_tokens(counted), counted.sum(1))

    def _own_tokens(self, x: Tensor) -> Tensor:
        """``[B, S]`` of all tokens to ``[S, B]`` of this rank's."""
        own = self._sharding.shard(x, 1).t()  # [S/cp, B]
        return local_shard(own, self.axis) if self.sequence_parallel else own

    def _document_problems(self, documents: Documents | None, *, decodes: bool) -> list[Problem]:
        """Faults of documents: combined with caches, or too long for angles that all documents share."""
        rule = self.config.rope_scaling
        if documents is None:
            return []
        if decodes:
            reason = "decoding with caches continues one document per row: pass only its tokens, as generate does"
            return [Problem("documents", "given", reason, (None,))]
        unable = {type(mixer).__name__ for mixer in self._mixers if not mixer.takes_documents}
        if unable:
            reason = f"{', '.join(sorted(unable))} would mix tokens of different documents: pass one document per row"
            return [Problem("documents", "given", reason, (None,))]
        if not isinstance(rule, DynamicScaling):
            return []
        known = rule.original_max_position_embeddings
        if documents.longest <= known:
            return []
        reason = (
            f"dynamic scaling needs slower angles for a document of more than {known} tokens than for the others of its"
            " sequence: make such a document a sample of its own, without document bounds"
        )
        return [Problem("longest document", documents.longest, reason, (known,))]

    def _length_problems(self, length: int, reach: int, *, decodes: bool) -> list[Problem]:
        """Faults of sequences of ``length`` tokens, whose last position is ``reach - 1``."""
        found, config, sharding = [], self.config, self._sharding
        if config.position_embedding == "learned" and reach > config.max_position_embeddings:
            reason = f"longer than max_position_embeddings={config.max_position_embeddings}"
            found.append(Problem("seq_length", reach, reason))
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
        return self._received()

    def _rotary_tables(self, inputs: ShardedInputs, hidden: Tensor) -> RotaryTables:
        """Cosines and sines ``[S/cp, 1 or B, 1, D]`` of this rank's positions, for each kind of layer."""
        return {None: None} | {kind: self._rotary_table(each, inputs, hidden) for kind, each in self._rotaries.items()}

    def _rotary_table(self, rotary: RotaryEmbedding, inputs: ShardedInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if inputs.span is None:
            own: tuple[Tensor, Tensor] = rotary(inputs.positions, hidden.dtype, inputs.everywhere)
            return own
        assert isinstance(inputs.everywhere, int)
        cos, sin = rotary.first(inputs.span.stop, hidden.device, hidden.dtype, inputs.everywhere)
        return self._sharding.shard(cos[inputs.span.start :], 0), self._sharding.shard(sin[inputs.span.start :], 0)

    def _run_group(
        self,
        hidden: Tensor,
        rotary: RotaryTables,
        layers: Sequence[int],
        caches: Sequence[Cache] | None,
        documents: Documents | None,
        routed: RoutedTokens | None,
    ) -> tuple[Tensor, list[Tensor]]:
        aux_losses = []
        for i, number in enumerate(layers):
            table = rotary[self._rotary_of[number]]
            more = {name: x for name, x in (("documents", documents), ("routed", routed)) if x is not None}
            hidden, aux_loss = self.layers[str(number)](hidden, table, caches[i] if caches else None, **more)
            if aux_loss is not None:
                aux_losses.append(aux_loss)
        return hidden, aux_losses

    def _mean_loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None,
        *,
        is_final: bool = False,
        is_normed: bool = False,
    ) -> Tensor:
        """Mean loss over the whole sequence, weighted by the mask; 0 if the mask keeps no token.

        Args:
            hidden: this rank's shard of ``[S, B, H]``.
            labels: ``[B, S]``, whole, as the mask.
            loss_mask: weight of each token; ``None`` for 1.
            is_final: True if the final norm has been applied and all tensor-parallel ranks hold the same.
            is_normed: True if a norm has been applied, to this rank's shard.
        """
        assert self.head is not None
        weights = mean_weights(labels, loss_mask)
        # Every rank has all labels, so it knows the weight of a token in the mean; only sums of losses are exchanged.
        labels, weights = self._own_labels(labels), self._sharding.shard(weights, 1)  # [B, S/cp]
        state = {"is_final": is_final, "is_normed": is_normed}
        part = self.head(hidden, self.tied_weight, labels=labels.t(), token_weights=weights.t(), **state)
        return reduce_from_region(copy_to_region(part, self._sharding.axis), self._sharding.axis)


def kept_tokens(tokens: Tensor, labels: Tensor | None, loss_mask: Tensor | None) -> Tensor | None:
    """Tokens that are no padding for sure, bool ``[B, S]``; ``None`` if nothing says it.

    The mask says it where there is one. Labels name the tokens that follow: a last one without a label is text, too.
    """
    if loss_mask is not None or labels is None:
        return None if loss_mask is None else loss_mask != 0
    kept = labels != IGNORE_INDEX
    return kept | F.pad(kept[:, :-1] & (tokens[:, 1:] == labels[:, :-1]), (1, 0))


def _places(position_ids: Tensor | None, documents: Documents | None, device: torch.device) -> Tensor | None:
    """The given positions, or those within each document; ``None`` for consecutive ones."""
    if position_ids is not None or documents is None:
        return position_ids
    return documents.positions().to(device, non_blocking=True)


def _with_aux_losses(carrier: Tensor, aux_losses: Sequence[Tensor], scale: BackwardScale | None = None) -> Tensor:
    """``carrier``, a loss or an activation before it, whose backward differentiates the losses of experts too.

    They are not part of the logged loss, which is the same in every layout and known on the last stage only.
    """
    return attach_aux_loss(carrier, torch.stack(list(aux_losses)).sum(), scale) if aux_losses else carrier
