"""A training job in numbers: everything that memory and time of a step depend on, besides the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from lightning_megatron.arguments import OneOf, Rules, above, at_least, field_problems
from lightning_megatron.config.layout import BatchShape, ParallelLayout
from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.optim.core.bf16_sums import allows_bf16_sums
from lightning_megatron.pipeline.action import Schedule
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.pipeline.schedule import build_schedule, schedule_kind, schedule_problems
from lightning_megatron.stage import StageLayers

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
"""Precisions by Lightning's names, with the strategy's meaning of them."""


@dataclass(frozen=True)
class PrecisionBytes:
    """Bytes of a value by its role; they are the dtypes of ``lightning/step/precision.py``.

    Attributes:
        params: bytes of a parameter, and of an activation.
        grads: bytes of an accumulated gradient.
        main: bytes of a main parameter; 0 where it is the parameter itself.
        state: bytes of one value of the optimizer's state.
    """

    params: int
    grads: int
    main: int
    state: int


PRECISION_BYTES = {
    "32-true": PrecisionBytes(4, 4, 0, 4),
    "bf16-true": PrecisionBytes(2, 2, 0, 2),
    "bf16-mixed": PrecisionBytes(2, 4, 4, 4),
    "16-mixed": PrecisionBytes(2, 4, 4, 4),
}
"""Bytes by precision."""

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a value by the names of ``grad_reduce_dtype``."""

EVEN = LayerSplit()

AttentionKind = Literal["flash", "reference"]

RULES: Rules = {
    "seq_length": at_least(1),
    "micro_batch_size": at_least(1),
    "num_micro_batches": at_least(1),
    "precision": OneOf(PRECISIONS),
    "main_grads_dtype": OneOf((*DTYPE_BYTES, "auto")),
    "grad_reduce_dtype": OneOf(tuple(DTYPE_BYTES)),
    "bucket_size": at_least(1),
    "optimizer_states": at_least(0),
    "expert_imbalance": above(0.0, 1.0),
}


@dataclass(frozen=True)
class PlannedJob:
    """Description of a training job, real or planned; most fields are arguments of ``MegatronStrategy``.

    Attributes:
        config: shape of the model.
        layout: resolved layout: the number of data-parallel replicas is known.
        seq_length: tokens of a sample.
        micro_batch_size: samples of one forward.
        num_micro_batches: forwards of one replica in one optimizer step.
        precision: one of ``PRECISIONS``.
        fp8: True if linear layers multiply in fp8.
        schedule: name of the pipeline schedule; ``None`` for the strategy's default.
        split: split of the layers over pipeline stages.
        recompute: activations that are recomputed.
        distributed_optimizer: True if optimizer states are sharded over data-parallel ranks.
        overlap_grad_reduce: True if gradients are reduced during the last backward.
        overlap_param_gather: True if parameters are gathered during the next forward.
        main_grads_dtype: dtype in which gradients are accumulated; ``None`` for that of the precision, ``"auto"`` for
            Intel's rule.
        grad_reduce_dtype: dtype in which gradients are summed over ranks; ``None`` for that of the gradients.
        bucket_size: elements of a bucket; ``None`` for the strategy's default.
        optimizer_states: values that the optimizer keeps for each parameter (Adam: 2).
        expert_imbalance: tokens of the most loaded rank's experts over the mean of all ranks.
        attention: implementation of attention: ``"flash"`` keeps no scores, ``"reference"`` keeps them.

    Raises:
        ConfigError: with every invalid size and every conflict between sizes.
    """

    config: TransformerConfig
    layout: ParallelLayout
    seq_length: int
    micro_batch_size: int
    num_micro_batches: int
    precision: str = "bf16-mixed"
    fp8: bool = False
    schedule: str | None = None
    split: LayerSplit = EVEN
    recompute: RecomputePlan = NO_RECOMPUTE
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    main_grads_dtype: str | None = None
    grad_reduce_dtype: str | None = None
    bucket_size: int | None = None
    optimizer_states: int = 2
    expert_imbalance: float = 1.0
    attention: AttentionKind = "flash"

    def __post_init__(self) -> None:
        raise_if_any(field_problems(self, RULES, leave=("config", "layout", "split", "recompute")))
        raise_if_any(self.problems())

    def problems(self) -> list[Problem]:
        """Every conflict between model, layout and batch."""
        layout, pp, vpp = self.layout, self.layout.pp, self.layout.vpp
        found: list[Problem] = []
        if layout.dp is None:
            found.append(Problem("dp", None, "is open: resolve the layout for a number of devices", (1,)))
        batch = BatchShape(
            self.micro_batch_size * self.num_micro_batches,
            self.micro_batch_size,
            self.seq_length,
            vocab_size=self.config.vocab_size,
        )
        world_size = None if layout.dp is None else layout.world_size
        by_split = () if self.split.is_even else ("pp", "vpp", "pp x vpp")
        fits = layout.problems(world_size=world_size, model=self.config, batch=batch)
        found += [problem for problem in fits if problem.argument not in by_split]
        found += self.recompute.problems(layout, self.config)
        found += schedule_problems(self.schedule, pp, vpp, self.num_micro_batches)
        return found + ([] if self.split.is_even else self.split.problems(self.config.num_layers, pp, vpp))

    @cached_property
    def item_bytes(self) -> PrecisionBytes:
        """Bytes of a value by its role."""
        found, grads = PRECISION_BYTES[self.precision], self.main_grads_dtype
        if grads == "auto":
            grads = "bf16" if allows_bf16_sums(self.num_micro_batches, self.layout.data_parallel_size) else "fp32"
        return found if grads is None else replace(found, grads=DTYPE_BYTES[grads])

    @property
    def sent_grad_bytes(self) -> int:
        """Bytes of a gradient's value while it is sent."""
        return self.item_bytes.grads if self.grad_reduce_dtype is None else DTYPE_BYTES[self.grad_reduce_dtype]

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, over all replicas."""
        return self.micro_batch_size * self.num_micro_batches * self.layout.data_parallel_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all replicas."""
        return self.global_batch_size * self.seq_length

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.layout.world_size

    @cached_property
    def stages(self) -> tuple[StageLayers, ...]:
        """Stages of the pipeline, by stage number."""
        return self.split.stages(self.config.num_layers, self.layout.pp, self.layout.vpp, self.config.loss_cost)

    def stages_of(self, pipeline_rank: int) -> tuple[StageLayers, ...]:
        """Stages that a pipeline rank holds, by chunk."""
        return tuple(stage for stage in self.stages if stage.rank == pipeline_rank)

    @property
    def schedule_name(self) -> str:
        """Name of the schedule with the default filled in."""
        return schedule_kind(self.schedule, self.layout.vpp).name

    @property
    def actions(self) -> Schedule:
        """Actions of every pipeline rank; a long list for many micro-batches."""
        return _actions(self.schedule, self.layout.pp, self.layout.vpp, self.num_micro_batches)


@lru_cache(maxsize=32)
def _actions(name: str | None, pp: int, vpp: int, num_micro_batches: int) -> Schedule:
    return build_schedule(name, pp, vpp, num_micro_batches)
