"""Agreement of all ranks on a number, without waiting for each other."""

from __future__ import annotations

import torch

from lightning_megatron.comm.collectives import MAX, Pending, start_all_reduce_in_place
from lightning_megatron.mesh import Axis


class Agreement:
    """Maximum of a number over all ranks, known one call of :meth:`ask` later.

    Each call starts an all-reduce of one number, which runs during the next step. So all ranks get the same answer in
    the same step, without waiting for it. All ranks must call :meth:`ask` equally often.

    Args:
        axis: ranks that agree; ``None`` in a job of one process.
        device: device of the group's tensors.
    """

    def __init__(self, axis: Axis | None, device: torch.device) -> None:
        self._axis = axis
        self._number = torch.zeros((), dtype=torch.int32, device=device)
        self._under_way: Pending | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Agreement:
        return self  # a pending all-reduce is a handle

    def ask(self, number: int) -> int:
        """Submit a number, and return the maximum of the last call; if it is not 0, the new number is dropped."""
        last = self.answer()
        if last == 0:
            self._number.fill_(number)
            if self._axis is not None:
                self._under_way = start_all_reduce_in_place(self._number, self._axis, MAX)
        return last

    def answer(self) -> int:
        """Return the maximum of the last :meth:`ask`, only once; 0 if there was none since."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
        found = int(self._number)
        self._number.zero_()
        return found

    def ask_now(self, number: int) -> int:
        """Submit a number and wait for its maximum; that of the last call comes first if it is not 0."""
        return self.ask(number) or self.answer()
