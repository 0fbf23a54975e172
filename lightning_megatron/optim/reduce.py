"""When gradients are sent: as early as backward allows, and in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_megatron.mesh import Axis
from lightning_megatron.optim.bucket import Bucket


class GradReducer:
    """Reduces buckets over data-parallel ranks while backward is still running.

    A hook on every parameter notes that its gradient of this step is complete. Buckets start strictly in the order
    given, which is the same on all ranks: ranks may finish gradients in different orders, but a collective that two
    ranks start in different order hangs or mixes up data.

    Attributes:
        sync: whether the backward that runs now is the last of the step for the parameters it reaches.
        reached: whether any gradient has arrived in this step.

    Args:
        buckets: all buckets, in the order in which backward completes them.
        tp: the ranks that gradients of ``grad_sum_over_tp`` buckets are summed over.
        dtype: on the wire; ``None`` means that of the gradients.
        overlap: whether to start during backward, or only when it is over.
    """

    def __init__(self, buckets: Sequence[Bucket], tp: Axis, *, dtype: torch.dtype | None, overlap: bool) -> None:
        self.sync = False
        self.reached = False
        self._tp = tp
        self._dtype = dtype
        self._overlap = overlap
        # What is changed after backward (summed over tp, or over tied copies) can only be sent after that.
        self._late = [b for b in buckets if b.key.grad_sum_over_tp or b.key.held]
        self._queue = [b for b in buckets if b not in self._late]
        self._next = 0
        self._missing = self._all_missing()
        self._buckets = tuple(buckets)
        self._handles: list[RemovableHandle] = [
            slot.owned.param.register_post_accumulate_grad_hook(_noting(WeakMethod(self._arrived), i, k))
            for i, bucket in enumerate(buckets)
            for k, slot in enumerate(bucket.slots)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Without the hooks, which are of this process: a copy is to be looked at, and training makes new ones."""
        return {**self.__dict__, "_handles": []}

    def _all_missing(self) -> dict[int, set[str]]:
        return {id(bucket): {slot.owned.name for slot in bucket.slots} for bucket in self._queue}

    def _arrived(self, bucket_index: int, slot_index: int) -> None:
        bucket = self._buckets[bucket_index]
        slot = bucket.slots[slot_index]
        if bucket.reduce_started:
            raise RuntimeError(
                f"a gradient of {slot.owned.name!r} arrived after its bucket had been sent to the other data-parallel "
                "ranks: a second backward ran although the one before was declared the last of the step. Declare only "
                "the last one (sync=True), or switch overlap_grad_reduce off."
            )
        slot.collect()
        self.reached = True
        if self.sync and self._overlap and not (bucket.key.grad_sum_over_tp or bucket.key.held):
            self._missing[id(bucket)].discard(slot.owned.name)
            self._start_ready()

    def _start_ready(self) -> None:
        while self._next < len(self._queue) and not self._missing[id(self._queue[self._next])]:
            self._start(self._queue[self._next])
            self._next += 1

    def _start(self, bucket: Bucket) -> None:
        bucket.start_reduce(self._dtype or bucket.grads.dtype)

    def finish(self) -> None:
        """Send what has not been sent, wait for all of it; gradients of own shares are means afterwards."""
        rest = self._queue[self._next :] + self._late
        for bucket in rest:
            for slot in bucket.slots:
                slot.attach()
        for bucket in self._queue[self._next :]:
            self._start(bucket)
        self._sum_over_tp()
        for bucket in self._late:
            self._start(bucket)
        self._end()

    def _sum_over_tp(self) -> None:
        if self._tp.size > 1:
            summed = [bucket.grads for bucket in self._late if bucket.key.grad_sum_over_tp]
            for work in [dist.all_reduce(grads, group=self._tp.group, async_op=True) for grads in summed]:
                work.wait()

    def _end(self) -> None:
        for bucket in self._queue + self._late:
            bucket.finish_reduce()
        self.sync = self.reached = False
        self._next = 0
        self._missing = self._all_missing()

    def reset(self) -> None:
        """Forget a step that was broken off; waits for what is on the wire."""
        self._end()

    def close(self) -> None:
        """Remove the hooks."""
        self.reset()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _noting(arrived: WeakMethod[Callable[[int, int], None]], bucket: int, slot: int) -> Callable[[Tensor], None]:
    # torch keeps these hooks where Python's garbage collector does not look: one that led back to its parameter would
    # keep the model, its optimizer and their process groups for as long as the process lives.
    def note(_: Tensor) -> None:
        method = arrived()
        if method is not None:
            method(bucket, slot)

    return note
