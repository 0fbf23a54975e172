"""Agreement of all ranks on a number, without waiting for each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis
from lightning_megatron.recorder.file_format import Kind


class Agreement:
    """The maximum of the numbers that all ranks give, known one question later.

    A question is an all-reduce of one number, which runs during the next step. So all ranks get the same answer in the
    same step, without waiting for it. All ranks must ask equally often.

    Args:
        group: process group; ``None`` for a rank that is alone.
        device: device of the group's tensors.
        axis: ranks of the group, for the record of this rank's actions.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, axis: Axis | None = None) -> None:
        self._group, self._axis = group, axis or Axis("world")
        self._number = torch.zeros((), dtype=torch.int32, device=device)
        self._under_way: Pending | None = None

    def ask(self, number: int) -> int:
        """Give a number, and return the maximum of the last question; unless that is 0, the new number is dropped."""
        last = self.answer()
        if last == 0:
            self._number.fill_(number)
            if self._group is not None:
                call, own = self._axis.call(Kind.ALL_REDUCE, self._number), self._number
                work = call.issue(dist.all_reduce, own, dist.ReduceOp.MAX, group=self._group, async_op=True)
                self._under_way = Pending(own, work, call)
        return last

    def answer(self) -> int:
        """The maximum of the last question, once; 0 if none was asked since."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
        found = int(self._number)
        self._number.zero_()
        return found

    def ask_now(self, number: int) -> int:
        """Give a number and wait for the maximum, of this and the last question."""
        return self.ask(number) or self.answer()
