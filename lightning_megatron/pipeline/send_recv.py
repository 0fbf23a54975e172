"""Sends and receives of a schedule, as steps between the actions of each rank.

A schedule does not define the order in which a rank posts its sends and receives, and untagged point-to-point messages
need the same order at both ends. With ``pp=2`` interleaved, for example, activations and gradients travel between the
same two ranks in the same direction, and the receiver may need them in another order than the sender makes them.

Therefore all messages of a step are put into **one** order, that of a simulated run, and every rank posts its messages
in that order. Then both ends of a pair agree, and the step cannot deadlock even if a send blocks until its receive is
posted: of all unfinished messages, both ends of the first one have finished everything before it. This also holds if
neighbouring transfers without an action between them are posted as one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_megatron.pipeline.action import Action, Message, count_stages, message_out, rank_of
from lightning_megatron.pipeline.simulate import simulate


class Transfer(NamedTuple):
    """One end of a message, written as torch.distributed.pipelining writes it: ``0SEND_F3``, ``1RECV_F3``.

    ``peer`` is the pipeline rank at the other end.
    """

    message: Message
    peer: int
    sends: bool

    def __str__(self) -> str:
        stage = self.message.source if self.sends else self.message.destination
        kind = "F" if self.message.is_activation else "B"
        return f"{stage}{'SEND' if self.sends else 'RECV'}_{kind}{self.message.microbatch}"


Step = Action | Transfer


def add_transfers(schedule: Sequence[Sequence[Action]]) -> list[list[Step]]:
    """Actions of every pipeline rank, with each send right after and each receive before the action it belongs to.

    A receive is placed where its message is sent in simulated time (forward 1, backward 2). A rank posts its transfers
    without waiting, computes meanwhile, and waits only before the action that needs the message.

    Raises:
        DeadlockError: if the actions cannot all run in the order given.
    """
    pp, num_stages = len(schedule), count_stages(schedule)
    timeline = simulate(schedule).timeline
    messages = sorted(
        (slot.end, position, message)
        for slots in timeline
        for position, slot in enumerate(slots)
        if (message := message_out(slot.action, num_stages)) is not None
    )
    plan: list[list[Step]] = [[] for _ in range(pp)]
    done = [0] * pp

    def compute_until(rank: int, time: float, through: int) -> None:
        """Place the actions up to index ``through`` and all that start before ``time``."""
        slots = timeline[rank]
        while done[rank] < len(slots) and (done[rank] <= through or slots[done[rank]].start < time):
            plan[rank].append(slots[done[rank]].action)
            done[rank] += 1

    for time, position, message in messages:
        sender, receiver = rank_of(message.source, pp), rank_of(message.destination, pp)
        compute_until(sender, time, position)
        compute_until(receiver, time, -1)
        plan[sender].append(Transfer(message, receiver, sends=True))
        plan[receiver].append(Transfer(message, sender, sends=False))
    for rank in range(pp):
        compute_until(rank, float("inf"), -1)
    return plan
