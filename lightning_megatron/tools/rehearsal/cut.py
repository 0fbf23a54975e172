"""Number of micro-batches with which a schedule already holds as many activations as with all of them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_megatron.pipeline.action import Action
from lightning_megatron.pipeline.schedule import build_schedule

_MORE = 2


def most_in_flight(actions: Sequence[Action]) -> int:
    """Largest number of micro-batches in flight: their backward, or its weight gradients, has not been computed."""
    splits = any(action.kind == "W" for action in actions)
    ends = "W" if splits else "B"
    found = most = 0
    for action in actions:
        found += (action.kind == "F") - (action.kind == ends)
        most = max(most, found)
    return most


def enough_micro_batches(name: str | None, pp: int, vpp: int, number: int) -> int:
    """Smallest number of micro-batches with which every rank holds as many in flight as with ``number``.

    It is at least the length of the pipeline plus two, so that the steady state is reached, and at most ``number``.
    """
    if pp == 1:
        return min(number, _MORE)
    most = [most_in_flight(actions) for actions in build_schedule(name, pp, vpp, number)]
    step = pp if vpp > 1 else 1
    fewest = -(-(pp + _MORE) // step) * step
    for fewer in range(fewest, number, step):
        if [most_in_flight(actions) for actions in build_schedule(name, pp, vpp, fewer)] == most:
            return fewer
    return number
