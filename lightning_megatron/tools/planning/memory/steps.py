"""Moments at which a pipeline rank may reach its peak memory, from as few micro-batches as show the peak.

From some micro-batch on, a schedule repeats itself, and no more activations are in flight than before. So a schedule of
a thousand micro-batches needs no more than one of a few; only GPipe holds all of them. The numbers of activations and
messages at a moment do not depend on the model: they are counted once for each schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from lightning_megatron.pipeline.action import Action, chunk_of
from lightning_megatron.pipeline.schedule import build_schedule, group_sizes, schedule_kind
from lightning_megatron.pipeline.send_recv import Step, add_transfers

GROUPS = 3
"""Number of groups of micro-batches after which an interleaved schedule repeats itself."""
MOST_SENDING = 4
"""Largest number of unfinished sends of a rank, as in ``pipeline/runtime.py``; assumed to be reached."""


class Moment(NamedTuple):
    """An action of a rank, with the activations and messages that the rank holds while it runs.

    Attributes:
        kind: ``F`` forward, ``B`` backward or its first half, ``W`` gradients of weights.
        stage: stage that runs.
        ends: True for the last micro-batch, after which gradients are sent.
        held: number of micro-batches whose forward has started and whose backward has not ended, by chunk.
        messages: number of activations and gradients that have arrived or are being sent.
        deferred: number of micro-batches whose weight gradients are deferred, by chunk.
    """

    kind: str
    stage: int
    ends: bool
    held: tuple[int, ...]
    messages: int
    deferred: tuple[int, ...]

    def holds_all_of(self, other: Moment) -> bool:
        """True if each of the counts is at least that of the other moment."""
        counts = (*self.held, self.messages, *self.deferred)
        return all(map(int.__ge__, counts, (*other.held, other.messages, *other.deferred)))


def moments_of(name: str, pp: int, vpp: int, num_micro_batches: int, rank: int) -> tuple[Moment, ...]:
    """Moments of a pipeline rank in order, without those at which an action holds no more than at another time."""
    shown = shown_micro_batches(name, pp, vpp, num_micro_batches)
    moments = _moments(name, pp, vpp, shown, rank)
    if pp == 1 or schedule_kind(name, vpp).alternates:
        return moments
    # GPipe holds all micro-batches at its peak, those that were left out here too.
    more = num_micro_batches - shown
    return tuple(moment._replace(held=(moment.held[0] + more,)) for moment in moments)


def shown_micro_batches(name: str, pp: int, vpp: int, num_micro_batches: int) -> int:
    """Number of micro-batches after which a schedule repeats itself."""
    if pp == 1:
        return min(num_micro_batches, 2)
    if not schedule_kind(name, vpp).alternates:
        return min(num_micro_batches, 2)
    if vpp == 1:
        return min(num_micro_batches, pp + 2)
    return sum(group_sizes(pp, num_micro_batches)[:GROUPS])


@lru_cache(maxsize=4096)
def _moments(name: str, pp: int, vpp: int, num_micro_batches: int, rank: int) -> tuple[Moment, ...]:
    return _fullest(_walk(_steps(name, pp, vpp, num_micro_batches)[rank], pp, vpp))


@lru_cache(maxsize=256)
def _steps(name: str, pp: int, vpp: int, num_micro_batches: int) -> tuple[tuple[Step, ...], ...]:
    chosen = None if pp == 1 else name
    return tuple(map(tuple, add_transfers(build_schedule(chosen, pp, vpp, num_micro_batches))))


def _walk(steps: tuple[Step, ...], pp: int, vpp: int) -> Iterator[Moment]:
    """Every moment of a rank."""
    held, deferred, last = [0] * vpp, [0] * vpp, pp * vpp - 1
    end = max(step.microbatch for step in steps if isinstance(step, Action))
    messages = sending = 0
    for step in steps:
        if not isinstance(step, Action):
            if not step.sends:
                messages += 1
            elif sending == MOST_SENDING:
                messages -= 1  # the rank waits for the oldest send
            else:
                sending += 1
            continue
        stage, chunk = step.stage, chunk_of(step.stage, pp)
        kind = "B" if step.kind == "I" else step.kind
        if kind == "F":
            messages -= stage > 0  # the message becomes the stage's input
            held[chunk] += 1
        elif kind == "B":
            messages -= stage < last
        yield Moment(kind, stage, step.microbatch == end, tuple(held), messages, tuple(deferred))
        if kind == "F":
            messages += stage < last
        elif kind == "B":
            held[chunk] -= 1
            deferred[chunk] += step.kind == "I"
            messages += stage > 0
        else:
            deferred[chunk] -= 1


def _fullest(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """Drop moments that hold no more than another moment of the same action."""
    by_action: dict[tuple[str, int, bool], list[tuple[int, Moment]]] = {}
    for number, moment in enumerate(dict.fromkeys(moments)):
        kept = by_action.setdefault(moment[:3], [])
        if not any(other.holds_all_of(moment) for _, other in kept):
            kept[:] = [each for each in kept if not moment.holds_all_of(each[1])]
            kept.append((number, moment))
    return tuple(moment for _, moment in sorted(each for kept in by_action.values() for each in kept))
