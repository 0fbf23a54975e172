"""Base of models that are split into pipeline stages: a rank builds its parts, and a call runs one stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, LayerGroup, RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.context_parallel.inputs import SequenceSharding
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.layers.cross_entropy import IGNORE_INDEX
from lightning_megatron.layers.fp8_linear import use_fp8
from lightning_megatron.layers.init import draw_seed, seeded
from lightning_megatron.layers.parts import part_problems
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.transformer import Block, Embedding, Head
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.recompute import recomputed
from lightning_megatron.stage import StageBoundary, StageLayers

T = TypeVar("T")


class Parts(NamedTuple):
    """Classes of the parts of a model."""

    embedding: Callable[..., Embedding] = Embedding
    block: Callable[..., Block] = Block
    head: Callable[..., Head] = Head


def in_own_dtype(model: nn.Module) -> AbstractContextManager[Any]:
    """Context of a model in 16 bits without autocast, which is for fp32 parameters: the model casts by itself."""
    param = next(model.parameters(), None)
    if param is None or param.dtype == torch.float32 or param.is_meta:  # autocast does not know the device "meta"
        return nullcontext()
    is_cast = torch.is_autocast_enabled(param.device.type)
    return torch.autocast(param.device.type, enabled=False) if is_cast else nullcontext()


class StagedModel(nn.Module):
    """Blocks of this rank's pipeline stages between an embedding and a head.

    Layers carry their global number, so a parameter has one name in every layout. In a pipeline the model holds the
    stages of this rank, and a call runs the stage that the boundary names.

    Args:
        mesh: mesh of the ranks; ``None`` for one process.
        parts: stages on this rank; ``None`` for a model in one piece.
        boundary: boundary of the pipeline's stages; needed with ``parts``.

    Attributes:
        embedding: first part; ``None`` on a rank that does not need it.
        layers: blocks of this rank by their global number.
        head: last part; ``None`` on a rank without the last stage.

    Raises:
        ConfigError: if ``recompute`` or the layout does not fit this model, or ``ops`` requires a missing kernel.
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
        raise_if_any(
            recompute.problems(mesh.layout, config)
            + ops.model_problems(mesh.layout, config)
            + config.layout_problems(mesh.layout)
            + part_problems(config, mesh.layout)
        )
        self.config, self.axis = config, mesh.tp
        self.rng, self.recompute = mesh.rng, recompute
        self.sequence_parallel = mesh.layout.uses_sequence_parallel
        self._shard_saved_over = mesh.tp if recompute.shard_saved else None
        self._sharding = SequenceSharding(mesh.cp, mesh.layout.sequence_multiple)
        self._boundary = boundary
        self._parts = {part.stage: part for part in parts or (StageLayers.whole(config.num_layers),)}
        embeds = any(part.has_embedding for part in self._parts.values())
        predicts = any(part.has_loss for part in self._parts.values())
        self._seed, classes = draw_seed(), self._classes()
        how: dict[str, Any] = {"sequence_parallel": self.sequence_parallel, "ops": ops}
        self.embedding: Embedding | None = None
        if embeds or (predicts and config.embeds_in_the_end):
            with seeded(self._seed, 0):
                self.embedding = classes.embedding(config, mesh, only_for_head=not embeds, **how)
        self.layers = nn.ModuleDict()
        for number in (number for part in self._parts.values() for number in part.layers):
            with seeded(self._seed, number + 1):
                self.layers[str(number)] = classes.block(config, mesh, layer=number, recompute=recompute, **how)
        blocks = {int(number): block for number, block in self.layers.items()}
        self.fp8 = use_fp8(blocks, config.num_layers, ops, mesh)
        self.head: Head | None = None
        if predicts:
            with seeded(self._seed, config.num_layers + 1):
                self.head = classes.head(config, mesh, **how)
        self._add_parts(mesh, ops)

    def _classes(self) -> Parts:
        return Parts()

    def _add_parts(self, mesh: ParallelMesh, ops: Ops) -> None:
        """Build further parts of a subclass."""

    def hidden_shape(self, tokens: Tensor) -> tuple[int, int, int]:
        """Shape of the activations between stages for ``tokens`` ``[B, S]``: ``[S, B, H]``, or a sequence shard."""
        batch, length = tokens.shape
        ranks = self._sharding.axis.size * (self.axis.size if self.sequence_parallel else 1)
        return (length + self._sharding.padding(length)) // ranks, batch, self.config.hidden_size

    @property
    def tied_weight(self) -> Tensor | None:
        """Weight of the embedding if the output layer shares it."""
        return self.embedding.word.weight if self.config.tie_embeddings and self.embedding is not None else None

    def _current_stage(self) -> StageLayers:
        if self._boundary is None:
            return next(iter(self._parts.values()))
        if self._boundary.stage is None:
            raise_if_any(self._repetition_problems())
            raise RuntimeError("the model is cut into pipeline stages: call it inside a step of a Trainer")
        return self._parts[self._boundary.stage]

    def _repetition_problems(self) -> list[Problem]:
        """Fault of a call that a backward repeats: the input of the stage has gone with its forward."""
        if not self.rng.replaying:
            return []
        reason = (
            "it runs a pipeline stage again after the schedule has left it: put it around blocks inside of the model,"
            " or let the model recompute them"
        )
        return [Problem("torch.utils.checkpoint", "around the model's call", reason, ("recompute='full'",))]

    def _received(self) -> Tensor:
        """The activation that the previous stage has sent."""
        assert self._boundary is not None
        return self._boundary.take()

    def _refresh(self) -> None:
        """Update fp8 scales and weights before a forward pass."""
        if self.fp8 is not None:
            self.fp8.refresh()

    def _key_mask(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """``[B, S]``, True for tokens to attend to, extended by the layout's padding; ``None`` for all."""
        added = self._sharding.padding(tokens.shape[1])
        if mask is None and not added:
            return None
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        return F.pad(mask, (0, added))

    def _planned(self, run: Callable[..., T], group: LayerGroup) -> Callable[..., T]:
        """A function that runs a group of layers; one that saves shards of its inputs if the group is recomputed."""
        if not group.recomputed:
            return run
        return partial(recomputed, run, rng=self.rng, shard_over=self._shard_saved_over)

    def _own_labels(self, labels: Tensor) -> Tensor:
        return self._sharding.shard(labels, 1, IGNORE_INDEX)


def token_weights(labels: Tensor, loss_mask: Tensor | None) -> Tensor:
    """Weight of each token's loss, fp32, in the shape of the labels."""
    kept = labels != IGNORE_INDEX
    return kept.float() if loss_mask is None else loss_mask.float() * kept


def mean_weights(labels: Tensor, loss_mask: Tensor | None) -> Tensor:
    """Weight of each token's loss in the mean, in the shape of the labels; all 0 if the mask keeps no token."""
    weights = token_weights(labels, loss_mask)
    return weights / one_for_none(weights.sum())


def one_for_none(total: Tensor) -> Tensor:
    """``total``, or 1 where it is 0: a divisor for means over possibly no elements."""
    return torch.where(total == 0, 1, total)
