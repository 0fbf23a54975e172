"""Overlap of communication with computation: gradients are sent during backward, parameters gathered during forward.

All ranks start their collectives in the same order: ranks that start two collectives in different orders hang or mix up
data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.recorder.file_format import Kind


class GradReducer:
    """Reduces buckets over data-parallel ranks while backward is still running.

    A hook on every parameter notes that its gradient of this step is complete. Buckets start strictly in the order
    given, which is the same on all ranks, although ranks may finish gradients in different orders.

    Attributes:
        complete: True if :meth:`finish` has run since gradients were last cleared or added to.
        inspect: function called with each bucket once its gradients are complete and still this rank's own.

    Args:
        tp: the ranks over which gradients of ``grad_sum_over_tp`` buckets are summed.
        dtype: dtype of gradients during communication; ``None`` for the dtype of the gradients.
        overlap: True to start reductions during the last backward, False to start them after it.
    """

    def __init__(self, tp: Axis, *, dtype: torch.dtype | None, overlap: bool) -> None:
        self.complete = False
        self.inspect: Callable[[Bucket], None] | None = None
        self._in_last_backward = False
        self._tp = tp
        self._dtype = dtype
        self._overlap = overlap
        self._buckets: list[Bucket] = []
        # Gradients that change after backward (sums over tp or over tied copies) can only be sent after that.
        self._late: list[Bucket] = []
        self._queue: list[Bucket] = []
        self._next = 0
        self._missing: dict[int, set[str]] | None = None
        self._handles: list[RemovableHandle] = []

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Add buckets, in the order in which backward completes them; not during a backward."""
        first = len(self._buckets)
        self._buckets += buckets
        self._late += [b for b in buckets if b.key.grad_sum_over_tp or b.key.reduce_late]
        self._queue += [b for b in buckets if b not in self._late]
        self._handles += [
            slot.owned.param.register_post_accumulate_grad_hook(_grad_hook(WeakMethod(self._arrived), i, k))
            for i, bucket in enumerate(buckets, first)
            for k, slot in enumerate(bucket.slots)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """State without the hooks, which belong to this process; a copy is for inspection only."""
        return {**self.__dict__, "_handles": []}

    def _all_missing(self) -> dict[int, set[str]]:
        def expected(bucket: Bucket) -> set[str]:
            return {slot.owned.name for slot in bucket.slots if slot.owned.param.requires_grad}

        return {id(bucket): expected(bucket) for bucket in self._queue}

    @contextmanager
    def last_backward(self, last: bool = True) -> Iterator[None]:
        """Bracket the backward that is the last of the step for the parameters it reaches.

        Args:
            last: False if it is not the last after all; then no bucket is sent during it.
        """
        self._in_last_backward = last
        try:
            yield
        finally:
            self._in_last_backward = False

    def _arrived(self, bucket_index: int, slot_index: int) -> None:
        bucket = self._buckets[bucket_index]
        slot = bucket.slots[slot_index]
        if bucket.reduce_started and bucket.axis.size > 1:
            raise RuntimeError(
                f"a gradient of {slot.owned.name!r} arrived after its bucket had been sent to the other data-parallel "
                "ranks: a second backward ran although the one before was declared the last of the step. Declare only "
                "the last one (last_backward), or switch overlap_grad_reduce off."
            )
        if self.complete:
            if bucket.is_mean and slot.owned.param.grad is slot.grad:
                raise RuntimeError(
                    f"a gradient of {slot.owned.name!r} was added to one that has been averaged over ranks: call "
                    "self.manual_backward(loss) instead of loss.backward(), or zero_grad() before it"
                )
            self.continue_accumulation()
        slot.collect()
        if self._in_last_backward and self._overlap and not (bucket.key.grad_sum_over_tp or bucket.key.reduce_late):
            if self._missing is None:
                self._missing = self._all_missing()
            self._missing[id(bucket)].discard(slot.owned.name)
            self._start_ready(self._missing)

    def _start_ready(self, missing: dict[int, set[str]]) -> None:
        while self._next < len(self._queue) and not missing[id(self._queue[self._next])]:
            for slot in self._queue[self._next].slots:
                if not slot.arrived:  # frozen: the buffer still holds the gradient of an earlier step
                    slot.write_to_buffer()
            self._start(self._queue[self._next])
            self._next += 1

    def _start(self, bucket: Bucket) -> None:
        if self.inspect is not None and bucket.axis.size > 1:
            self.inspect(bucket)
        bucket.start_reduce(self._dtype or bucket.grads.dtype)

    def finish(self) -> None:
        """Send the remaining buckets and wait for all; gradients of own shares are means afterwards."""
        for bucket in self._queue[self._next :]:
            self._start(bucket)
        self.inspect_late()
        if self.inspect is not None:
            for bucket in self._queue:  # user hooks may have edited gradients that are not sent to other ranks
                self.inspect(bucket)
        self._sum_over_tp()
        for bucket in self._late:
            self._start(bucket)
        self._end()

    def inspect_late(self) -> None:
        """Inspect the buckets whose gradients still change after backward."""
        if self.inspect is not None:
            for bucket in self._late:
                self.inspect(bucket)

    def _sum_over_tp(self) -> None:
        if self._tp.size > 1:
            summed = [bucket for bucket in self._late if bucket.key.grad_sum_over_tp]
            for pending in [_start_sum(bucket.grads, self._tp) for bucket in summed]:
                pending.wait()
            for bucket in summed:
                bucket.is_mean = True

    def _end(self) -> None:
        for bucket in self._queue + self._late:
            bucket.finish_reduce()
        self._in_last_backward = False
        self._next = 0
        self._missing = None

    def reset(self) -> None:
        """Drop the state of a step that was interrupted; waits for reductions that are running."""
        self._end()
        self.complete = False
        for bucket in self._buckets:
            bucket.is_mean = False

    def continue_accumulation(self) -> None:
        """Allow more gradients to be added to those of an earlier backward that were not cleared.

        In plain torch a gradient outlives the step. Here it has been averaged, and other ranks' shares are stale. So
        the rest is scaled such that the next reduction counts it once.
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
                bucket.undo_mean()
            bucket.is_mean = False
        self.complete = False

    def close(self) -> None:
        """Remove the hooks."""
        self.reset()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class ParamGather:
    """Gathers the shares of all ranks after an optimizer step.

    With overlap the collectives run on while the next forward begins: a hook in front of each module waits for the
    buckets of the parameters that the module itself owns. Parameters that may be read without calling their module
    (those of the root module, an embedding that only the output layer reads) are waited for when a step begins.

    Args:
        overlap: True to return before the gathers have finished.
    """

    def __init__(self, *, overlap: bool) -> None:
        self._buckets: list[Bucket] = []
        self._overlap = overlap
        self._handles: list[RemovableHandle] = []
        self._uncalled: list[Bucket] = []

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Add buckets, in the order in which forward needs them; before :meth:`install`."""
        self._buckets += buckets

    def start(self) -> None:
        """Begin all gathers; they have finished on return unless overlap is on and :meth:`install` has been called."""
        for bucket in self._buckets:
            bucket.start_gather()
        if not (self._overlap and self._handles):
            self.finish()

    def finish_uncalled(self) -> None:
        """Wait for the buckets that no module hook waits for."""
        for bucket in self._uncalled:
            bucket.finish_gather()

    def finish(self) -> None:
        """Wait until all parameters are complete."""
        for bucket in self._buckets:
            bucket.finish_gather()

    def install(self, model: nn.Module) -> None:
        """Hook the modules of ``model`` that own parameters of the buckets; call it again after adding buckets."""
        self._remove()
        bucket_of = {id(slot.owned.param): bucket for bucket in self._buckets for slot in bucket.slots}
        own = {id(bucket_of[id(p)]) for p in model.parameters(recurse=False) if id(p) in bucket_of}
        self._uncalled = [b for b in self._buckets if b.sharded and (b.key.tied_copy or id(b) in own)]
        for module in model.modules():
            owned = [
                bucket_of[id(p)] for p in module.parameters(recurse=_reads_child_params(module)) if id(p) in bucket_of
            ]
            buckets = [b for b in self._buckets if b.sharded and b in owned]
            if buckets:
                self._handles.append(module.register_forward_pre_hook(partial(_wait_for, buckets)))

    def close(self) -> None:
        """Wait, and remove the hooks."""
        self.finish()
        self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _start_sum(grads: Tensor, axis: Axis) -> Pending:
    call = axis.call(Kind.ALL_REDUCE, grads)
    return Pending(grads, call.issue(dist.all_reduce, grads, group=axis.group, async_op=True), call)


def _grad_hook(arrived: WeakMethod[Callable[[int, int], None]], bucket: int, slot: int) -> Callable[[Tensor], None]:
    # Python's garbage collector does not see these hooks in torch: one that refers to its parameter would keep the
    # model, its optimizer and their process groups alive as long as the process. Hence the weak reference.
    def hook(_: Tensor) -> None:
        method = arrived()
        if method is not None:
            method(bucket, slot)

    return hook


def _reads_child_params(module: nn.Module) -> bool:
    """True if a module may read parameters of its children without calling them, as torch's attention does."""
    calls = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, calls)


def _wait_for(buckets: Sequence[Bucket], module: nn.Module, inputs: Any) -> None:
    for bucket in buckets:
        bucket.finish_gather()
