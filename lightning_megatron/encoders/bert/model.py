"""BERT (https://arxiv.org/abs/1810.04805): every token sees both sides; masked tokens and next sentences are predicted.

The residual stream is ``[S, B, H]``; callers see ``[B, S]``. Norms follow each sum, as published, or come before each
sub-layer, as in Megatron-LM's BERT.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm.collectives import copy_to_region, reduce_from_region
from lightning_megatron.context_parallel.inputs import shard_inputs
from lightning_megatron.encoders.bert.config import BertConfig
from lightning_megatron.encoders.bert.parts import BertEmbedding, BertHead, PostNormBlock
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.layers.cross_entropy import IGNORE_INDEX
from lightning_megatron.models.stages import Parts, StagedModel, in_own_dtype, mean_weights, one_for_none
from lightning_megatron.models.transformer import Block
from lightning_megatron.stage import StageLayers


class BertInputs(NamedTuple):
    """Inputs of BERT, each ``[B, S]``.

    Attributes:
        tokens: ids of the tokens.
        token_types: segment of each token; ``None`` for the first one.
        padding_mask: 1 or True for tokens, 0 for padding; ``None`` for no padding.
        position_ids: positions of the tokens; ``None`` for ``0 .. S-1``.
    """

    tokens: Tensor
    token_types: Tensor | None = None
    padding_mask: Tensor | None = None
    position_ids: Tensor | None = None


class BertLogits(NamedTuple):
    """Results of the two heads.

    Attributes:
        tokens: logits of each token, ``[B, S, V]``.
        next_sentence: logits ``[B, 2]`` of "the second segment follows the first" and "it does not"; ``None`` in a
            model without that head.
    """

    tokens: Tensor
    next_sentence: Tensor | None


class BertLosses(NamedTuple):
    """Losses of the two heads.

    Attributes:
        tokens: mean over the masked tokens; 0 if there are none.
        next_sentence: mean over the samples; ``None`` in a model without that head, or without its labels.
    """

    tokens: Tensor
    next_sentence: Tensor | None

    @property
    def total(self) -> Tensor:
        """Sum of the losses."""
        return self.tokens if self.next_sentence is None else self.tokens + self.next_sentence


class BertModel(StagedModel):
    """Embedding, blocks, heads; on a mesh of one rank the reference for all layouts.

    All context-parallel ranks are called with whole sequences. Arguments and errors as of :class:`StagedModel`.
    """

    config: BertConfig
    embedding: BertEmbedding | None
    head: BertHead | None

    def _classes(self) -> Parts:
        return Parts(BertEmbedding, PostNormBlock if self.config.norms_after else Block, BertHead)

    def forward(self, inputs: BertInputs) -> BertLogits:
        """Logits of both heads; on a stage that is not the last, the end of the step.

        Raises:
            ConfigError: for a sequence longer than the learned positions.
            RuntimeError: if the model is cut into stages and no schedule is running.
        """
        with in_own_dtype(self):
            encoded, head = self._encoded(inputs)
            logits = self._sharding.gather(head(encoded, self.tied_weight), inputs.tokens.shape[1])  # [S, B, V]
            follows = head.follows(encoded) if self.config.next_sentence else None
            return BertLogits(logits.transpose(0, 1), follows)

    def pooled(self, inputs: BertInputs) -> Tensor:
        """Pooled features ``[B, H]`` of the first token; on a stage that is not the last, the end of the step.

        All ranks that share a sequence must compute the same from them: each rank's gradient of the result is taken as
        the whole gradient, as in one process.

        Raises:
            ConfigError: for a sequence longer than the learned positions, or a model without a pooler.
        """
        with in_own_dtype(self):
            if not self.config.next_sentence:
                raise_if_any([Problem("next_sentence", False, "the model has no pooler without that head", (True,))])
            encoded, head = self._encoded(inputs)
            return head.pooled(encoded)

    def losses(
        self,
        inputs: BertInputs,
        labels: Tensor,
        loss_mask: Tensor | None = None,
        next_sentence_labels: Tensor | None = None,
    ) -> BertLosses:
        """Losses of both heads; on a stage that is not the last, the end of the step.

        Args:
            inputs: tokens, with their types, positions and padding.
            labels: ``[B, S]`` ids of masked tokens; -100 elsewhere.
            loss_mask: ``[B, S]``, weight of each token in the loss; ``None`` for 1.
            next_sentence_labels: ``[B]``, 0 where the second segment follows the first, else 1; -100 is ignored;
                ``None`` leaves that head out.
        """
        with in_own_dtype(self):
            encoded, head = self._encoded(inputs)
            own = self._own_labels(labels)  # [B, S/cp], as the weights
            weights = self._sharding.shard(mean_weights(labels, loss_mask), 1)
            part = head(encoded, self.tied_weight, labels=own.t(), token_weights=weights.t())
            tokens = reduce_from_region(copy_to_region(part, self._sharding.axis), self._sharding.axis)
            follows = None
            if self.config.next_sentence and next_sentence_labels is not None:
                answers = next_sentence_labels.flatten()
                scores = head.follows(encoded).float()
                sum_ = F.cross_entropy(scores, answers, ignore_index=IGNORE_INDEX, reduction="sum")
                follows = sum_ / one_for_none((answers != IGNORE_INDEX).sum())
            return BertLosses(tokens, follows)

    def _encoded(self, inputs: BertInputs) -> tuple[Tensor, BertHead]:
        """This rank's shard of the encoder's output, and the head; on an earlier stage, the end of the step."""
        stage, length = self._current_stage(), inputs.tokens.shape[1]
        longest = self.config.max_position_embeddings
        if length > longest:
            raise_if_any([Problem("seq_length", length, f"longer than max_position_embeddings={longest}", (longest,))])
        self._refresh()
        run = partial(self._run_group, key_mask=self._key_mask(inputs.tokens, inputs.padding_mask))
        hidden = self._stage_input(stage, inputs)
        for group in self.recompute.groups(stage.layers):
            hidden = self._planned(run, group)(hidden, group.layers)
        if not stage.has_loss:
            assert self._boundary is not None
            self._boundary.leave(hidden)
        assert self.head is not None
        return self.head.encoded(hidden), self.head

    def _stage_input(self, stage: StageLayers, inputs: BertInputs) -> Tensor:
        """Embedded tokens, or the activation that the previous stage has sent."""
        if not stage.has_embedding:
            return self._received()
        assert self.embedding is not None
        own, types = shard_inputs(inputs.tokens, inputs.position_ids, self._sharding), inputs.token_types
        types = None if types is None else self._sharding.shard(types, 1).t()
        embedded: Tensor = self.embedding(own.tokens, own.positions, types)
        return embedded

    def _run_group(self, hidden: Tensor, layers: Sequence[int], key_mask: Tensor | None) -> Tensor:
        for number in layers:
            hidden, _ = self.layers[str(number)](hidden, key_mask=key_mask)
        return hidden
