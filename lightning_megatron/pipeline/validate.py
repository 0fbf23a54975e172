"""Proof that any schedule, also one written by hand, can run: it is complete, in order and free of deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product

from lightning_megatron.pipeline.action import Action, Message, count_stages, message_in, message_out, rank_of
from lightning_megatron.pipeline.send_recv import Step, Transfer, add_transfers
from lightning_megatron.pipeline.simulate import DeadlockError, peak_activations, simulate


@dataclass(frozen=True)
class Report:
    """Result of :func:`check_schedule`.

    Attributes:
        faults: reasons why the schedule cannot run, one a line; empty if it can.
        peak_activations: largest number of forwards in flight on every rank.
        in_order: True if every rank needs its messages in the order in which each peer makes them. If not, a receive
            must be posted before its message is needed; :func:`add_transfers` does so.
        rendezvous_safe: True if the schedule also runs when the sends of an action and the receives of the next one
            form one batch that must end before the next action, and nothing else is posted early. If not, receives
            must be posted earlier, as :func:`add_transfers` posts them.
    """

    faults: tuple[str, ...]
    peak_activations: tuple[int, ...]
    in_order: bool
    rendezvous_safe: bool


def check_schedule(schedule: Sequence[Sequence[Action]], forward_only: bool = False) -> Report:
    """Prove that a schedule can run, or list its faults; one of an evaluation is ``forward_only``."""
    faults = _complete(schedule, forward_only)
    if not faults:
        faults = _ordered(schedule)
    if not faults:
        try:
            simulate(schedule)
            faults = check_transfers(add_transfers(schedule))
        except DeadlockError as deadlock:
            faults = list(deadlock.waits)
    in_order = not faults and _in_order(schedule)
    rendezvous_safe = not faults and not _stuck(_batches_between_actions(schedule))
    return Report(tuple(faults), peak_activations(schedule), in_order, rendezvous_safe)


def check_transfers(plan: Sequence[Sequence[Step]]) -> list[str]:
    """Faults of a plan of actions and transfers, of :func:`add_transfers` or any other origin.

    Both ends of every pair of ranks must list the same messages in the same order, a send must follow the action that
    makes its message, a receive must precede the action that needs it, and the plan must run to its end if every
    transfer blocks until the other end is posted.
    """
    faults: list[str] = []
    num_stages = count_stages([[s for s in steps if isinstance(s, Action)] for steps in plan])
    for rank, steps in enumerate(plan):
        made: set[Message | None] = set()
        received: set[Message | None] = {None}
        for step in steps:
            if isinstance(step, Action):
                made.add(message_out(step, num_stages))
                if message_in(step, num_stages) not in received:
                    faults.append(f"rank {rank}: {step} runs before the {message_in(step, num_stages)} is received")
            elif not step.sends:
                received.add(step.message)
            elif step.message not in made:
                faults.append(f"rank {rank}: {step} before the {step.message} is made")
    faults += _agreed(plan)
    if not faults:
        batches = [[[step.message] if isinstance(step, Transfer) else [] for step in steps] for steps in plan]
        faults = [f"rank {rank}: blocked at {plan[rank][at]}" for rank, at in _stuck(batches).items()]
    return faults


def _agreed(plan: Sequence[Sequence[Step]]) -> list[str]:
    """Check that both ends of every pair of ranks list the same messages in the same order."""
    faults = []
    for source, destination in product(range(len(plan)), repeat=2):
        sends = _channel(plan[source], destination, sends=True)
        receives = _channel(plan[destination], source, sends=False)
        if sends != receives:
            at = next((i for i, (s, r) in enumerate(zip(sends, receives, strict=False)) if s != r), None)
            where = f"{len(sends)} sent, {len(receives)} received" if at is None else f"{sends[at]}, {receives[at]}"
            faults.append(f"rank {source} to rank {destination}: sends and receives differ: {where}")
    return faults


def _complete(schedule: Sequence[Sequence[Action]], forward_only: bool) -> list[str]:
    """Check that every stage is on its rank, and that every forward and backward occurs once."""
    pp, num_stages = len(schedule), count_stages(schedule)
    num_microbatches = 1 + max((a.microbatch for a in chain(*schedule)), default=-1)
    missing = {"": "B", "I": "W", "W": "I"}  # kinds of backward that are present: the missing one
    faults = []
    for rank, actions in enumerate(schedule):
        count = Counter(actions)
        faults += [
            f"rank {rank}: {a} belongs to rank {rank_of(a.stage, pp)}" for a in count if rank_of(a.stage, pp) != rank
        ]
        faults += [f"rank {rank}: {a} {n} times" for a, n in count.items() if n > 1]
        for stage, i in product(range(rank, num_stages, pp), range(num_microbatches)):
            if Action(stage, "F", i) not in count:
                faults.append(f"rank {rank}: {stage}F{i} is missing")
            backwards = "".join(kind for kind in ("B", "I", "W") if Action(stage, kind, i) in count)
            if forward_only:
                if backwards:
                    faults.append(f"rank {rank}: {stage}{backwards[0]}{i} in a forward-only schedule")
            elif backwards in missing:
                faults.append(f"rank {rank}: {stage}{missing[backwards]}{i} is missing")
            elif backwards not in ("B", "IW"):
                faults.append(f"rank {rank}: {stage}B{i} besides another backward of it")
    return faults


def _ordered(schedule: Sequence[Sequence[Action]]) -> list[str]:
    """Check that on its rank ``F`` comes before ``B`` or ``I``, and ``I`` before ``W``."""
    faults = []
    before = {"B": "F", "I": "F", "W": "I"}
    for rank, actions in enumerate(schedule):
        seen: set[Action] = set()
        for action in actions:
            if action.kind != "F":
                first = Action(action.stage, before[action.kind], action.microbatch)  # type: ignore[arg-type]
                if first not in seen:
                    faults.append(f"rank {rank}: {action} before {first}")
            seen.add(action)
    return faults


def _channel(steps: Sequence[Step], peer: int, sends: bool) -> list[Message]:
    """Messages between a rank and a peer in one direction, in order."""
    return [s.message for s in steps if isinstance(s, Transfer) and s.peer == peer and s.sends == sends]


def _in_order(schedule: Sequence[Sequence[Action]]) -> bool:
    pp, num_stages = len(schedule), count_stages(schedule)
    made: dict[tuple[int, int], list[Message]] = {}
    needed: dict[tuple[int, int], list[Message]] = {}
    for actions in schedule:
        for action in actions:
            for message, channels in (
                (message_out(action, num_stages), made),
                (message_in(action, num_stages), needed),
            ):
                if message is not None:
                    channel = (rank_of(message.source, pp), rank_of(message.destination, pp))
                    channels.setdefault(channel, []).append(message)
    return made == needed


def _batches_between_actions(schedule: Sequence[Sequence[Action]]) -> list[list[list[Message]]]:
    """For each rank and gap between actions: sends of the action before it and receives of the action after it."""
    num_stages = count_stages(schedule)
    batches = []
    for actions in schedule:
        sent = [None, *(message_out(a, num_stages) for a in actions)]
        received = [*(message_in(a, num_stages) for a in actions), None]
        batches.append([[m for m in gap if m is not None] for gap in zip(sent, received, strict=True)])
    return batches


def _stuck(batches: Sequence[Sequence[Iterable[Message]]]) -> dict[int, int]:
    """Position of each rank that never finishes, if a batch ends only when each message is posted at both ends."""
    position = [0] * len(batches)
    posted: Counter[Message] = Counter(m for rank in batches for m in (rank[0] if rank else ()))
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(batches):
            while position[rank] < len(own) and all(posted[m] == 2 for m in own[position[rank]]):
                position[rank] += 1
                if position[rank] < len(own):
                    posted.update(own[position[rank]])
                moved = True
    return {rank: at for rank, at in enumerate(position) if at < len(batches[rank])}
