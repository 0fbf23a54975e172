"""Time of one optimizer step of a job on a device, by cause."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.stage import StageLayers
from lightning_megatron.tools.planning.core.device_file import DeviceSpec
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.core.parameters import rank_sizes
from lightning_megatron.tools.planning.core.term import Term
from lightning_megatron.tools.planning.time.communication import (
    Exposed,
    layer_communication,
    message_seconds,
    repeated_communication,
)
from lightning_megatron.tools.planning.time.compute import LayerWork, embedding, joined_tokens, layer_work, output_layer
from lightning_megatron.tools.planning.time.gradients import Overlap, gradient_seconds
from lightning_megatron.tools.planning.time.optimizer import (
    data_seconds,
    expert_layers,
    optimizer_seconds,
)
from lightning_megatron.tools.planning.time.pipeline import StageCosts, pipeline_seconds
from lightning_megatron.tools.planning.time.sizes import Sizes
from lightning_megatron.tools.planning.time.software import Software, software_of

_AXES = ("tp", "cp", "ep")
_FORMULAS = {
    "compute": "micro-batches x sum over layers of FLOPs / (peak x efficiency) + bytes / (bandwidth x efficiency)",
    "recompute": "micro-batches x forward of the parts that the backward computes again, with their communication",
    "tp": "micro-batches x layers x (gathers and scatters of T h values over tp that no product hides)",
    "cp": "micro-batches x layers x (keys, values and their gradients over cp that no attention hides)",
    "ep": "micro-batches x layers x (tokens to their experts and back, forward and backward)",
    "pp": "time of the pipeline with messages minus without",
    "bubble": "time of the pipeline without messages minus the busiest rank's own work",
    "dp": "gradients and parameters over dp x cp that backward and forward do not hide, at least one bucket",
    "optimizer": "bytes of gradients, main parameters and states of the rank's shard / (bandwidth x efficiency)",
    "data": "bytes of tokens and labels / 5 GB/s",
    "host": "the host's own loop, once a step",
}


@dataclass(frozen=True)
class TimeEstimate:
    """Predicted time of one optimizer step.

    Attributes:
        by_cause: seconds by cause, of the busiest pipeline rank; they sum to ``step``.
        step: seconds of a step.
        tokens_per_second: tokens a second of the whole job.
        mfu: FLOPs of the model (the causal half of attention counted) over the peak of all devices.
        hidden: seconds of data-parallel communication that overlap with computation.
    """

    by_cause: dict[str, float]
    step: float
    tokens_per_second: float
    mfu: float
    hidden: float

    @property
    def terms(self) -> tuple[Term, ...]:
        """Each cause with its formula."""
        return tuple(Term(name, _FORMULAS[name], value, "s") for name, value in self.by_cause.items())


@dataclass(frozen=True)
class _Layer:
    """Seconds of a layer of one kind."""

    forward: float
    backward: float
    again: float
    again_whole: float
    exposed: Exposed


@dataclass
class _Stage:
    """Seconds of one micro-batch on a stage."""

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    axes_forward: tuple[float, ...] = (0.0, 0.0, 0.0)
    axes_backward: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def whole_forward(self) -> float:
        """Seconds with exposed communication."""
        return self.forward + sum(self.axes_forward)

    @property
    def whole_backward(self) -> float:
        """Seconds with exposed communication and recomputation."""
        return self.backward + self.again + sum(self.axes_backward)


def time_of(job: PlannedJob, device: DeviceSpec, software: Software | None = None) -> TimeEstimate:
    """Predict the time of one optimizer step, in less than a millisecond.

    Args:
        device: kind of device.
        software: properties of the kernels; ``None`` for those of this library in eager mode.
    """
    software = software or software_of(device)
    sizes = Sizes(job)
    kinds = {kind: _layer(sizes, device, software, kind) for kind in _kinds(job)}
    stages = [_stage(sizes, device, software, stage, kinds) for stage in job.stages]
    pp, m = job.layout.pp, job.num_micro_batches
    forward = [each.whole_forward for each in stages]
    backward = [each.whole_backward for each in stages]
    free = StageCosts(pp, forward, backward)
    rank = max(range(pp), key=free.work)
    ideal = pipeline_seconds(job.schedule_name, free, m)
    costs = StageCosts(pp, forward, backward, message_seconds(sizes, device))
    ran = pipeline_seconds(job.schedule_name, costs, m) if pp > 1 else ideal
    own = stages[rank::pp]
    causes = {
        "compute": m * sum(each.forward + each.backward for each in own),
        "recompute": m * sum(each.again for each in own),
    }
    for number, axis in enumerate(_AXES):
        causes[axis] = m * sum(each.axes_forward[number] + each.axes_backward[number] for each in own)
    causes["pp"] = ran - ideal
    causes["bubble"] = ideal - m * free.work(rank)
    dense, experts = rank_sizes(job.config, job.layout, job.stages_of(rank))
    beside = Overlap(sum(forward[rank::pp]), sum(backward[rank::pp]))
    causes["dp"], sent = gradient_seconds(sizes, device, dense, experts, beside)
    causes["optimizer"] = optimizer_seconds(sizes, device, dense, experts)
    causes["data"] = data_seconds(sizes)
    causes["host"] = device.step_seconds
    step = sum(causes.values())
    rate = job.tokens_per_step / step
    peak = device.peak(sizes.matmul_dtype) * job.world_size
    mfu = rate * job.config.flops_per_token(job.seq_length) / peak
    return TimeEstimate(causes, step, rate, mfu, sent - causes["dp"])


def _kinds(job: PlannedJob) -> set[bool]:
    """Kinds of layers in the model: with experts, without."""
    with_experts = job.config.num_expert_layers
    return {True} if with_experts == job.config.num_layers else {False, with_experts > 0}


def _layer(sizes: Sizes, device: DeviceSpec, software: Software, has_experts: bool) -> _Layer:
    work: LayerWork = layer_work(sizes, software, has_experts)
    exposed = layer_communication(sizes, device, software, work, has_experts)
    forward = work.forward.seconds(device, sizes)
    backward = work.backward.seconds(device, sizes)
    again = work.again(sizes, has_experts).seconds(device, sizes) + repeated_communication(sizes, exposed, has_experts)
    return _Layer(forward, backward, again, forward + sum(exposed.forward.values()), exposed)


def _stage(
    sizes: Sizes, device: DeviceSpec, software: Software, stage: StageLayers, kinds: dict[bool, _Layer]
) -> _Stage:
    with_experts = expert_layers(sizes, stage)
    counts = {True: with_experts, False: len(sizes.layers_of(stage)) - with_experts}
    plan = sizes.job.recompute
    whole = 0.0
    if plan.granularity == "full":
        whole = 1.0 if plan.method == "uniform" else min(1.0, plan.num_layers / max(1, len(stage.layers)))
    made = _Stage()
    for kind, layer in kinds.items():
        count = counts[kind]
        made.forward += count * layer.forward
        made.backward += count * layer.backward
        made.again += count * (layer.again + whole * layer.again_whole)
        made.axes_forward = _add(made.axes_forward, layer.exposed.forward, count)
        made.axes_backward = _add(made.axes_backward, layer.exposed.backward, count)
    further = sizes.config.mtp_num_layers * stage.has_loss
    times = {embedding: stage.has_embedding + further, output_layer: stage.has_loss + further, joined_tokens: further}
    for part, count in times.items():
        if count:
            work = part(sizes, software)
            made.forward += count * work.forward.seconds(device, sizes)
            made.backward += count * work.backward.seconds(device, sizes)
    return made


def _add(sums: tuple[float, ...], more: dict[str, float], times: int) -> tuple[float, ...]:
    return tuple(each + times * more[axis] for each, axis in zip(sums, _AXES, strict=True))
