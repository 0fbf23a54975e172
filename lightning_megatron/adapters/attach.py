"""Attach adapters to the layers of a model that this rank holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.adapters.experts import ExpertsAdapter
from lightning_megatron.adapters.layers import EmbeddingAdapter, Exchange, HeadAdapter, LinearAdapter
from lightning_megatron.adapters.lora import LoRA
from lightning_megatron.adapters.low_rank import Cut, LowRank, Rows
from lightning_megatron.adapters.targets import AdaptedLayer
from lightning_megatron.comm.collectives import (
    copy_to_region,
    gather_sequence,
    reduce_from_region,
    reduce_scatter_sequence,
)
from lightning_megatron.errors import Problem, divisors, nearest_to, raise_if_any
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.init import draw_seed, seeded
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.whole_linear import WholeLinear
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.models.stages import StagedModel
from lightning_megatron.models.transformer import Head
from lightning_megatron.moe.experts import RoutedExperts
from lightning_megatron.params import ParamSpec

_OF_ADAPTER = re.compile(r"\.lora\.([^.]+)\.[^.]+\.lora_(A|B|magnitude)$")


def adapter_of(name: str) -> str | None:
    """Name of the adapter that a parameter belongs to, from its global name; ``None`` for other parameters."""
    found = _OF_ADAPTER.search(name)
    return None if found is None else found[1]


class Switch:
    """The adapter that all layers of a model use: ``active`` is its name, ``None`` to use none."""

    def __init__(self, active: str | None) -> None:
        self.active = active


class LayerAdapters(nn.ModuleDict):
    """Adapters of one layer by name; only the active one is applied."""

    def __init__(self, switch: Switch) -> None:
        super().__init__()
        self._switch = switch

    @property
    def active(self) -> nn.Module | None:
        """The active adapter, if this layer has it."""
        name = self._switch.active
        return self[name] if name is not None and name in self else None

    def merged(self, weight: Tensor) -> Tensor:
        """The layer's weight, with the active adapter merged into it."""
        merged: Tensor = weight if self.active is None else self.active.merged(weight)  # type: ignore[operator]
        return merged


class LinearAdapters(LayerAdapters):
    """Adapters of a linear layer or an embedding."""

    def forward(self, x: Tensor, out: Tensor, *frozen: Tensor | None) -> Tensor:
        """The layer's output, with the active adapter applied."""
        return out if self.active is None else self.active(x, out, *frozen)


class HeadAdapters(LayerAdapters):
    """Adapters of the output layer."""

    def forward(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Input and weight, extended by the features of the active adapter."""
        return (hidden, weight) if self.active is None else self.active(hidden, weight)


class ExpertsAdapters(LayerAdapters):
    """Adapters of experts."""

    def forward(self, which: str, x: Tensor, out: Tensor, *how: Any) -> Tensor:
        """The output of the ``"inner"`` or the ``"outer"`` matrix, with the active adapter applied."""
        return out if self.active is None else getattr(self.active, which)(x, out, *how)


def _whole(x: Tensor, axis: Axis) -> Tensor:
    return x


def attach(
    model: StagedModel, mesh: ParallelMesh, name: str, lora: LoRA, plan: Sequence[AdaptedLayer], switch: Switch
) -> None:
    """Attach an adapter to the layers of a model that this rank holds; its parameters require gradients.

    Draws one seed from torch's default generator and derives every layer's random values from it, so the adapter is the
    same in every layout. The plan lists the layers of the whole model that the adapter changes.

    Raises:
        ConfigError: if the features of experts do not divide evenly over the etp ranks.
    """
    base = draw_seed()
    layers = dict(model.named_modules())
    by_layer: dict[str, list[AdaptedLayer]] = {}
    for each in plan:
        by_layer.setdefault(each.name, []).append(each)
    for number, (place, matrices) in enumerate(by_layer.items()):
        layer = layers.get(place)
        if layer is None or (isinstance(layer, VocabParallelEmbedding) and layer.is_tied_copy):
            continue
        with seeded(base, number):
            _attach(layer, mesh, name, lora, matrices, switch)


def _attach(
    layer: nn.Module, mesh: ParallelMesh, name: str, lora: LoRA, matrices: Sequence[AdaptedLayer], switch: Switch
) -> None:
    with next(layer.parameters()).device:
        kind, adapter = _made(layer, mesh, lora, matrices)
    if layer.lora is None:
        layer.lora = kind(switch)
    assert isinstance(layer.lora, LayerAdapters)
    layer.lora[name] = adapter


def _made(
    layer: nn.Module, mesh: ParallelMesh, lora: LoRA, matrices: Sequence[AdaptedLayer]
) -> tuple[type[LayerAdapters], nn.Module]:
    """The container class for a layer's adapters, and a new adapter for it."""
    if isinstance(layer, RoutedExperts):
        return ExpertsAdapters, _of_experts(layer, mesh, lora, matrices)
    if isinstance(layer, Head):
        return HeadAdapters, _of_head(layer, mesh, lora, matrices[0])
    if isinstance(layer, VocabParallelEmbedding):
        return LinearAdapters, _of_embedding(layer, mesh, lora, matrices[0])
    assert isinstance(layer, ColumnParallelLinear | RowParallelLinear | WholeLinear), type(layer)
    return LinearAdapters, _of_linear(layer, mesh, lora, matrices[0])


def _of_linear(
    layer: ColumnParallelLinear | RowParallelLinear | WholeLinear, mesh: ParallelMesh, lora: LoRA, matrix: AdaptedLayer
) -> LinearAdapter:
    sp, tp, columns = layer.sequence_parallel, mesh.tp.size, layer.weight.shape[-1]
    # The sharded dimensions of A and B, and the communication between the two products.
    a_dim: int | None = None
    b_dim: int | None = None
    exchange: Exchange = _whole
    if isinstance(layer, ColumnParallelLinear):
        b_dim, exchange = 0, gather_sequence if sp else copy_to_region
    elif isinstance(layer, RowParallelLinear):
        a_dim, exchange = 1, reduce_scatter_sequence if sp else reduce_from_region
    sums_inputs, row_cuts = a_dim is not None, tp if b_dim is not None else 1
    # A rank holds some of the groups; if there is only one group, it holds some of its rows.
    groups, shrinks = (matrix.groups // row_cuts, 1) if matrix.groups > 1 else (1, row_cuts)
    rows = Rows(groups, {part.name: part.width // shrinks for part in matrix.parts})
    parts = {}
    for part in matrix.parts:
        if not part.is_target:
            continue
        out, here = part.width * matrix.groups, rows.widths[part.name] * groups
        inputs = columns * tp if sums_inputs else columns
        a = Cut(ParamSpec((lora.rank, inputs), a_dim, grad_sum_over_tp=sp and not sums_inputs), (lora.rank, columns))
        whole_b = sp and b_dim is None
        b = Cut(ParamSpec((out, lora.rank), b_dim, grad_sum_over_tp=whole_b), (here, lora.rank))
        length = ParamSpec((out,), b_dim, grad_sum_over_tp=whole_b, decay=False)
        parts[part.name] = LowRank(a, b, Cut(length, (here,)) if lora.dora else None, mesh.shard_ranks)
    # Masks differ over tp for slices of the features, too.
    dropout = Dropout(lora.dropout, mesh, sequence_parallel=sp or sums_inputs)
    return LinearAdapter(parts, rows, mesh.tp, lora.scale, exchange=exchange, sums_inputs=sums_inputs, dropout=dropout)


def _of_embedding(
    layer: VocabParallelEmbedding, mesh: ParallelMesh, lora: LoRA, matrix: AdaptedLayer
) -> EmbeddingAdapter:
    rank, features, sp = lora.rank, layer.embedding_dim, layer.sequence_parallel
    a = Cut(ParamSpec((layer.num_embeddings, rank), 0, multiple=layer.multiple), (layer.weight.shape[0], rank))
    b = Cut(ParamSpec((features, rank), grad_sum_over_tp=sp), (features, rank))
    length = Cut(ParamSpec((features,), grad_sum_over_tp=sp, decay=False), (features,)) if lora.dora else None
    part = LowRank(a, b, length, mesh.shard_ranks, of_embedding=True)
    exchange = reduce_scatter_sequence if sp else reduce_from_region
    name = matrix.parts[0].name
    return EmbeddingAdapter(name, part, mesh.tp, lora.scale, first_row=layer.first_row, exchange=exchange)


def _of_head(layer: Head, mesh: ParallelMesh, lora: LoRA, matrix: AdaptedLayer) -> HeadAdapter:
    rank, vocabulary, features = lora.rank, layer.vocab_size, layer.hidden_size
    a = Cut(ParamSpec((rank, features)), (rank, features))
    b = Cut(ParamSpec((vocabulary, rank), 0, multiple=layer.multiple), (layer.rows, rank))
    length = (
        Cut(ParamSpec((vocabulary,), 0, decay=False, multiple=layer.multiple), (layer.rows,)) if lora.dora else None
    )
    # All ranks hold the whole input, and draw the same mask.
    dropout = Dropout(lora.dropout, mesh)
    name = matrix.parts[0].name
    return HeadAdapter(name, LowRank(a, b, length, mesh.shard_ranks), mesh.tp, lora.scale, dropout)


def _of_experts(
    layer: RoutedExperts, mesh: ParallelMesh, lora: LoRA, matrices: Sequence[AdaptedLayer]
) -> ExpertsAdapter:
    rank, etp, specs = lora.rank, mesh.etp.size, layer.param_specs()
    count, hidden, inner = specs["fc2"].global_shape
    if hidden % etp:
        reason = f"adapters of experts are cut along {hidden} features, which do not split over {etp} ranks"
        raise_if_any([Problem("etp", etp, reason, nearest_to(etp, divisors(hidden)))])
    here = layer.fc2.shape[0]
    found: dict[str, dict[str, LowRank]] = {"fc1": {}, "fc2": {}}
    rows = Rows(1, {})
    for matrix in matrices:
        inputs, out = (hidden, inner) if matrix.weight == "fc1" else (inner, hidden)
        a = Cut(ParamSpec((count, rank, inputs), 2, 0), (here, rank, inputs // etp))
        b = Cut(ParamSpec((count, out, rank), 1, 0), (here, out // etp, rank))
        if matrix.weight == "fc1":
            rows = Rows(1, {part.name: part.width // etp for part in matrix.parts})
        for part in matrix.parts:
            if part.is_target:
                found[matrix.weight][part.name] = LowRank(a, b, None, mesh.shard_ranks)
    return ExpertsAdapter(found["fc1"], found["fc2"], rows, mesh.etp, lora.scale)


@torch.no_grad()
def begin(model: nn.Module) -> None:
    """Initialize DoRA's magnitudes from the frozen weights, which must be loaded by now; all ranks call this."""
    tied = model.tied_weight if isinstance(model, StagedModel) else None
    for layer in model.modules():
        adapters = getattr(layer, "lora", None)
        if isinstance(adapters, LayerAdapters) and not isinstance(layer, RoutedExperts):
            weight = layer.weight if layer.weight is not None else tied
            for adapter in adapters.values():
                adapter.begin(weight)  # type: ignore[operator]


def train_only(model: nn.Module, name: str | None) -> None:
    """Require gradients only for the parameters of one adapter; ``None`` for none."""
    for each, param in model.named_parameters():
        param.requires_grad_(adapter_of(each) == name and name is not None)
