"""Simulation of a schedule: step time, idle time, bubble and activations in flight.

The model is that of the papers: a rank runs its actions in order, one at a time; a message leaves when its action ends,
travels for ``communication`` without keeping either rank busy, and the action that needs it waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_megatron.pipeline.action import Action, Kind, Message, count_stages, message_in, message_out, rank_of
from lightning_megatron.pipeline.schedule import schedule_kind


@dataclass(frozen=True)
class Costs:
    """Time of each action on one stage and one micro-batch, in any unit; a sequence gives one number per stage.

    Attributes:
        forward: time of ``F``.
        backward: time of ``B``.
        input_gradient: time of ``I``; ``None`` means half of ``backward``.
        weight_gradient: time of ``W``; ``None`` means ``backward`` minus the time of ``I``.
        communication: travel time of a message.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    input_gradient: float | Sequence[float] | None = None
    weight_gradient: float | Sequence[float] | None = None
    communication: float = 0.0

    def of(self, kind: Kind, stage: int) -> float:
        """Time of an action of this kind on a stage."""
        if kind == "F":
            return _pick(self.forward, stage)
        if kind == "B":
            return _pick(self.backward, stage)
        if kind == "I":
            return self.of("B", stage) / 2 if self.input_gradient is None else _pick(self.input_gradient, stage)
        if self.weight_gradient is None:
            return self.of("B", stage) - self.of("I", stage)
        return _pick(self.weight_gradient, stage)


class TimedAction(NamedTuple):
    """One action with the time at which it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule in time.

    Attributes:
        timeline: actions of every pipeline rank with their times, in order.
        step_time: time at which the last rank is done.
        busy: computing time of every rank.
        peak_activations: largest number of forwards of every rank whose backward has not run yet.
    """

    timeline: tuple[tuple[TimedAction, ...], ...]
    step_time: float
    busy: tuple[float, ...]
    peak_activations: tuple[int, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """Idle time of every rank within the step."""
        return tuple(self.step_time - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle time of all ranks over their computing time: the pipeline's overhead over an ideal step."""
        return sum(self.idle) / sum(self.busy) if sum(self.busy) else 0.0


class DeadlockError(ValueError):
    """A schedule in which every unfinished rank waits for another one; ``waits`` has a sentence for each."""

    def __init__(self, waits: Sequence[str]) -> None:
        self.waits = tuple(waits)
        super().__init__("deadlock: " + "; ".join(waits))


def simulate(schedule: Sequence[Sequence[Action]], costs: Costs | None = None) -> Simulation:
    """Simulate a schedule.

    Args:
        schedule: actions of every pipeline rank.
        costs: times of actions; by default forward 1, backward 2 and free messages.

    Raises:
        DeadlockError: if the actions cannot all run in the order given.
    """
    costs = costs or Costs()
    pp, num_stages = len(schedule), count_stages(schedule)
    kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
    times = {(kind, stage): costs.of(kind, stage) for kind in kinds for stage in range(num_stages)}
    timeline: list[list[TimedAction]] = [[] for _ in range(pp)]
    clock = [0.0] * pp
    arrivals: dict[Message | None, float] = {None: 0.0}  # an action that needs no message starts at once
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            slots = timeline[rank]
            while len(slots) < len(actions):
                action = actions[len(slots)]
                needed = message_in(action, num_stages)
                if needed not in arrivals:
                    break
                start = max(clock[rank], arrivals[needed])
                clock[rank] = start + times[action.kind, action.stage]
                slots.append(TimedAction(action, start, clock[rank]))
                made = message_out(action, num_stages)
                if made is not None:
                    arrivals[made] = clock[rank] + costs.communication
                moved = True
    waits = [
        _wait(rank, actions[len(timeline[rank])], schedule, num_stages)
        for rank, actions in enumerate(schedule)
        if len(timeline[rank]) < len(actions)
    ]
    if waits:
        raise DeadlockError(waits)
    busy = tuple(sum(times[a.kind, a.stage] for a in actions) for actions in schedule)
    return Simulation(tuple(map(tuple, timeline)), max(clock, default=0.0), busy, peak_activations(schedule))


def peak_activations(schedule: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Largest number of forwards in flight on every rank: ``F`` is done, ``B`` or ``W`` is not."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    peaks = []
    for actions in schedule:
        held = {(a.stage, a.microbatch) for a in actions if a.kind in "BW"}
        live = peak = 0
        for action in actions:
            live += change[action.kind] if (action.stage, action.microbatch) in held else 0
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)


def ideal_bubble(name: str, pp: int, vpp: int, num_microbatches: int, costs: Costs | None = None) -> float | None:
    """Bubble that the schedule's paper states, for stages of equal cost and free messages.

    ``(p-1)/m`` for GPipe and 1F1B, ``(p-1)/(m v)`` interleaved, and with both halves of the backward apart
    ``(p-1)(F+I-W)/(m v (F+I+W))`` for ZB-H1.

    Returns:
        The fraction, or ``None`` if no paper gives one: fewer micro-batches than ranks in a schedule that needs ``pp``
        of them, a ``W`` longer than ``F`` or ``I``, or halves that do not add up to ``B``.

    Raises:
        ConfigError: for an unknown schedule.
    """
    kind = schedule_kind(name, vpp)
    if pp > 1 and (kind.bubble is None or (kind.needs_pp and num_microbatches < pp)):
        return None
    costs = costs or Costs()
    f, b, i, w = (costs.of(action, 0) for action in ("F", "B", "I", "W"))
    if pp > 1 and kind.splits_backward and (w > min(f, i) or abs(i + w - b) > 1e-9 * b):
        return None
    factor = 1.0 if pp == 1 or kind.bubble is None else kind.bubble(f, i, w)
    return factor * (pp - 1) / (num_microbatches * vpp)


def _pick(cost: float | Sequence[float], stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


def _wait(rank: int, action: Action, schedule: Sequence[Sequence[Action]], num_stages: int) -> str:
    message = message_in(action, num_stages)
    assert message is not None  # an action without one never waits
    sender = rank_of(message.source, len(schedule))
    makers = [a for a in schedule[sender] if message_out(a, num_stages) == message]
    ending = f"which rank {sender} sends after {makers[0]}" if makers else f"which rank {sender} never sends"
    return f"rank {rank}: {action} waits for the {message}, {ending}"
