"""Parts of every model family: embedding, block, head."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm.collectives import (
    copy_to_region,
    gather_features,
    gather_sequence,
    join_sequence,
    local_shard,
)
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.layers.attention import KVCache, SelfAttention
from lightning_megatron.layers.cross_entropy import linear_cross_entropy, linear_token_losses
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.layers.embedding import VocabParallelEmbedding, padded_vocab_size
from lightning_megatron.layers.init import normal_
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import NORMS
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.moe.layer import MoELayer
from lightning_megatron.ops.matmul import linear
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.params import ParamSpec
from lightning_megatron.recompute import NO_RECOMPUTE, RecomputePlan


class Block(nn.Module):
    """One pre-norm transformer block.

    Args:
        config: shape of the model.
        mesh: mesh of the ranks.
        sequence_parallel: True if the residual stream is a sequence shard.
        has_experts: True if experts replace the feed-forward layer.
        recompute: plan of activation recomputation.
        ops: implementations of the ops.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh,
        *,
        sequence_parallel: bool,
        has_experts: bool = False,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__()
        self.rng = mesh.rng
        self.recompute = recompute
        norm = partial(NORMS[config.norm], config.hidden_size, mesh, eps=config.norm_epsilon, ops=ops)
        self.attention_norm = norm(sequence_parallel=sequence_parallel)
        self.attention = SelfAttention(config, mesh, sequence_parallel=sequence_parallel, recompute=recompute, ops=ops)
        self.mlp_norm = norm(sequence_parallel=sequence_parallel)
        self.mlp: MLP | MoELayer
        if has_experts:
            again = recompute.wraps("moe")
            self.mlp = MoELayer(config, mesh, sequence_parallel=sequence_parallel, recompute=again, ops=ops)
        else:
            self.mlp = MLP(
                config.hidden_size,
                config.ffn_hidden_size,
                mesh,
                activation=config.activation,
                bias=config.add_bias_linear,
                sequence_parallel=sequence_parallel,
                init_std=config.init_std,
                output_init_std=config.output_init_std,
            )
        self.dropout = Dropout(config.hidden_dropout, mesh, sequence_parallel=sequence_parallel)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``[S, B, H] -> [S, B, H]`` (``[S/tp, B, H]`` under sequence parallelism).

        Returns:
            The residual stream, and the auxiliary loss of its experts, if any.
        """
        plan = self.recompute if cache is None else NO_RECOMPUTE  # recomputation would append to the cache twice
        x = x + self.dropout(plan.run("attention", self._attend, x, rotary, cache, rng=self.rng))
        out, aux_loss = plan.run("mlp", self._feed, x, rng=self.rng)
        return x + self.dropout(out), aux_loss

    def _attend(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: KVCache | None) -> Tensor:
        out: Tensor = self.attention(self.attention_norm(x), rotary, cache)
        return out

    def _feed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out: Tensor | tuple[Tensor, Tensor | None] = self.mlp(self.mlp_norm(x))
        return out if isinstance(out, tuple) else (out, None)


class Embedding(nn.Module):
    """Token and, where the model learns them, position embeddings.

    Args:
        config: shape of the model.
        mesh: mesh of the ranks.
        sequence_parallel: True to return a sequence shard.
        only_for_head: True for the last stage's copy of the token embedding, which only the head uses.
    """

    def __init__(
        self, config: TransformerConfig, mesh: ParallelMesh, *, sequence_parallel: bool, only_for_head: bool = False
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = mesh.tp, sequence_parallel and mesh.tp.size > 1
        self.word = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            mesh,
            multiple=config.vocab_multiple,
            sequence_parallel=sequence_parallel,
            init_std=config.init_std,
            tied_copy=only_for_head,
        )
        self.position: nn.Parameter | None = None
        if config.position_embedding == "learned" and not only_for_head:
            self.position = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))
            normal_(self.position, self.param_specs()["position"], mesh.shard_ranks, config.init_std)
        self.dropout = Dropout(config.hidden_dropout, mesh, sequence_parallel=sequence_parallel)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Positions are whole on every rank; under sequence parallelism each rank looks up its shard's positions."""
        if self.position is None:
            return {}
        return {"position": ParamSpec(tuple(self.position.shape), grad_sum_over_tp=self.sequence_parallel)}

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens ``[S, B]`` at positions ``[S]`` or ``[S, B]`` to ``[S, B, H]`` (or this rank's shard of it)."""
        x = self.word(tokens)
        if self.position is not None:
            if self.sequence_parallel:
                positions = local_shard(positions, self.axis)
            rows = F.embedding(positions, self.position)
            x = x + (rows.unsqueeze(1) if positions.ndim == 1 else rows)
        out: Tensor = self.dropout(x)
        return out


class Head(nn.Module):
    """Final norm and output layer; in a model with tied embeddings the output weight is the embedding's.

    Args:
        config: shape of the model.
        mesh: mesh of the ranks.
        sequence_parallel: True if the input is a sequence shard.
        ops: implementations of the ops.
    """

    def __init__(
        self, config: TransformerConfig, mesh: ParallelMesh, *, sequence_parallel: bool, ops: Ops = ANY_DEVICE
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = mesh.tp, sequence_parallel and mesh.tp.size > 1
        self.vocab_size, self.label_smoothing = config.vocab_size, config.label_smoothing
        self._shape = (config.vocab_size, config.hidden_size)
        self.norm = NORMS[config.norm](
            config.hidden_size, mesh, eps=config.norm_epsilon, sequence_parallel=sequence_parallel, ops=ops
        )
        self.weight: nn.Parameter | None = None
        if not config.tie_embeddings:
            rows = padded_vocab_size(config.vocab_size, self.axis.size, config.vocab_multiple) // self.axis.size
            self.weight = nn.Parameter(torch.empty(rows, config.hidden_size))
            normal_(self.weight, self.param_specs()["weight"], mesh.shard_ranks, config.init_std)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """The weight is cut along the vocabulary, as the embedding is."""
        return {} if self.weight is None else {"weight": ParamSpec(self._shape, tp_dim=0)}

    def _weight(self, tied: Tensor | None) -> Tensor:
        weight = self.weight if tied is None else tied
        assert weight is not None
        return weight

    def _enter(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(hidden)
        return (gather_sequence if self.sequence_parallel else copy_to_region)(hidden, self.axis)

    def final(self, hidden: Tensor) -> Tensor:
        """``[S, B, H]`` after the final norm, whole and equal on all tensor-parallel ranks.

        All of them must compute the same from it: its gradient is taken as whole on each rank.

        Args:
            hidden: residual stream, or this rank's shard of it.
        """
        hidden = self.norm(hidden)
        return join_sequence(hidden, self.axis) if self.sequence_parallel else hidden

    def forward(
        self,
        hidden: Tensor,
        tied: Tensor | None = None,
        *,
        keep: slice = slice(None),
        labels: Tensor | None = None,
        token_weights: Tensor | None = None,
        is_final: bool = False,
    ) -> Tensor:
        """Logits ``[S, B, V]``, padding stripped; with labels the tokens' losses ``[S, B]``, with weights their sum.

        All are equal on all tensor-parallel ranks.

        Args:
            hidden: residual stream, or this rank's shard of it.
            tied: weight of the embedding, in a model with tied embeddings.
            keep: positions of the whole sequence for which to compute logits.
            labels: ``[S, B]``; -100 has no loss.
            token_weights: ``[S, B]``.
            is_final: True if ``hidden`` comes from :meth:`final`.
        """
        hidden = copy_to_region(hidden, self.axis) if is_final else self._enter(hidden)
        weight = self._weight(tied)
        if labels is None:
            logits = linear(hidden[keep], weight)  # [S, B, V/tp]
            return gather_features(logits, self.axis)[..., : self.vocab_size]
        smoothing = self.label_smoothing
        if token_weights is None:
            return linear_token_losses(hidden, weight, labels, self.axis, self.vocab_size, label_smoothing=smoothing)
        return linear_cross_entropy(
            hidden, weight, labels, token_weights, self.axis, self.vocab_size, label_smoothing=smoothing
        )
