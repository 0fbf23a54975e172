"""A number that all ranks agree on without waiting for each other."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Agreement:
    """The greatest of the numbers that all ranks give, known one question later.

    A question is an all-reduce of one number that runs beside the next step; when that has ended, so has it, and all
    ranks learn the same in the same step. All ranks ask equally often.

    Args:
        group: process group; ``None`` for a rank that is alone.
        device: where the group's tensors live.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._number = torch.zeros((), dtype=torch.int32, device=device)
        self._under_way: dist.Work | None = None

    def ask(self, number: int) -> int:
        """Give a number, and learn the greatest of the last question; unless that is 0 the new number is not asked."""
        last = self.answer()
        if last == 0:
            self._number.fill_(number)
            if self._group is not None:
                self._under_way = dist.all_reduce(self._number, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return last

    def answer(self) -> int:
        """The greatest of the last question, once; 0 if none was asked since."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
        found = int(self._number)
        self._number.zero_()
        return found

    def ask_now(self, number: int) -> int:
        """Give a number and wait for the greatest, that of the last question included."""
        return self.ask(number) or self.answer()
