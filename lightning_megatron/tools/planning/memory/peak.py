"""The fullest moment of a training step on one rank.

The actions of the rank are those that ``pipeline/runtime.py`` runs. During each action the rank also holds activations
of forwards whose backward has not run, and messages that have arrived or are being sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from operator import mul

from lightning_megatron.pipeline.schedule import schedule_kind
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.core.parameters import fp8_weights
from lightning_megatron.tools.planning.core.term import Term
from lightning_megatron.tools.planning.memory.ends import embedding_end, waiting_gradient
from lightning_megatron.tools.planning.memory.estimate import MemoryEstimate
from lightning_megatron.tools.planning.memory.formulas import BATCH, COMMUNICATION, FP8, PIPELINE, activation_formulas
from lightning_megatron.tools.planning.memory.shapes import ACCELERATOR, Kernels, shapes_of
from lightning_megatron.tools.planning.memory.stage import DEFERRED, WORKING, stage_bytes
from lightning_megatron.tools.planning.memory.states import StateBytes, state_bytes, state_terms
from lightning_megatron.tools.planning.memory.steps import Moment, moments_of

FP8_BYTES = 2
"""Bytes of a weight in fp8 while a step lasts: in the format of the forward, and in that of the backward."""


def memory_of(job: PlannedJob, pipeline_rank: int, kernels: Kernels = ACCELERATOR) -> MemoryEstimate:
    """Memory of a rank at the fullest moment of a step.

    Args:
        job: the training job.
        pipeline_rank: position on the pipeline axis.
        kernels: kernels of the device.
    """
    states = state_bytes(job, pipeline_rank)
    tables = {BATCH: _batch_bytes(job), FP8: FP8_BYTES * fp8_weights(job, pipeline_rank)}
    lasting = states.total + sum(tables.values())
    fullest = _RankPeak(job, pipeline_rank, kernels)
    ends = _end_of_step(job, pipeline_rank, states, kernels)
    causes: Counter[str] = Counter(
        {
            "parameters": states.parameters,
            "gradients": states.gradients,
            "main parameters": states.main,
            "optimizer state": states.optimizer,
        }
    )
    causes.update(tables)
    if ends > fullest.most:
        extra: Mapping[str, int] = {COMMUNICATION: ends}
        moment = "reduction of gradients"
    else:
        extra, moment = fullest.causes, fullest.moment
    causes.update(extra)
    by_cause = {cause: size for cause, size in causes.items() if size}
    formulas = activation_formulas(shapes_of(job, kernels))
    terms = state_terms(job, states) + tuple(
        Term(cause, formulas[cause], size, "bytes") for cause, size in {**tables, **extra}.items() if size
    )
    return MemoryEstimate(by_cause, lasting + max(ends, fullest.most), moment, states.total, terms)


def worst_memory(
    job: PlannedJob, kernels: Kernels = ACCELERATOR, enough: float = float("inf")
) -> tuple[int, MemoryEstimate]:
    """The pipeline rank that needs most memory, and its estimate; or the first one that needs more than ``enough``."""
    worst: tuple[int, MemoryEstimate] | None = None
    for rank in most_loaded_ranks(job):
        found = memory_of(job, rank, kernels)
        if worst is None or found.peak > worst[1].peak:
            worst = rank, found
        if found.peak > enough:
            break
    assert worst is not None
    return worst


def most_loaded_ranks(job: PlannedJob) -> tuple[int, ...]:
    """Pipeline ranks, one of which needs most memory: the last, and the first of each kind of stages.

    Of ranks with the same kind of stages, an earlier one has at least as many activations in flight.
    """
    pp, layers = job.layout.pp, job.config.layers
    seen: dict[tuple[object, ...], int] = {}
    for rank in range(pp):
        kinds = tuple(
            (frozenset(Counter(layers[number] for number in stage.layers).items()), stage.has_embedding, stage.has_loss)
            for stage in job.stages_of(rank)
        )
        seen.setdefault(kinds, rank)
    return tuple(sorted({*seen.values(), pp - 1}))


def _batch_bytes(job: PlannedJob) -> int:
    """Tokens and labels of a batch, and the table of rotary angles."""
    samples = job.micro_batch_size * job.num_micro_batches
    ids = 16 * samples * job.seq_length
    if job.config.position_embedding != "rope":
        return ids
    return ids + 2 * job.seq_length * job.config.head_dim * job.item_bytes.params


def _end_of_step(job: PlannedJob, rank: int, states: StateBytes, kernels: Kernels) -> int:
    """Temporary bytes while gradients are summed over ranks, on top of the persistent ones."""
    grads, item, main = job.item_bytes.grads, job.sent_grad_bytes, job.item_bytes.main
    copies = states.sizes.sent * item if item != grads else 0
    received = states.sizes.sent * item if kernels.copies_pieces and job.distributed_optimizer else 0
    converted = states.sizes.owned * main if main not in (0, grads) else 0  # the optimizer takes main values' dtype
    found = max(copies + received, states.sizes.late * grads, converted)
    stages = job.stages_of(rank)
    if not (received and _sends_in_backward(job) and stages[0].has_embedding):
        return found
    # The other buckets are being sent when the last gradient, that of the embedding, is computed.
    x = shapes_of(job, kernels)
    is_tied = job.config.tie_embeddings and stages[-1].has_loss
    working = embedding_end(x, is_tied=is_tied).backward + (waiting_gradient(x) if is_tied else 0)
    sizes = states.sizes
    under_way = (copies + received) // max(sizes.sent, 1) * (sizes.sent - sizes.waiting)
    return max(found, under_way + working)


def _sends_in_backward(job: PlannedJob) -> bool:
    """True if buckets are sent during the last backward."""
    return job.overlap_grad_reduce and job.layout.data_parallel_size * job.layout.cp > 1


class _RankPeak:
    """The moment of a step at which a rank holds most bytes.

    Attributes:
        most: bytes at that moment, on top of the persistent ones.
        moment: name of the moment.
    """

    def __init__(self, job: PlannedJob, rank: int, kernels: Kernels) -> None:
        self._x = shapes_of(job, kernels)
        splits = schedule_kind(job.schedule, job.layout.vpp).splits_backward and job.layout.pp > 1
        stages = job.stages_of(rank)
        # The first stage runs both halves of a backward one after the other, and so defers nothing.
        deferring = {stage.stage: splits and stage.stage > 0 for stage in stages}
        self._stages = {s.stage: stage_bytes(self._x, job.recompute, s, deferring[s.stage]) for s in stages}
        self._kept = [stage.size for stage in self._stages.values()]
        self._deferred = [stage.deferred for stage in self._stages.values()]
        # A bucket of the output layer is being received while the last backward goes on through the layers.
        head = 0 if job.config.tie_embeddings else self._x.vocabulary * job.sent_grad_bytes
        receives = kernels.copies_pieces and job.distributed_optimizer and _sends_in_backward(job)
        self._received = {stage.stage: head if receives and stage.has_loss else 0 for stage in stages}
        layout = job.layout
        moments = moments_of(job.schedule_name, layout.pp, layout.vpp, job.num_micro_batches, rank)
        self._fullest = max(moments, key=self._bytes)
        self.most = self._bytes(self._fullest)

    def _bytes(self, moment: Moment) -> int:
        """Bytes of a moment, on top of the persistent ones."""
        held = sum(map(mul, moment.held, self._kept))
        deferred = sum(map(mul, moment.deferred, self._deferred))
        return held + deferred + moment.messages * self._x.residual + self._working(moment)

    def _working(self, moment: Moment) -> int:
        """Temporaries of the action that runs."""
        stage = self._stages[moment.stage]
        if moment.kind == "F":
            return stage.forward - stage.size
        if moment.kind == "W":
            return stage.weight_gradient
        received = self._received[moment.stage] if moment.ends else 0
        return stage.backward - stage.size + received

    @property
    def moment(self) -> str:
        """Name of the fullest moment."""
        words = {"F": "forward", "B": "backward", "W": "weight gradients"}
        return f"{words[self._fullest.kind]} of stage {self._fullest.stage}"

    @property
    def causes(self) -> dict[str, int]:
        """Bytes of the fullest moment by cause."""
        moment, stages = self._fullest, self._stages.values()
        found: Counter[str] = Counter()
        for stage, held, deferred in zip(stages, moment.held, moment.deferred, strict=True):
            for cause, size in stage.kept.items():
                found[cause] += held * size
            found[DEFERRED] += deferred * stage.deferred
        found[PIPELINE] += moment.messages * self._x.residual
        found[WORKING] += self._working(moment)
        return {cause: size for cause, size in found.items() if size}
