"""Differences of BERT's parts from those of the other models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm.collectives import copy_to_region, local_shard, reduce_from_region
from lightning_megatron.config.recompute_plan import NO_RECOMPUTE
from lightning_megatron.encoders.bert.config import BertConfig
from lightning_megatron.layers.init import normal_
from lightning_megatron.layers.norm import model_norm
from lightning_megatron.layers.parts import Cache
from lightning_megatron.layers.whole_linear import WholeLinear
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.transformer import Block, Embedding, Head
from lightning_megatron.ops.activation import activation
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.params import ParamSpec
from lightning_megatron.recompute import run_part


class BertEmbedding(Embedding):
    """Sum of the embeddings of tokens, positions and token types; normed in a model whose norms follow the sums.

    Arguments as of :class:`Embedding`.
    """

    def __init__(
        self,
        config: BertConfig,
        mesh: ParallelMesh,
        *,
        sequence_parallel: bool,
        only_for_head: bool = False,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__(config, mesh, sequence_parallel=sequence_parallel, only_for_head=only_for_head, ops=ops)
        self.token_type: nn.Parameter | None = None
        if only_for_head:
            return
        if config.num_token_types:
            self.token_type = nn.Parameter(torch.empty(config.num_token_types, config.hidden_size))
            normal_(self.token_type, self.param_specs()["token_type"], mesh.shard_ranks, config.init_std)
        if config.norms_after:
            self.norm = model_norm(config, config.hidden_size, mesh, sequence_parallel, ops)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Positions and token types are whole on every rank, which looks up those of its shard."""
        own = self.named_parameters(recurse=False)
        return {name: ParamSpec(tuple(each.shape), grad_sum_over_tp=self.sequence_parallel) for name, each in own}

    def forward(self, tokens: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """Tokens ``[S, B]`` at positions ``[S]`` or ``[S, B]`` to ``[S, B, H]`` (or this rank's shard of it).

        Args:
            tokens: ids of the tokens.
            positions: positions of the tokens.
            token_types: segment of each token, ``[S, B]``; ``None`` for the first one.
        """
        x = self.word(tokens)
        assert self.position is not None
        if self.token_type is not None:
            types = torch.zeros_like(tokens) if token_types is None else token_types
            x = x + F.embedding(self._own(types), self.token_type)
        rows = F.embedding(self._own(positions), self.position)
        x = x + (rows.unsqueeze(1) if positions.ndim == 1 else rows)
        out: Tensor = self.dropout(x if self.norm is None else self.norm(x))
        return out

    def _own(self, ids: Tensor) -> Tensor:
        return local_shard(ids, self.axis) if self.sequence_parallel else ids


class PostNormBlock(Block):
    """Block whose norms follow the sums of each sub-layer with its input; arguments as of :class:`Block`."""

    def forward(  # type: ignore[override]  # documents are for decoders alone
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``[S, B, H] -> [S, B, H]``; arguments and result as of :class:`Block`."""
        plan = self.recompute if cache is None else NO_RECOMPUTE
        is_pure = self.attention.is_pure("attention")
        inputs = x, rotary, cache, key_mask
        out = run_part(plan, "attention", self.attention, *inputs, rng=self.rng, is_pure=is_pure)
        x = self.attention_norm(x + self.dropout(out))
        out = run_part(plan, "mlp", self.mlp, x, rng=self.rng, is_pure=self.mlp.is_pure)
        return self.mlp_norm(x + self.dropout(out)), None


class BertHead(Head):
    """Head of masked tokens, whose output weight is the embedding's, and head of the next sentence.

    Arguments as of :class:`Head`.
    """

    def __init__(
        self, config: BertConfig, mesh: ParallelMesh, *, sequence_parallel: bool, ops: Ops = ANY_DEVICE
    ) -> None:
        super().__init__(config, mesh, sequence_parallel=sequence_parallel, ops=ops)
        self.context = mesh.cp
        h, std = config.hidden_size, config.init_std
        self.bias = nn.Parameter(torch.zeros(self.rows))
        self.transform = WholeLinear(h, h, mesh, sequence_parallel=sequence_parallel, init_std=std)
        self.activation = activation(config.head_activation or config.activation).run
        self.encoder_norm: nn.Module = nn.Identity()
        if not config.norms_after:
            self.encoder_norm = model_norm(config, h, mesh, sequence_parallel, ops)
        self.pooler: WholeLinear | None = None
        self.next_sentence: WholeLinear | None = None
        if config.next_sentence:
            # The first token's features are whole on every rank.
            self.pooler = WholeLinear(h, h, mesh, sequence_parallel=False, init_std=std)
            self.next_sentence = WholeLinear(h, 2, mesh, sequence_parallel=False, init_std=std)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """The bias is cut along the vocabulary, as the weight is."""
        bias = ParamSpec((self.vocab_size,), tp_dim=0, decay=False, multiple=self.multiple)
        return {**super().param_specs(), "bias": bias}

    def encoded(self, hidden: Tensor) -> Tensor:
        """``[S, B, H]`` after the encoder's last norm, or this rank's shard of it."""
        out: Tensor = self.encoder_norm(hidden)
        return out

    def pooled(self, encoded: Tensor) -> Tensor:
        """Pooled features ``[B, H]`` of the first token from the result of :meth:`encoded`, equal on all ranks."""
        assert self.pooler is not None
        first = encoded[0]
        if self.sequence_parallel:  # the first rank's shard begins with the first token
            first = reduce_from_region(first * float(self.axis.rank == 0), self.axis)
        # Gradients are averaged over context-parallel ranks, of which only one has a gradient here.
        first = copy_to_region(first * float(self.context.rank == 0), self.context)
        first = reduce_from_region(first, self.context)
        return torch.tanh(self.pooler(first))

    def follows(self, encoded: Tensor) -> Tensor:
        """Logits ``[B, 2]`` from the result of :meth:`encoded`, equal on all ranks.

        The first says that the second segment follows the first one, the other that it does not.
        """
        assert self.next_sentence is not None
        out: Tensor = self.next_sentence(self.pooled(encoded))
        return out

    def _enter(self, hidden: Tensor) -> Tensor:
        return super()._enter(self.activation(self.transform(hidden)))
