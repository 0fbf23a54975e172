"""Actions of a pipeline schedule: one stage at work on one micro-batch.

A schedule is data: per pipeline rank the list of actions that it runs, in order. It prints and compares without a
process: ``schedule`` builds it, ``validate`` proves it, ``simulate`` computes its time, ``runtime`` executes it.

Stages are numbered through the whole pipeline: chunk ``c`` of pipeline rank ``r`` is stage ``c * pp + r``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""``F`` forward, ``B`` backward, or its two halves: ``I`` gradient of the input, ``W`` gradients of the weights."""


class Action(NamedTuple):
    """One stage at work on one micro-batch, written as torch.distributed.pipelining writes it: ``2F0``, ``1B3``."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Schedule = list[list[Action]]
"""One list of actions per pipeline rank."""


class Message(NamedTuple):
    """A tensor that one stage sends to its neighbour: an activation downstream or a gradient upstream."""

    source: int
    destination: int
    microbatch: int

    @property
    def is_activation(self) -> bool:
        """True for an activation, False for the gradient of one."""
        return self.destination > self.source

    def __str__(self) -> str:
        word = "activation" if self.is_activation else "gradient"
        return f"{word} {self.microbatch} of stage {self.source} for stage {self.destination}"


def rank_of(stage: int, pp: int) -> int:
    """Pipeline rank that holds a stage."""
    return stage % pp


def chunk_of(stage: int, pp: int) -> int:
    """Number of a stage among the chunks of its rank."""
    return stage // pp


def message_in(action: Action, num_stages: int) -> Message | None:
    """Message that an action must have received before it can run; ``None`` if it needs none."""
    if action.kind == "F" and action.stage > 0:
        return Message(action.stage - 1, action.stage, action.microbatch)
    if action.kind in "BI" and action.stage < num_stages - 1:
        return Message(action.stage + 1, action.stage, action.microbatch)
    return None


def message_out(action: Action, num_stages: int) -> Message | None:
    """Message that an action sends when it is done; ``None`` if it sends none."""
    if action.kind == "F" and action.stage < num_stages - 1:
        return Message(action.stage, action.stage + 1, action.microbatch)
    if action.kind in "BI" and action.stage > 0:
        return Message(action.stage, action.stage - 1, action.microbatch)
    return None


def count_stages(schedule: Sequence[Sequence[Action]]) -> int:
    """Number of stages of the whole pipeline, from the highest stage number in the schedule."""
    return 1 + max((action.stage for actions in schedule for action in actions), default=-1)


def format_schedule(schedule: Sequence[Sequence[Action]]) -> str:
    """Write a schedule as CSV, one row per pipeline rank; torch's schedules load it with ``_load_csv``."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule)
