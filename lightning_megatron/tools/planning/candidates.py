"""Candidate layouts of a search, and the error that explains why there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import ceil
from typing import Any, NamedTuple

from lightning_megatron.config.layout import BatchShape, ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, divisors, multiples_around, nearest_to
from lightning_megatron.pipeline.partition import BALANCED, LayerSplit
from lightning_megatron.pipeline.schedule import SCHEDULES
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.request import PlanRequest

LARGEST_MICRO_BATCH = 16
MOST_CHUNKS = 8
FEWEST_TOKENS = 1024
"""Fewest tokens of a sequence shard under context parallelism: below it, kernels and messages become too short."""


class LayoutCandidate(NamedTuple):
    """One layout with its batches, not yet checked as a whole.

    Attributes:
        tp, pp, cp, ep, etp, dp, vpp: sizes of the layout.
        cp_comm_type: communication of context-parallel attention.
        balanced: True if stages are split by work, False if each gets the same number of layers.
        schedule: pipeline schedule; ``None`` for the default.
        micro_batch_size: samples of one forward.
        recompute: granularity of recomputation.
        recomputed: recomputed layers of each stage if whole layers are recomputed; ``None`` for all.
    """

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    dp: int
    vpp: int
    cp_comm_type: str
    balanced: bool
    schedule: str | None
    micro_batch_size: int
    recompute: str | None
    recomputed: int | None = None

    @property
    def without_recompute(self) -> LayoutCandidate:
        """This candidate without recomputation."""
        return self._replace(recompute=None, recomputed=None)

    @property
    def recompute_plan(self) -> RecomputePlan:
        """Plan of the recomputation."""
        if self.recomputed is None:
            return RecomputePlan(self.recompute)
        return RecomputePlan(self.recompute, "block", self.recomputed)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Number of ranks on each axis: tp, pp, cp, ep, etp, dp."""
        return self.tp, self.pp, self.cp, self.ep, self.etp, self.dp


@dataclass(frozen=True)
class CandidateGroup:
    """Candidates that differ only in their micro-batch size and in what they recompute.

    Attributes:
        first: the candidate with the smallest micro-batch and the least recomputation.
        micro_batch_sizes: micro-batch sizes, in ascending order.
        recomputes: granularities of recomputation, the least first.
    """

    first: LayoutCandidate
    micro_batch_sizes: tuple[int, ...]
    recomputes: tuple[str | None, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Number of ranks on each axis, the same for all candidates."""
        return self.first.ranks

    def __len__(self) -> int:
        return len(self.micro_batch_sizes) * len(self.recomputes)

    def __iter__(self) -> Iterator[LayoutCandidate]:
        for micro in self.micro_batch_sizes:
            for recompute in self.recomputes:
                yield self.first._replace(micro_batch_size=micro, recompute=recompute)


def job_of_candidate(request: PlanRequest, candidate: LayoutCandidate) -> PlannedJob:
    """The job of a candidate.

    Raises:
        ConfigError: with every reason why it is impossible.
    """
    sizes: dict[str, Any] = {name: getattr(candidate, name) for name in ("tp", "pp", "cp", "ep", "etp", "dp", "vpp")}
    layout = ParallelLayout(**sizes, cp_comm_type=candidate.cp_comm_type)
    if request.seq_length % layout.sequence_multiple and not request.config.num_experts:
        layout = replace(layout, sequence_parallel=False)
    samples = request.global_batch_size // candidate.dp
    return PlannedJob(
        request.config,
        layout.resolve(request.num_devices),
        request.seq_length,
        candidate.micro_batch_size,
        samples // candidate.micro_batch_size,
        precision=request.precision,
        fp8=request.fp8,
        schedule=candidate.schedule,
        split=LayerSplit(layout=BALANCED) if candidate.balanced else LayerSplit(),
        recompute=candidate.recompute_plan,
        attention=request.attention,
    )


def layout_candidates(request: PlanRequest, comm_type: Callable[[int, int], str]) -> Iterator[CandidateGroup]:
    """Every candidate, in groups, in no particular order; sizes that are impossible by themselves are left out.

    Args:
        request: model, devices and batches.
        comm_type: function of tp and cp that chooses the communication of context-parallel attention.
    """
    sizes = axis_sizes(request)
    for tp in sizes["tp"]:
        for pp in sizes["pp"]:
            for cp in sizes["cp"]:
                dp, rest = divmod(request.num_devices, tp * pp * cp)
                if dp and not rest and request.global_batch_size % dp == 0:
                    yield from _groups(request, tp, pp, cp, dp, comm_type(tp, cp))


def axis_sizes(request: PlanRequest) -> dict[str, list[int]]:
    """Sizes of tp, pp and cp that are possible, each considered by itself."""
    config, fixed = request.config, request.fixed
    found: dict[str, list[int]] = {}
    for name in ("tp", "pp", "cp"):
        known = [fixed[name]] if name in fixed else divisors(request.num_devices)
        found[name] = [size for size in known if not axis_problems(request, name, size)]
    if "tp" not in fixed:  # every layer waits for eight messages over tp, which are several times slower between nodes
        found["tp"] = [size for size in found["tp"] if size <= request.device.devices_per_node]
    if "cp" not in fixed:
        found["cp"] = [size for size in found["cp"] if size == 1 or request.seq_length // size >= FEWEST_TOKENS]
    if "pp" not in fixed:
        found["pp"] = [size for size in found["pp"] if size <= config.num_layers]
    return found


def axis_problems(request: PlanRequest, name: str, size: int) -> list[Problem]:
    """Reasons why a size of tp, pp, cp or dp is impossible for the model and its batches, whatever the other sizes."""
    config, devices = request.config, request.num_devices
    if size < 1 or devices % size:
        return [Problem(name, size, f"does not divide {devices} devices", nearest_to(size, divisors(devices)))]
    if name == "dp":
        batch = request.global_batch_size
        reason = f"a global batch of {batch} samples does not split over {size} replicas"
        near = multiples_around(batch, size)
        return [Problem("global_batch_size", batch, reason, near)] if batch % size else []
    if name == "pp":
        fewest = 1 if size == 1 else size - 1  # a balanced split may leave the loss alone in the last stage
        reason = f"{config.num_layers} layers are fewer than the stages"
        return [Problem("pp", size, reason, (config.num_layers,))] if config.num_layers < fewest else []
    comm = "a2a" if name == "cp" and config.attention_dropout else "p2p"
    layout = ParallelLayout(**{name: size}, cp_comm_type=comm)  # type: ignore[arg-type]
    if request.seq_length % layout.sequence_multiple and not config.num_experts:
        layout = replace(layout, sequence_parallel=False)
    return layout.problems(model=config, batch=BatchShape(seq_length=request.seq_length))


def _groups(request: PlanRequest, tp: int, pp: int, cp: int, dp: int, comm: str) -> Iterator[CandidateGroup]:
    samples = request.global_batch_size // dp
    micros = tuple(size for size in divisors(samples) if size <= LARGEST_MICRO_BATCH)
    if "micro_batch_size" in request.fixed:
        micros = tuple(size for size in (request.fixed["micro_batch_size"],) if samples % size == 0)
    if not micros:
        return
    granularities = recomputes(request)
    for ep, etp in _expert_sizes(request, tp, cp * dp * tp):
        for vpp, balanced, schedule in _pipelines(request, pp):
            first = LayoutCandidate(tp, pp, cp, ep, etp, dp, vpp, comm, balanced, schedule, micros[0], granularities[0])
            yield CandidateGroup(first, micros, granularities)


def recomputes(request: PlanRequest) -> tuple[str | None, ...]:
    """Granularities of recomputation that a search tries, the least first."""
    if "recompute" in request.fixed:
        return (request.fixed["recompute"],)
    scores = ("selective",) * (request.attention == "reference")
    return (None, *scores, "moe" if request.config.num_experts else "mlp", "full")


def with_fewer_layers(request: PlanRequest, candidate: LayoutCandidate) -> list[LayoutCandidate]:
    """Variants of a full-recompute candidate with fewer recomputed layers a stage: one, two, ... all but one."""
    if candidate.recompute != "full" or "recompute" in request.fixed:
        return []
    largest = ceil(request.config.num_layers / (candidate.pp * candidate.vpp))
    return [candidate._replace(recomputed=number) for number in range(1, largest)]


def comm_types(request: PlanRequest, tp: int, cp: int) -> list[str]:
    """Possible values of ``cp_comm_type`` for these sizes of tp and cp."""
    if cp == 1:
        return ["p2p"]
    if "cp_comm_type" in request.fixed:
        return [request.fixed["cp_comm_type"]]
    local = request.config.num_attention_heads // tp
    ring = [] if request.config.attention_dropout else ["p2p"]
    return [*ring, "all_gather", *(["a2a"] if local % cp == 0 else [])]


def _expert_sizes(request: PlanRequest, tp: int, ranks: int) -> list[tuple[int, int]]:
    """Sizes of ep and etp that divide the ``ranks`` of ``tp x cp x dp``."""
    config, fixed = request.config, request.fixed
    if not config.num_experts:
        return [(1, tp)]
    eps = [fixed["ep"]] if "ep" in fixed else divisors(config.num_experts)
    etps = [fixed["etp"]] if "etp" in fixed else divisors(tp)
    return [(ep, etp) for ep in eps for etp in etps if ranks % (ep * etp) == 0]


def _pipelines(request: PlanRequest, pp: int) -> list[tuple[int, bool, str | None]]:
    """Choices of vpp, of ``balanced`` and of the schedule for a size of pp."""
    return _pipelines_of(request.config, pp, request.fixed.get("vpp"), request.fixed.get("pipeline_schedule", "any"))


@lru_cache(maxsize=64)
def _pipelines_of(
    config: TransformerConfig, pp: int, only_vpp: int | None, only_schedule: str | None
) -> list[tuple[int, bool, str | None]]:
    if pp == 1:
        return [(1, False, None)] if only_vpp in (None, 1) else []
    layers, split_backwards = config.num_layers, [kind.name for kind in SCHEDULES if kind.splits_backward]
    found: list[tuple[int, bool, str | None]] = []
    for vpp in (only_vpp,) if only_vpp else range(1, MOST_CHUNKS + 1):
        even = layers % (pp * vpp) == 0
        uneven = layers >= pp * vpp - 1 and (not even or config.loss_cost > 0.5)
        schedules = [None, *split_backwards * (vpp == 1)] if only_schedule == "any" else [only_schedule]
        splits = [False] * even + [True] * uneven
        if not even and vpp > 2 and found:
            continue  # an uneven split gains little from many small chunks
        found += [(vpp, balanced, schedule) for balanced in splits for schedule in schedules]
    return found


def impossible(request: PlanRequest) -> ConfigError:
    """The error of a request without a possible layout: each axis checked with its fixed size, or with all devices."""
    found: list[Problem] = []
    for name in ("tp", "pp", "cp", "dp"):
        size = request.fixed.get(name, request.num_devices)
        found += axis_problems(request, name, size)
    groups = layout_candidates(request, lambda tp, cp: comm_types(request, tp, cp)[0])
    for candidate in chain.from_iterable(groups):
        try:
            job_of_candidate(request, candidate)
        except ConfigError as error:
            found += error.problems
        if len(found) > 12:
            break
    unique = {(problem.argument, problem.reason): problem for problem in found}
    return ConfigError(list(unique.values())[:12])
