"""Memory that stays from step to step: parameters, gradients, main parameters and optimizer state, in flat buffers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.optim.buffers.bucket_plan import default_bucket_size, plan_buckets
from lightning_megatron.stage import StageLayers
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.core.parameters import PlannedParameter, rank_parameters
from lightning_megatron.tools.planning.core.term import Term


@dataclass(frozen=True)
class BufferSizes:
    """Elements of a rank's flat buffers, with the padding of parameters and buckets.

    Attributes:
        elements: elements of all buffers.
        owned: elements that this rank updates: its share of every bucket, or all without a distributed optimizer.
        sent: elements of buckets that several ranks share, whose gradients are sent.
        waiting: elements of ``sent`` that are sent only after the gradient of the stage's first module is computed.
        late: elements of the largest parameter whose gradient two pipeline stages add up after backward.
    """

    elements: int
    owned: int
    sent: int
    waiting: int
    late: int


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a rank holds from one step to the next.

    Attributes:
        parameters: parameters in the dtype of the forward.
        gradients: accumulated gradients.
        main: main parameters.
        optimizer: state of the optimizer.
        sizes: elements of the buffers.
    """

    parameters: int
    gradients: int
    main: int
    optimizer: int
    sizes: BufferSizes

    @property
    def total(self) -> int:
        """Sum of the four."""
        return self.parameters + self.gradients + self.main + self.optimizer


def buffer_sizes(job: PlannedJob, pipeline_rank: int) -> BufferSizes:
    """Elements of a rank's flat buffers, laid out as ``optim/buffers/buffer.py`` does."""
    stages = job.stages_of(pipeline_rank)
    return _sizes(job.config, job.layout, stages, job.distributed_optimizer, job.bucket_size)


@lru_cache(maxsize=4096)
def _sizes(
    config: TransformerConfig,
    layout: ParallelLayout,
    stages: tuple[StageLayers, ...],
    shard: bool,
    bucket_size: int | None,
) -> BufferSizes:
    dense = layout.data_parallel_size * layout.cp
    replicas = layout.expert_data_parallel_size
    # With ep x etp = tp, an expert is replicated over the same ranks as dense layers.
    apart = layout.ep * layout.expert_tensor_parallel_size != layout.tp
    parameters = rank_parameters(config, layout, stages)
    buffers: dict[tuple[bool, ...], list[PlannedParameter]] = {}
    for p in parameters:
        expert = p.expert and apart
        traits = (p.decay, p.replicated_over_tp, p.grad_sum_over_tp, p.tied_copy, expert, p.reduce_late)
        buffers.setdefault(traits, []).append(p)
    elements = owned = sent = waiting = 0
    for i, (key, held) in enumerate(buffers.items()):
        ranks = replicas if key[4] else dense
        plans = plan_buckets([p.size for p in reversed(held)], bucket_size or default_bucket_size(ranks), ranks)
        length = plans[-1].end
        elements += length
        owned += length // ranks if shard else length
        if ranks > 1:
            sent += length
            # Sums over tp, or over stages, come first; the first parameter is in the last bucket of its buffer.
            is_last = i == 0 or held[0].is_in_front
            waiting += length if key[2] or key[5] else (length - plans[-1].start) * is_last
    late = max((p.size for p in parameters if p.reduce_late), default=0)
    return BufferSizes(elements, owned, sent, waiting, late)


def state_bytes(job: PlannedJob, pipeline_rank: int) -> StateBytes:
    """Bytes of parameters, gradients, main parameters and optimizer state of a rank."""
    sizes, b = buffer_sizes(job, pipeline_rank), job.item_bytes
    return StateBytes(
        parameters=b.params * sizes.elements,
        gradients=b.grads * sizes.elements,
        main=b.main * sizes.owned,
        optimizer=b.state * job.optimizer_states * sizes.owned,
        sizes=sizes,
    )


def state_terms(job: PlannedJob, states: StateBytes) -> tuple[Term, ...]:
    """The formulas of :func:`state_bytes`, as text."""
    b, n, own = job.item_bytes, states.sizes.elements, states.sizes.owned
    share = f"{own:,} elements of this rank's share"
    return (
        Term("parameters", f"{b.params} bytes x {n:,} elements, padding included", states.parameters, "bytes"),
        Term("gradients", f"{b.grads} bytes x {n:,} elements, padding included", states.gradients, "bytes"),
        Term("main parameters", f"{b.main} bytes x {share}", states.main, "bytes"),
        Term("optimizer state", f"{job.optimizer_states} x {b.state} bytes x {share}", states.optimizer, "bytes"),
    )
