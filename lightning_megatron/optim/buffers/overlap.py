"""When gradients are sent: as early as backward allows, and in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.recorder.file_format import Kind


class GradReducer:
    """Reduces buckets over data-parallel ranks while backward is still running.

    A hook on every parameter notes that its gradient of this step is complete. Buckets start strictly in the order
    given, which is the same on all ranks: ranks may finish gradients in different orders, but a collective that two
    ranks start in different order hangs or mixes up data.

    Attributes:
        sync: whether the backward that runs now is the last of the step for the parameters it reaches.
        complete: whether :meth:`finish` has run since gradients were last cleared or added to.
        look: called with each bucket once its gradients are complete and still this rank's own.

    Args:
        tp: the ranks that gradients of ``grad_sum_over_tp`` buckets are summed over.
        dtype: on the wire; ``None`` means that of the gradients.
        overlap: whether to start during backward, or only when it is over.
    """

    def __init__(self, tp: Axis, *, dtype: torch.dtype | None, overlap: bool) -> None:
        self.sync = False
        self.complete = False
        self.look: Callable[[Bucket], None] | None = None
        self._tp = tp
        self._dtype = dtype
        self._overlap = overlap
        self._buckets: list[Bucket] = []
        # What is changed after backward (summed over tp, or over tied copies) can only be sent after that.
        self._late: list[Bucket] = []
        self._queue: list[Bucket] = []
        self._next = 0
        self._missing: dict[int, set[str]] | None = None
        self._handles: list[RemovableHandle] = []

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Take charge of buckets, in the order in which backward completes them; not during a backward."""
        first = len(self._buckets)
        self._buckets += buckets
        self._late += [b for b in buckets if b.key.grad_sum_over_tp or b.key.held]
        self._queue += [b for b in buckets if b not in self._late]
        self._handles += [
            slot.owned.param.register_post_accumulate_grad_hook(_noting(WeakMethod(self._arrived), i, k))
            for i, bucket in enumerate(buckets, first)
            for k, slot in enumerate(bucket.slots)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Without the hooks, which are of this process: a copy is to be looked at, and training makes new ones."""
        return {**self.__dict__, "_handles": []}

    def _all_missing(self) -> dict[int, set[str]]:
        def awaited(bucket: Bucket) -> set[str]:
            return {slot.owned.name for slot in bucket.slots if slot.owned.param.requires_grad}

        return {id(bucket): awaited(bucket) for bucket in self._queue}

    def _arrived(self, bucket_index: int, slot_index: int) -> None:
        bucket = self._buckets[bucket_index]
        slot = bucket.slots[slot_index]
        if bucket.reduce_started and bucket.axis.size > 1:
            raise RuntimeError(
                f"a gradient of {slot.owned.name!r} arrived after its bucket had been sent to the other data-parallel "
                "ranks: a second backward ran although the one before was declared the last of the step. Declare only "
                "the last one (sync=True), or switch overlap_grad_reduce off."
            )
        if self.complete:
            if bucket.is_mean and slot.owned.param.grad is slot.grad:
                raise RuntimeError(
                    f"a gradient of {slot.owned.name!r} was added to one that has been averaged over ranks: call "
                    "self.manual_backward(loss) instead of loss.backward(), or zero_grad() before it"
                )
            self.reopen()
        slot.collect()
        if self.sync and self._overlap and not (bucket.key.grad_sum_over_tp or bucket.key.held):
            if self._missing is None:
                self._missing = self._all_missing()
            self._missing[id(bucket)].discard(slot.owned.name)
            self._start_ready(self._missing)

    def _start_ready(self, missing: dict[int, set[str]]) -> None:
        while self._next < len(self._queue) and not missing[id(self._queue[self._next])]:
            for slot in self._queue[self._next].slots:
                if not slot.arrived:  # frozen: nothing comes, and what lies in the buffer is of another step
                    slot.settle()
            self._start(self._queue[self._next])
            self._next += 1

    def _start(self, bucket: Bucket) -> None:
        if self.look is not None and bucket.axis.size > 1:
            self.look(bucket)
        bucket.start_reduce(self._dtype or bucket.grads.dtype)

    def finish(self) -> None:
        """Send what has not been sent, wait for all of it; gradients of own shares are means afterwards."""
        for bucket in self._queue[self._next :]:
            self._start(bucket)
        self.look_at_late()
        if self.look is not None:
            for bucket in self._queue:  # hooks of the user's may have edited what nobody else has been sent
                self.look(bucket)
        self._sum_over_tp()
        for bucket in self._late:
            self._start(bucket)
        self._end()

    def look_at_late(self) -> None:
        """Have those looked at that something is still to be added to."""
        if self.look is not None:
            for bucket in self._late:
                self.look(bucket)

    def _sum_over_tp(self) -> None:
        if self._tp.size > 1:
            summed = [bucket for bucket in self._late if bucket.key.grad_sum_over_tp]
            for pending in [_summing(bucket.grads, self._tp) for bucket in summed]:
                pending.wait()
            for bucket in summed:
                bucket.is_mean = True

    def _end(self) -> None:
        for bucket in self._queue + self._late:
            bucket.finish_reduce()
        self.sync = False
        self._next = 0
        self._missing = None

    def reset(self) -> None:
        """Forget a step that was broken off; waits for what is on the wire."""
        self._end()
        self.complete = False
        for bucket in self._buckets:
            bucket.is_mean = False

    def reopen(self) -> None:
        """Let gradients be added to those of a step that is over, or that was never taken, where nobody cleared them.

        In plain torch a gradient outlives the step. Here it has been averaged, and other ranks' shares are stale; so
        what is left is made such that the next reduction finds it once.
        """
        over = self.complete or self._next > 0
        if over:
            self._end()
        for bucket in self._buckets:
            for slot in bucket.slots:
                if slot.is_empty:
                    slot.arrived = False
            if over and bucket.is_mean and not all(slot.is_empty for slot in bucket.slots):
                if self.complete and bucket.key.grad_sum_over_tp and self._tp.size > 1:
                    bucket.own_grads.div_(self._tp.size)
                bucket.take_back()
            bucket.is_mean = False
        self.complete = False

    def close(self) -> None:
        """Remove the hooks."""
        self.reset()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _summing(grads: Tensor, axis: Axis) -> Pending:
    call = axis.call(Kind.ALL_REDUCE, grads)
    return Pending(grads, call.issue(dist.all_reduce, grads, group=axis.group, async_op=True), call)


def _noting(arrived: WeakMethod[Callable[[int, int], None]], bucket: int, slot: int) -> Callable[[Tensor], None]:
    # torch keeps these hooks where Python's garbage collector does not look: one that led back to its parameter would
    # keep the model, its optimizer and their process groups for as long as the process lives.
    def note(_: Tensor) -> None:
        method = arrived()
        if method is not None:
            method(bucket, slot)

    return note
