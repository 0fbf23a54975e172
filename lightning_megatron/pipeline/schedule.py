"""Pipeline schedules as pure functions of sizes: the order of the actions of every rank.

Three things define a schedule: the order of a rank's forwards, the order of its backwards, and the number of forwards
that run first (warm-up). Then one forward and one backward alternate (steady state), and the remaining backwards follow
(cool-down). Zero-bubble also splits every backward in two, and defines how far the second half lags behind.

Sources: GPipe https://arxiv.org/abs/1811.06965; 1F1B https://arxiv.org/abs/1806.03377 (with the flush of
https://arxiv.org/abs/2006.09503); interleaved 1F1B https://arxiv.org/abs/2104.04473; zero bubble (ZB-H1)
https://arxiv.org/abs/2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_megatron.errors import ConfigError, Problem, nearest_names, raise_if_any
from lightning_megatron.pipeline.action import Action, Schedule

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
"""Names of the schedules, for annotations; ``SCHEDULES`` describes each."""


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule for any sizes; other code depends on these fields, never on the name.

    Attributes:
        name: name in the strategy's arguments.
        build: actions of every rank, from ``pp``, ``vpp``, the number of micro-batches and the size of their groups.
        bubble: function of the times of ``F``, ``I`` and ``W`` that returns the factor of the paper's bubble
            ``(pp - 1) / (num_microbatches * vpp)``; ``None`` where no paper gives one.
        chunks: least and largest number of chunks of a rank; ``None`` for any number.
        alternates: True if forwards and backwards alternate, so that a rank holds few micro-batches at once.
        splits_backward: True if backwards are split into ``I`` and ``W``.
        needs_pp: True if the paper's bubble holds only for at least ``pp`` micro-batches.
    """

    name: str
    build: Callable[[int, int, int, int | None], Schedule]
    bubble: Callable[[float, float, float], float] | None = None
    chunks: tuple[int, int | None] = (1, 1)
    alternates: bool = True
    splits_backward: bool = False
    needs_pp: bool = False

    def takes(self, vpp: int) -> bool:
        """True if a rank may hold this number of chunks."""
        least, most = self.chunks
        return least <= vpp and (most is None or vpp <= most)


def schedule_kind(name: str | None, vpp: int) -> ScheduleKind:
    """The schedule of a name, with the default filled in: ``"interleaved"`` if ``vpp > 1``, else ``"1f1b"``.

    Raises:
        ConfigError: for an unknown name.
    """
    name = name or ("interleaved" if vpp > 1 else "1f1b")
    for kind in SCHEDULES:
        if kind.name == name:
            return kind
    raise ConfigError([_unknown(name)])


def build_schedule(
    name: str | None, pp: int, vpp: int, num_microbatches: int, microbatch_group_size: int | None = None
) -> Schedule:
    """Build a schedule by its name.

    Args:
        name: name in ``SCHEDULES``; ``None`` means ``"interleaved"`` if ``vpp > 1``, else ``"1f1b"``.
        pp: pipeline ranks.
        vpp: chunks a rank holds.
        num_microbatches: micro-batches of one step.
        microbatch_group_size: see :func:`interleaved`; schedules with one chunk a rank have no groups.

    Returns:
        The actions of every pipeline rank.

    Raises:
        ConfigError: with every rule that the sizes break.
    """
    raise_if_any(schedule_problems(name, pp, vpp, num_microbatches, microbatch_group_size))
    kind = schedule_kind(None if pp == 1 and name == "interleaved" else name, vpp)
    return kind.build(pp, vpp, num_microbatches, microbatch_group_size)


def schedule_problems(
    name: str | None, pp: int, vpp: int, num_microbatches: int, microbatch_group_size: int | None = None
) -> list[Problem]:
    """Every rule that the arguments break; empty if :func:`build_schedule` can build the schedule."""
    kind = next((kind for kind in SCHEDULES if kind.name == name), None)
    found = [] if name is None or kind is not None else [_unknown(name)]
    sizes = {"pp": pp, "vpp": vpp, "num_microbatches": num_microbatches}
    too_small = [Problem(n, size, "a size must be at least 1", (1,)) for n, size in sizes.items() if size < 1]
    if too_small:
        return found + too_small
    found += _chunk_problems(kind, pp, vpp)
    if microbatch_group_size is not None and vpp == 1:
        reason = "micro-batches are grouped to alternate between chunks, and vpp=1 has one chunk: leave it out"
        found.append(Problem("microbatch_group_size", microbatch_group_size, reason, (None,)))
    elif microbatch_group_size is not None and microbatch_group_size < pp:
        reason = f"a group needs at least pp={pp} micro-batches: rank 0 would finish it before its first one returns"
        found.append(Problem("microbatch_group_size", microbatch_group_size, reason, (pp,)))
    return found


def _chunk_problems(kind: ScheduleKind | None, pp: int, vpp: int) -> list[Problem]:
    """Reasons why a rank cannot hold ``vpp`` chunks; ``kind`` is ``None`` for the default, which takes any number."""
    if vpp > 1 and pp == 1:
        reason = "interleaved chunks need a pipeline, and pp=1 has none: raise pp, or leave vpp out"
        return [Problem("vpp", vpp, reason, (1,))]
    if kind is None or pp == 1 or kind.takes(vpp):
        return []
    if vpp == 1:
        reason = "there is nothing to interleave with one chunk a rank: raise vpp, or choose '1f1b'"
        return [Problem("vpp", vpp, reason, (2,))]
    reason = f"this schedule runs one chunk a rank and vpp={vpp} asks for {vpp}: choose one that interleaves"
    return [Problem("pipeline_schedule", kind.name, reason, tuple(k.name for k in SCHEDULES if k.takes(vpp)))]


def gpipe(pp: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: simple, but the activations of all micro-batches are alive at once."""
    forwards, backwards = _chunks(pp, 1, [num_microbatches])
    warm_up = 0 if pp == 1 else num_microbatches
    return [_alternate(forwards[r], backwards[r], warm_up) for r in range(pp)]


def one_f_one_b(pp: int, num_microbatches: int) -> Schedule:
    """One forward, one backward: rank ``r`` holds the activations of at most ``pp - r`` micro-batches."""
    forwards, backwards = _chunks(pp, 1, [num_microbatches])
    return [_alternate(forwards[r], backwards[r], pp - 1 - r) for r in range(pp)]


def interleaved(pp: int, vpp: int, num_microbatches: int, microbatch_group_size: int | None = None) -> Schedule:
    """1F1B over ``vpp`` chunks a rank: the bubble shrinks ``vpp``-fold, messages grow ``vpp``-fold.

    A rank takes a group of micro-batches through its first chunk, then the same group through its next chunk, and so
    on. Megatron requires groups of ``pp``, which divide the number of micro-batches. It is enough that no group is
    smaller than ``pp`` (a chunk's last micro-batch must leave before the first one is back), so any number of
    micro-batches works if the remainder is spread over the groups: 10 on ``pp=4`` are 5 + 5.
    For every number of micro-batches from ``pp`` on the bubble is ``(pp - 1) / (num_microbatches * vpp)``.

    Args:
        pp: pipeline ranks, at least 2.
        vpp: chunks a rank holds.
        num_microbatches: micro-batches of one step; fewer than ``pp`` leave a larger bubble.
        microbatch_group_size: micro-batches of a group, at least ``pp`` (the default). Larger groups mean fewer
            switches between chunks and more activations in flight.
    """
    sizes = group_sizes(pp, num_microbatches, microbatch_group_size)
    forwards, backwards = _chunks(pp, vpp, sizes)
    warm_up = (vpp - 1) * sizes[0]
    return [_alternate(forwards[r], backwards[r], warm_up + 2 * (pp - 1 - r)) for r in range(pp)]


def zero_bubble(pp: int, num_microbatches: int, vpp: int = 1, microbatch_group_size: int | None = None) -> Schedule:
    """ZB-H1: every backward is split in two halves, and other stages wait only for the first.

    ``I`` goes up the pipeline as ``B`` does in 1F1B, in about half the time. Rank ``r`` defers ``r`` ``W``s and runs
    them when it would be idle. It holds the activations of at most ``pp`` micro-batches: more than rank ``r`` of 1F1B,
    but no more than rank 0 of 1F1B.
    """
    if pp == 1:
        return one_f_one_b(1, num_microbatches)
    sizes = [num_microbatches] if vpp == 1 else group_sizes(pp, num_microbatches, microbatch_group_size)
    forwards, backwards = _chunks(pp, vpp, sizes)
    warm_up = (vpp - 1) * sizes[0]
    return [_split_backwards(_alternate(forwards[r], backwards[r], warm_up + pp - 1 - r), lag=r) for r in range(pp)]


def forward_only(pp: int, vpp: int, num_microbatches: int) -> Schedule:
    """Forwards only, for evaluation, in the order of a training step."""
    raise_if_any(schedule_problems(None, pp, vpp, num_microbatches))
    return _chunks(pp, vpp, group_sizes(pp, num_microbatches))[0]


def group_sizes(pp: int, num_microbatches: int, microbatch_group_size: int | None = None) -> list[int]:
    """Sizes of the groups, larger ones first; none is below ``pp`` unless there are fewer micro-batches than that."""
    wanted = -(-num_microbatches // (microbatch_group_size or pp))
    count = max(1, min(wanted, num_microbatches // pp))
    size, remainder = divmod(num_microbatches, count)
    return [size + 1] * remainder + [size] * (count - remainder)


def _chunks(pp: int, vpp: int, sizes: Sequence[int]) -> tuple[Schedule, Schedule]:
    """Forwards and backwards of every rank: group by group, with chunks upwards and downwards within a group."""
    forwards: Schedule = [[] for _ in range(pp)]
    backwards: Schedule = [[] for _ in range(pp)]
    start = 0
    for size in sizes:
        group = range(start, start + size)
        for chunk in range(vpp):
            for rank in range(pp):
                forwards[rank] += [Action(chunk * pp + rank, "F", i) for i in group]
                backwards[rank] += [Action((vpp - 1 - chunk) * pp + rank, "B", i) for i in group]
        start += size
    return forwards, backwards


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Warm-up, steady state and cool-down of one rank."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return forwards[:warm_up] + [action for pair in pairs for action in pair] + backwards[steady:]


def _split_backwards(actions: list[Action], lag: int) -> list[Action]:
    """Replace every ``B`` by an ``I``, followed by the ``W`` of the ``lag``-th ``I`` before it.

    No stage waits for the input gradient of stage 0: without a lag its halves follow each other, and stay one ``B``.
    """
    split: list[Action] = []
    waiting: list[Action] = []
    for action in actions:
        if action.kind == "F" or (action.stage == 0 and lag == 0):
            split.append(action)
            continue
        split.append(action._replace(kind="I"))
        waiting.append(action._replace(kind="W"))
        if len(waiting) > lag:
            split.append(waiting.pop(0))
    return split + waiting


def _unknown(name: str) -> Problem:
    return Problem("pipeline_schedule", name, "no such schedule", nearest_names(name, SCHEDULE_NAMES))


SCHEDULES = (
    ScheduleKind("gpipe", lambda pp, vpp, m, group: gpipe(pp, m), bubble=lambda f, i, w: 1.0, alternates=False),
    ScheduleKind("1f1b", lambda pp, vpp, m, group: one_f_one_b(pp, m), bubble=lambda f, i, w: 1.0),
    ScheduleKind("interleaved", interleaved, lambda f, i, w: 1.0, (2, None), needs_pp=True),
    ScheduleKind(
        "zero-bubble",
        lambda pp, vpp, m, group: zero_bubble(pp, m, vpp, group),
        lambda f, i, w: (f + i - w) / (f + i + w),
        (1, None),
        splits_backward=True,
        needs_pp=True,
    ),
)
"""The schedules; a new one is an entry here, and its name in ``PipelineSchedule``."""

SCHEDULE_NAMES = tuple(kind.name for kind in SCHEDULES)
