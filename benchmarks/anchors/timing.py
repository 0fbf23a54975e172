"""Predicted tokens a second of an anchor: our formulas, and for FSDP the gathers that our library does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from anchors.programs import PROGRAMS, Program
from anchors.rows import Anchor
from lightning_megatron.tools.planning.core.device_file import DeviceSpec, Efficiency, Link, load_device
from lightning_megatron.tools.planning.core.parameters import rank_sizes
from lightning_megatron.tools.planning.time.communication import Groups
from lightning_megatron.tools.planning.time.sizes import Sizes
from lightning_megatron.tools.planning.time.software import Software
from lightning_megatron.tools.planning.time.step import TimeEstimate, time_of


@dataclass(frozen=True)
class Constants:
    """Fitted numbers.

    Attributes:
        devices: the three constants of each device and number format, by ``device/format``.
        programs: constants of programs, by ``program/name``: ``passes`` (bytes of elementwise kernels), ``attention``
            (its speed over that of the device file), ``rowwise`` (speed of fp8 that is scaled by rows), ``step``
            (seconds of the host's loop), ``kernels`` (of a layer), ``network`` (bytes a second between nodes).
    """

    devices: Mapping[str, Efficiency] = field(default_factory=dict)
    programs: Mapping[str, float] = field(default_factory=dict)

    def of(self, program: str, name: str, default: float) -> float:
        """A constant of a program."""
        return self.programs.get(f"{family(program)}/{name}", default)


def family(program: str) -> str:
    """Name under which a program has its constants: NeMo and Megatron Bridge run Megatron-LM's layers."""
    return "megatron" if program == "nemo" else program


@cache
def base_device(name: str) -> DeviceSpec:
    """A device file, or a variant of one that only a source has."""
    if name == "h100-500w":  # 96 GB of HBM2e at 2.4 TB/s and 500 W: power, not the datasheet, bounds its products
        return replace(load_device("h100"), name=name, memory_bandwidth=2.4e12)
    if name == "h800":  # an H100 whose NVLink is 400 GB/s both ways
        return replace(load_device("h100"), name=name, within_node=Link(200e9, 5e-6))
    if name == "h100-slow-network":  # nodes joined by a cloud's network
        return replace(load_device("h100"), name=name)
    return load_device(name)


def estimate(anchor: Anchor, constants: Constants | None = None) -> TimeEstimate:
    """Predicted time of a step."""
    constants = constants or Constants()
    program = PROGRAMS[anchor.program]
    device = base_device(anchor.device)
    # An A100's constants come from llm-foundry alone, so that its attention is the device's own there.
    speed = constants.of(anchor.program, "attention", 1.0) if anchor.device.startswith("h") else 1.0
    efficiency = {}
    for dtype in device.efficiency:
        each = constants.devices.get(f"{anchor.device}/{dtype}", device.efficiency[dtype])
        rowwise = constants.of(anchor.program, "rowwise", 1.0) if _is_rowwise(anchor) else 1.0
        matmul = each.matmul * (rowwise if dtype == "fp8" else 1.0)
        efficiency[dtype] = replace(each, matmul=matmul, attention=each.attention * speed)
    network = constants.of(anchor.program, "network", device.between_nodes.bandwidth)
    device = replace(
        device,
        efficiency=efficiency,
        step_seconds=constants.of(anchor.program, "step", device.step_seconds),
        between_nodes=replace(device.between_nodes, bandwidth=network),
    )
    software = software_of(anchor, program, constants)
    found = time_of(anchor.job, device, software)
    if anchor.program == "nemo" and anchor.job.layout.ep > 1:
        found = with_cause(found, "ep", found.by_cause["ep"] * sent_once(anchor, device))
    return with_fsdp(anchor, found, device) if is_fsdp(anchor, program) else found


def _is_rowwise(anchor: Anchor) -> bool:
    return "rowwise" in (anchor.row.get("precision") or "")


def software_of(anchor: Anchor, program: Program, constants: Constants) -> Software:
    """Kernels of a row: those of the program, with what its notes say of this row."""
    notes = anchor.row.get("notes") or ""
    software = replace(
        program.software,
        passes=constants.of(anchor.program, "passes", program.software.passes),
        kernels=int(constants.of(anchor.program, "kernels", program.software.kernels)),
        expert_kernels=int(constants.of(anchor.program, "expert_kernels", program.software.expert_kernels)),
    )
    if anchor.program == "torchtitan":
        if "async TP" in notes:
            software = replace(software, tp_overlap=0.7)
        if "eager" in notes:
            software = replace(software, passes=software.passes * 1.5, kernels=60)
    return software


def sent_once(anchor: Anchor, device: DeviceSpec) -> float:
    """Share of an all-to-all that is left if a token is sent once to each node, and to its experts from there (DeepEP).

    With ``N`` nodes and ``k`` experts chosen evenly ``(N - 1)(1 - (1 - 1/N)^k)`` other nodes get it in place of
    ``k (N - 1) / N`` copies that would leave the node.
    """
    group = Groups(Sizes(anchor.job)).experts
    nodes = group.size / group.in_a_node(device)
    chosen = anchor.job.config.moe_router_topk
    return 1.0 if nodes <= 1 else (1 - (1 - 1 / nodes) ** chosen) * nodes / chosen


def with_cause(found: TimeEstimate, name: str, seconds: float) -> TimeEstimate:
    """The estimate with another time for one cause."""
    causes = {**found.by_cause, name: seconds}
    step = sum(causes.values())
    slower = found.step / step
    return TimeEstimate(causes, step, found.tokens_per_second * slower, found.mfu * slower, found.hidden)


def is_fsdp(anchor: Anchor, program: Program) -> bool:
    """True if the row's parameters are sharded over data-parallel ranks."""
    return program.fsdp and anchor.job.layout.data_parallel_size * anchor.job.layout.cp > 1


def with_fsdp(anchor: Anchor, found: TimeEstimate, device: DeviceSpec) -> TimeEstimate:
    """The estimate with the gathers of each micro-batch in place of one sum and one gather a step.

    A forward and a backward each gather the parameters, and the backward scatters the gradients; a step waits for the
    part that exceeds the overlapping computation, and at least for all communication of one layer.
    """
    job = anchor.job
    sizes = Sizes(job)
    causes = found.by_cause
    beside = sum(causes[name] for name in ("compute", "recompute", "tp", "cp", "ep")) / job.num_micro_batches
    held = [stage for stage in job.stages if stage.rank == job.layout.pp - 1]
    count = sum(rank_sizes(sizes.config, sizes.layout, tuple(held)))
    group = Groups(sizes).dp
    layers = max(1, sum(len(stage.layers) for stage in held))
    sent = 2 if "PURE" in (anchor.row.get("sharding") or "") else 4
    gather = group.gather(device, count * 2) + (layers - 1) * group.latency(device)
    scatter = group.gather(device, count * sent) + (layers - 1) * group.latency(device)
    share = beside * (1 - 1 / layers)
    waits = max(gather - share / 3, gather / layers) + max(
        gather + scatter - share * 2 / 3, (gather + scatter) / layers
    )
    return with_cause(found, "dp", job.num_micro_batches * waits)


def tokens_per_second(anchor: Anchor, constants: Constants | None = None) -> float:
    """Predicted tokens a second and device."""
    return estimate(anchor, constants).tokens_per_second / anchor.job.world_size
