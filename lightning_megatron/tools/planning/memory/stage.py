"""Memory of one pipeline stage for one micro-batch: bytes that its forward keeps, and peaks of forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.stage import StageLayers
from lightning_megatron.tools.planning.memory.attention import attention_half
from lightning_megatron.tools.planning.memory.ends import EMBEDDING, LOGITS, embedding_end, loss_end, waiting_gradient
from lightning_megatron.tools.planning.memory.feed_forward import feed_forward_half
from lightning_megatron.tools.planning.memory.half import RESIDUAL, Half
from lightning_megatron.tools.planning.memory.shapes import Shapes

WORKING = "temporaries of the layer that runs"
DEFERRED = "deferred weight gradients"
ROTARY = "rotary tables"


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage for one micro-batch. Its input activation is part of what it keeps.

    Attributes:
        kept: bytes that stay from its forward to its backward, by cause.
        forward: most bytes during its forward.
        backward: most bytes during its backward, with the gradient that arrives.
        deferred: bytes that a split backward keeps for the gradients of weights.
        weight_gradient: temporary of the largest weight's gradient.
    """

    kept: Mapping[str, int]
    forward: int
    backward: int
    deferred: int
    weight_gradient: int

    @cached_property
    def size(self) -> int:
        """Bytes that stay from its forward to its backward."""
        return sum(self.kept.values())


class _Layers(NamedTuple):
    """Properties of a stage that determine its memory: stages with equal ones need the same bytes.

    Attributes:
        has_experts: True or False for each layer.
        has_embedding: True if the stage turns tokens into activations.
        has_loss: True if the stage computes the loss.
    """

    has_experts: tuple[bool, ...]
    has_embedding: bool
    has_loss: bool


def stage_bytes(shapes: Shapes, plan: RecomputePlan, stage: StageLayers, defers: bool) -> StageBytes:
    """Memory of a stage for one micro-batch.

    Args:
        shapes: tensors of a micro-batch.
        plan: activations that are recomputed.
        stage: layers of the stage.
        defers: True if the schedule splits backwards.
    """
    layers = _Layers(tuple(map(shapes.config.has_experts, stage.layers)), stage.has_embedding, stage.has_loss)
    return _stage_bytes(shapes, plan, layers, defers)


@lru_cache(maxsize=8192)
def _stage_bytes(shapes: Shapes, plan: RecomputePlan, layers: _Layers, defers: bool) -> StageBytes:
    return _Walk(shapes, plan, defers).through(layers)


class _Group(NamedTuple):
    """Equal groups of layers that follow each other.

    Attributes:
        has_experts: True or False for each layer of one group.
        recomputed: True if the layers of a group are recomputed.
        times: number of groups.
    """

    has_experts: tuple[bool, ...]
    recomputed: bool
    times: int


def _groups(plan: RecomputePlan, layers: _Layers) -> list[_Group]:
    """Groups of the layers of a stage; each layer that is not recomputed is a group of its own."""
    parts: list[tuple[tuple[bool, ...], bool]] = []
    for group in plan.groups(range(len(layers.has_experts))):
        kinds = tuple(layers.has_experts[number] for number in group.layers)
        parts += [(kinds, True)] if group.recomputed else [((kind,), False) for kind in kinds]
    return [_Group(*part, sum(1 for _ in same)) for part, same in groupby(parts)]


class _Walk:
    """A walk through the layers of a stage, forwards and back."""

    def __init__(self, shapes: Shapes, plan: RecomputePlan, defers: bool) -> None:
        self._x, self._plan, self._defers = shapes, plan, defers
        self._attention = attention_half(shapes, plan)
        self._feed_forward = {
            kind: feed_forward_half(shapes, plan, kind)
            for kind in (False, True)
            if not kind or shapes.config.num_experts
        }
        self.level = self.most = 0

    def _halves(self, group: _Group) -> Iterator[Half]:
        """Halves of the layers of one group."""
        for kind in group.has_experts:
            yield self._attention
            yield self._feed_forward[kind]

    def _reach(self, size: int) -> None:
        self.most = max(self.most, size)

    def _each(self, group: _Group, walk: Callable[[_Group], None]) -> None:
        """Walk through equal groups; each changes the level equally, so the first or the last one reaches the peak."""
        before = self.level
        walk(group)
        if group.times > 1:
            self.level += (group.times - 2) * (self.level - before)
            walk(group)

    def through(self, layers: _Layers) -> StageBytes:
        """Memory of a stage."""
        kept: Counter[str] = Counter()
        groups = _groups(self._plan, layers)
        x = self._x
        tables = self._rotary()
        self.level = tables
        kept[ROTARY] += tables
        if layers.has_embedding:
            embedding = embedding_end(x)
            self._reach(self.level + embedding.forward)
            self.level += embedding.kept
            kept[EMBEDDING] += embedding.kept
        self.level += x.residual
        if self._plan.shard_saved and groups and groups[0].recomputed and not layers.has_embedding:
            self.level += x.residual  # the received activation stays whole, besides its saved shard
            kept[RESIDUAL] += x.residual
        for group in groups:
            self._each(group, self._forward)
            for cause, size in self._kept(group):
                kept[cause] += group.times * size
        if layers.has_loss:
            kept.update(self._losses())
        self._reach(self.level)
        forward = self.most
        backward = self._through_backward(layers, groups, sum(kept.values()))
        return StageBytes(dict(kept), forward, backward, *self._deferred(layers, groups))

    def _deferred(self, layers: _Layers, groups: list[_Group]) -> tuple[int, int]:
        """Bytes that a split backward keeps for the gradients of weights, and the largest of these gradients."""
        blocks = [self._block] * self._x.config.mtp_num_layers if layers.has_loss else []
        halves = [(half, group.times) for group in [*groups, *blocks] for half in self._halves(group)]
        deferred = sum(half.deferred * times for half, times in halves) if self._defers else 0
        return deferred, max((half.gradient for half, _ in halves), default=0)

    def _losses(self) -> Mapping[str, int]:
        """Forward of the loss, and of those of further tokens; bytes by cause that stay."""
        x, loss = self._x, loss_end(self._x)
        self._reach(self.level + loss.forward)
        kept = Counter({LOGITS: loss.kept, RESIDUAL: x.residual})
        self.level += loss.kept if x.config.mtp_num_layers else 0
        for _ in range(x.config.mtp_num_layers):
            kept.update(self._further_forward())
        return kept

    @property
    def _block(self) -> _Group:
        """The block of a module for a further token."""
        config = self._x.config
        return _Group((config.has_experts(config.num_layers - 1),), self._plan.groups((0,))[0].recomputed, 1)

    def _further_forward(self) -> Mapping[str, int]:
        """Forward of a module for a further token with its loss; bytes by cause that stay."""
        x, embedding, loss, block = self._x, embedding_end(self._x), loss_end(self._x), self._block
        start = self.level
        self._reach(start + x.residual + embedding.forward)
        kept = Counter({RESIDUAL: 2 * x.residual, EMBEDDING: embedding.kept})  # normed hidden states, embedded tokens
        self.level += kept.total()
        self._reach(self.level + x.norm_copies + 4 * x.residual)
        self.level += 3 * x.residual  # both side by side, and their projection
        for half in self._halves(block):
            self._reach(self.level + half.forward)
            self.level += half.size
            if not block.recomputed:
                kept.update(half.kept)
        kept[RESIDUAL] += 0 if block.recomputed else self._beside
        self.level = start + kept.total() + x.residual
        self._reach(self.level + loss.forward)
        self.level += loss.kept - x.residual
        kept[LOGITS] += loss.kept
        return kept

    @property
    def _beside(self) -> int:
        """Bytes that such a module keeps beside its block: the input of the projection, and inputs of norms."""
        return 3 * self._x.residual + 3 * self._x.norm_statistics

    def _further_backward(self) -> None:
        """Backward of a module for a further token."""
        x, embedding, loss, block = self._x, embedding_end(self._x), loss_end(self._x), self._block
        self._reach(self.level + loss.backward)
        self.level += x.residual - loss.kept
        if block.recomputed:
            self.level += self._beside + x.residual  # the projection's output, too
        self._reach(self.level + x.norm_gradients)
        self.level -= x.residual  # the input of the last norm
        self._backward(block)
        self._reach(self.level + 2 * x.residual + x.returned(2 * x.config.hidden_size**2))
        self.level += x.residual - self._beside
        self._reach(self.level + x.residual + max(x.norm_gradients, embedding.backward))
        self.level -= embedding.kept + 2 * x.residual

    def _rotary(self) -> int:
        """Angles of a rank's own positions, which each forward copies from the table of the whole sequence."""
        c, cp = self._x.config, self._x.layout.cp
        if c.position_embedding != "rope" or cp == 1:
            return 0
        kinds = len({c.rotary(number) for number in c.attention_kinds(c.num_layers)})
        return kinds * 2 * self._x.seq_length // cp * c.head_dim * self._x.item

    def _input(self) -> int:
        """Bytes of the kept input of a recomputed group."""
        if self._plan.shard_saved:
            return self._x.residual // self._x.tp
        return self._x.residual

    def _kept(self, group: _Group) -> Iterator[tuple[str, int]]:
        """Bytes by cause that stay after the forward of one group."""
        if group.recomputed:
            yield RESIDUAL, self._input()
            return
        for half in self._halves(group):
            yield from half.kept.items()

    def _forward(self, group: _Group) -> None:
        residual = self._x.residual
        if not group.recomputed:
            for half in self._halves(group):
                self._reach(self.level + half.forward)
                self.level += half.size
            return
        share = self._input()
        start = self.level + (share if self._plan.shard_saved else 0)
        for i, half in enumerate(self._halves(group)):
            # Besides the input of the half, the inputs of its layer and of the group are alive.
            held = residual * (i % 2) + (residual if i > 1 else 0)
            self._reach(start + held + half.forward)
        self.level += share

    def _through_backward(self, layers: _Layers, groups: list[_Group], kept: int) -> int:
        """Most bytes of the backward."""
        x = self._x
        self.level, self.most = kept, 0
        if layers.has_loss:
            for _ in range(x.config.mtp_num_layers):
                self._further_backward()
            loss = loss_end(x)
            self._reach(self.level + loss.backward)
            self.level -= loss.kept + x.residual
        is_tied = layers.has_loss and layers.has_embedding and x.config.tie_embeddings
        self.level += waiting_gradient(x) if is_tied else 0
        self.level += x.residual  # the gradient of the residual stream
        for group in reversed(groups):
            self._each(group, self._backward)
        if layers.has_embedding:
            self._reach(self.level + embedding_end(x, is_tied=is_tied).backward)
        self._reach(self.level)
        return self.most

    def _backward(self, group: _Group) -> None:
        if group.recomputed:
            self._again(group)
        for half in reversed(list(self._halves(group))):
            self._reach(self.level + half.backward + (half.held if self._defers else 0))
            self.level += (half.deferred if self._defers else 0) - half.size
        if group.recomputed and self._plan.shard_saved:
            self.level -= self._input()

    def _again(self, group: _Group) -> None:
        """Recompute the forward of a group before its backward."""
        x = self._x
        if self._plan.shard_saved:
            self.level += x.residual  # gathered
        for half in self._halves(group):
            self._reach(self.level + half.forward)
            self.level += half.size
        self.level -= x.residual  # the group's input is kept already
