"""Parts that all model families share: embedding, block, head."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

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
from lightning_megatron.config.counts import padded_vocab_size
from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.documents import Documents
from lightning_megatron.layers.cross_entropy import linear_cross_entropy, linear_token_losses
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.init import normal_
from lightning_megatron.layers.norm import model_norm
from lightning_megatron.layers.parts import Cache, FeedForward, Mixer, part_class
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.compiled import CompilablePart
from lightning_megatron.moe.tokens import RoutedTokens
from lightning_megatron.ops.matmul import linear
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.params import ParamSpec
from lightning_megatron.recompute import run_part


class Block(CompilablePart):
    """One transformer block: norms before attention and the feed-forward layer, and where configured after them.

    Args:
        layer: number of the layer, since layers may differ.
        sequence_parallel: True if the residual stream is a sequence shard.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh,
        *,
        layer: int = 0,
        sequence_parallel: bool,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__()
        self.rng = mesh.rng
        self.recompute = recompute
        spec = config.layer_spec(layer)
        how: dict[str, Any] = {"sequence_parallel": sequence_parallel, "recompute": recompute, "ops": ops}
        norm = partial(model_norm, config, config.hidden_size, mesh, sequence_parallel, ops)
        self.attention_norm = norm()
        self.attention: Mixer = part_class(spec.mixer)(config, mesh, layer=layer, causal=config.is_causal, **how)
        self.attention_post_norm = norm() if config.post_norms else nn.Identity()
        self.mlp_norm = norm()
        self.mlp: FeedForward = part_class(spec.feed_forward)(config, mesh, layer=layer, **how)
        self.mlp_post_norm = norm() if config.post_norms else nn.Identity()
        self.dropout = Dropout(config.hidden_dropout, mesh, sequence_parallel=sequence_parallel)

    def run_context(self) -> AbstractContextManager[Any]:
        """The feed-forward part decides the context of a compiled call."""
        return self.mlp.run_context()

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        key_mask: Tensor | None = None,
        documents: Documents | None = None,
        routed: RoutedTokens | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``[S, B, H] -> [S, B, H]`` (``[S/tp, B, H]`` under sequence parallelism).

        Args:
            x: residual stream.
            rotary: cosines and sines of the positions.
            cache: keys and values of earlier tokens.
            key_mask: ``[B, T]``, True for the tokens that are seen; ``None`` for all.
            documents: documents; attention stays inside each. ``None`` for whole sequences.
            routed: tokens that routers send to experts, and count; ``None`` for all.

        Returns:
            The residual stream, and the auxiliary loss of its experts, if any.
        """
        plan = self.recompute if cache is None else NO_RECOMPUTE  # recomputation would append to the cache twice
        is_pure = self.attention.is_pure("attention")
        inputs = x, rotary, cache, key_mask, documents
        x = x + self.dropout(run_part(plan, "attention", self._attend, *inputs, rng=self.rng, is_pure=is_pure))
        out, aux_loss = run_part(plan, "mlp", self._feed, x, routed, rng=self.rng, is_pure=self.mlp.is_pure)
        return x + self.dropout(out), aux_loss

    def _attend(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        cache: Cache | None,
        key_mask: Tensor | None,
        documents: Documents | None,
    ) -> Tensor:
        attended = self.attention(self.attention_norm(x), rotary, cache, key_mask, documents=documents)
        out: Tensor = self.attention_post_norm(attended)
        return out

    def _feed(self, x: Tensor, routed: RoutedTokens | None = None) -> tuple[Tensor, Tensor | None]:
        h = self.mlp_norm(x)
        found = self.mlp(h) if routed is None else self.mlp(h, routed)
        out, aux_loss = found if isinstance(found, tuple) else (found, None)
        return self.mlp_post_norm(out), aux_loss


class Embedding(CompilablePart):
    """Token embedding, the norm behind it in models that have one, and position embeddings where they are learned.

    Args:
        sequence_parallel: True to return a sequence shard.
        only_for_head: True for the last stage's copy of the token embedding, which only the head uses.
    """

    scale: Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh,
        *,
        sequence_parallel: bool,
        only_for_head: bool = False,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = mesh.tp, sequence_parallel and mesh.tp.size > 1
        self.word = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            mesh,
            multiple=config.vocab_multiple,
            sequence_parallel=sequence_parallel,
            init_std=config.init_stds.embedding,
            tied_copy=only_for_head,
        )
        self.norm: nn.Module | None = None
        if config.embedding_norm and not only_for_head:
            self.norm = model_norm(config, config.hidden_size, mesh, sequence_parallel, ops)
        self.position: nn.Parameter | None = None
        if config.position_embedding == "learned" and not only_for_head:
            self.position = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))
            normal_(self.position, self.param_specs()["position"], mesh.shard_ranks, config.init_std)
        self.register_buffer("scale", _scale(config), persistent=False)
        self.dropout = Dropout(config.hidden_dropout, mesh, sequence_parallel=sequence_parallel)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Positions are whole on every rank; under sequence parallelism each rank looks up its shard's positions."""
        if self.position is None:
            return {}
        return {"position": ParamSpec(tuple(self.position.shape), grad_sum_over_tp=self.sequence_parallel)}

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens ``[S, B]`` at positions ``[S]`` or ``[S, B]`` to ``[S, B, H]`` (or this rank's shard of it)."""
        x = self.word(tokens)
        if self.scale is not None:
            x = x * self.scale.to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        if self.position is not None:
            if self.sequence_parallel:
                positions = local_shard(positions, self.axis)
            rows = F.embedding(positions, self.position)
            x = x + (rows.unsqueeze(1) if positions.ndim == 1 else rows)
        out: Tensor = self.dropout(x)
        return out


def _scale(config: TransformerConfig) -> Tensor | None:
    """Factor of the embedded tokens, a buffer so that it is rounded with the parameters; ``None`` for 1."""
    return None if config.embedding_scale == 1.0 else torch.tensor(config.embedding_scale)


class Head(CompilablePart):
    """Final norm and output layer; in a model with tied embeddings the output weight is the embedding's.

    Args:
        sequence_parallel: True if the input is a sequence shard.

    Attributes:
        lora: adapters of the output layer; ``None`` without.
        loss_backend: backend of ``torch.compile`` for the passes over logits; ``None`` to run them one by one.
    """

    def __init__(
        self, config: TransformerConfig, mesh: ParallelMesh, *, sequence_parallel: bool, ops: Ops = ANY_DEVICE
    ) -> None:
        super().__init__()
        self.loss_backend: str | None = None
        self.axis, self.sequence_parallel = mesh.tp, sequence_parallel and mesh.tp.size > 1
        self.weight_grads = mesh.weight_grads
        self.lora: nn.Module | None = None
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.label_smoothing, self.softcap = config.label_smoothing, config.logit_softcap
        self.norm = model_norm(config, config.hidden_size, mesh, sequence_parallel, ops)
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None  # set by a subclass, sharded like the weight
        self.multiple = config.vocab_multiple
        self.rows = padded_vocab_size(config.vocab_size, self.axis.size, self.multiple) // self.axis.size
        if not config.tie_embeddings:
            self.weight = nn.Parameter(torch.empty(self.rows, config.hidden_size))
            normal_(self.weight, self.param_specs()["weight"], mesh.shard_ranks, config.init_stds.head)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """The weight is cut along the vocabulary, as the embedding is."""
        shape = (self.vocab_size, self.hidden_size)
        return {} if self.weight is None else {"weight": ParamSpec(shape, tp_dim=0, multiple=self.multiple)}

    def _weight(self, tied: Tensor | None) -> Tensor:
        weight = self.weight if tied is None else tied
        assert weight is not None
        return weight

    def _normed(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.norm(hidden)
        return out

    def _enter(self, hidden: Tensor) -> Tensor:
        return self._spread(self._normed(hidden))

    def _spread(self, hidden: Tensor) -> Tensor:
        return (gather_sequence if self.sequence_parallel else copy_to_region)(hidden, self.axis)

    def final(self, hidden: Tensor) -> Tensor:
        """``[S, B, H]`` after the final norm, whole and equal on all tensor-parallel ranks.

        All of them must compute the same from it: each rank's gradient of it is taken as the whole gradient.

        Args:
            hidden: residual stream, or this rank's shard of it.
        """
        hidden = self._normed(hidden)
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
        is_normed: bool = False,
    ) -> Tensor:
        """Logits ``[S, B, V]`` without padding; with labels the losses ``[S, B]``, with weights too their weighted sum.

        All are equal on all tensor-parallel ranks.

        Args:
            hidden: residual stream, or this rank's shard of it.
            tied: weight of the embedding, in a model with tied embeddings.
            keep: positions of the whole sequence for which to compute logits.
            labels: ``[S, B]``; tokens with label -100 have no loss.
            token_weights: ``[S, B]``.
            is_final: True if ``hidden`` comes from :meth:`final`.
            is_normed: True if the norm has been applied to ``hidden``, but not the gathering of :meth:`final`.
        """
        if is_final:
            hidden = copy_to_region(hidden, self.axis)
        else:
            hidden = self._spread(hidden) if is_normed else self._enter(hidden)
        weight = self._weight(tied)
        if self.lora is not None:
            hidden, weight = self.lora(hidden, weight)
        if labels is None:
            logits = linear(hidden[keep], weight, self.bias)  # [S, B, V/tp]
            if self.softcap:
                logits = torch.tanh(logits / self.softcap) * self.softcap
            return gather_features(logits, self.axis)[..., : self.vocab_size]
        if token_weights is None:
            return linear_token_losses(
                hidden,
                weight,
                labels,
                self.axis,
                self.vocab_size,
                label_smoothing=self.label_smoothing,
                softcap=self.softcap,
            )
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            token_weights,
            self.axis,
            self.vocab_size,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            bias=self.bias,
            weight_grads=self.weight_grads if self.weight_grads.takes_gradients else None,
            backend=self.loss_backend,
        )
