"""Parameters of a pipeline rank: how large its shard of each is, and how each is reduced.

They are those of the layers themselves: a model is built on the meta device, where it has shapes and no values, with
one layer of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod
from pkgutil import resolve_name

from lightning_megatron.config.layer_spec import LayerSpec
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.families import first_family
from lightning_megatron.stage import StageLayers
from lightning_megatron.tools.planning.core.job import PlannedJob

FP8_ENDS = 1
"""Layers without fp8 at each end of a model, by the default recipe."""


@dataclass(frozen=True)
class PlannedParameter:
    """A parameter on one rank; the flags are those of ``optim.buffers.slot.BufferKey``.

    Attributes:
        name: global name; the first layer of a kind names the parameters of all.
        size: elements of this rank's shard, padding of the vocabulary included.
        whole: elements over all ranks, without padding.
        decay: True if weight decay applies; it decides the parameter group.
        replicated_over_tp: True if every tensor-parallel rank holds all of it.
        grad_sum_over_tp: True if its gradient is summed over tensor-parallel ranks.
        expert: True if it belongs to a routed expert.
        tied_copy: True if it is a copy of a parameter of another pipeline stage.
        reduce_late: True if its gradient still changes after the backward pass (tied embeddings).
        in_fp8: True for the matrix of a linear layer that can multiply in fp8.
    """

    name: str
    size: int
    whole: int
    decay: bool = True
    replicated_over_tp: bool = False
    grad_sum_over_tp: bool = False
    expert: bool = False
    tied_copy: bool = False
    reduce_late: bool = False
    in_fp8: bool = False

    @property
    def is_in_front(self) -> bool:
        """True for a parameter in front of the layers."""
        return self.name.startswith("embedding.")


@lru_cache(maxsize=4096)
def rank_parameters(
    config: TransformerConfig, layout: ParallelLayout, stages: tuple[StageLayers, ...]
) -> tuple[PlannedParameter, ...]:
    """Parameters of some stages, in the order in which the model defines them."""
    embeds = any(stage.has_embedding for stage in stages)
    predicts = any(stage.has_loss for stage in stages)
    shards, kinds = _shards(layout), _kinds(config)
    in_front, behind = _ends(config, shards, embeds, predicts, layout.pp > 1)
    layers = _layers(config, shards)
    inner = (each for stage in stages for number in stage.layers for each in layers[kinds[number]])
    return (*in_front, *inner, *behind)


@lru_cache(maxsize=4096)
def rank_sizes(config: TransformerConfig, layout: ParallelLayout, stages: tuple[StageLayers, ...]) -> tuple[int, int]:
    """Elements of dense parameters and of experts' parameters on a rank with these stages."""
    experts = sum(each.size for each in rank_parameters(config, layout, stages) if each.expert)
    return sum(each.size for each in rank_parameters(config, layout, stages)) - experts, experts


def fp8_weights(job: PlannedJob, pipeline_rank: int) -> int:
    """Elements of this rank's weights that are multiplied in fp8."""
    if not job.fp8:
        return 0
    config, layers = job.config, _layers(job.config, _shards(job.layout))
    kinds = _kinds(config)
    numbers = (number for stage in job.stages_of(pipeline_rank) for number in stage.layers)
    inner = (number for number in numbers if FP8_ENDS <= number < config.num_layers - FP8_ENDS)
    return sum(each.size for number in inner for each in layers[kinds[number]] if each.in_fp8)


@lru_cache(maxsize=64)
def _kinds(config: TransformerConfig) -> tuple[int, ...]:
    """For each layer, the number of the first layer of its kind."""
    first: dict[LayerSpec, int] = {}
    return tuple(first.setdefault(spec, number) for number, spec in enumerate(config.layers))


def _shards(layout: ParallelLayout) -> ParallelLayout:
    """The smallest layout in which a rank holds the same shards."""
    etp = layout.expert_tensor_parallel_size
    experts = layout.ep * etp
    replicas = experts // gcd(experts, layout.tp)
    return ParallelLayout(
        tp=layout.tp, ep=layout.ep, etp=etp, dp=replicas, sequence_parallel=layout.uses_sequence_parallel
    )


@lru_cache(maxsize=1024)
def _layers(config: TransformerConfig, shards: ParallelLayout) -> Mapping[int, tuple[PlannedParameter, ...]]:
    """Parameters of the first layer of each kind, by its number."""
    numbers = sorted(set(_kinds(config)))
    stages = [StageLayers(i, 0, i, range(n, n + 1), has_embedding=False, has_loss=False) for i, n in enumerate(numbers)]
    found: dict[int, list[PlannedParameter]] = {number: [] for number in numbers}
    for each in _parameters(config, shards, stages):
        found[int(each.name.split(".")[1])].append(each)
    return {number: tuple(each) for number, each in found.items()}


@lru_cache(maxsize=1024)
def _ends(
    config: TransformerConfig, shards: ParallelLayout, embeds: bool, predicts: bool, is_cut: bool
) -> tuple[tuple[PlannedParameter, ...], tuple[PlannedParameter, ...]]:
    """Parameters in front of the layers, and behind them."""
    stage = StageLayers(0, 0, 0, range(0), has_embedding=embeds, has_loss=predicts)
    found = _parameters(config, shards, [stage])
    if is_cut:
        last = StageLayers(0, 0, 0, range(0), has_embedding=False, has_loss=True)
        tied = {each.name for each in _parameters(config, shards, [last]) if each.tied_copy}
        found = [replace(each, reduce_late=each.name in tied) for each in found]
    in_front = [each for each in found if each.is_in_front]
    return tuple(in_front), tuple(each for each in found if not each.is_in_front)


def _parameters(
    config: TransformerConfig, shards: ParallelLayout, stages: Sequence[StageLayers]
) -> list[PlannedParameter]:
    """Parameters of stages, from the model of the configuration's family."""
    import torch  # here, so that a command answers --help without it

    from lightning_megatron.layers.fp8_linear import block_linears
    from lightning_megatron.mesh import ParallelMesh
    from lightning_megatron.params import named_specs

    kind = resolve_name(first_family(config).model)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # a forecast draws nothing from the run's generator
        model = kind(config, ParallelMesh(shards), stages)
    in_fp8 = {id(linear.weight) for block in model.layers.values() for _, linear, _ in block_linears(block)}
    return [
        PlannedParameter(
            name,
            size=param.numel(),
            whole=prod(spec.global_shape),
            decay=spec.decay,
            replicated_over_tp=shards.tp > 1 and spec.tp_dim is None and not spec.is_expert,
            grad_sum_over_tp=spec.grad_sum_over_tp,
            expert=spec.is_expert,
            tied_copy=spec.tied_with is not None,
            in_fp8=id(param) in in_fp8,
        )
        for name, param, spec in named_specs(model)
    ]
