"""A stretch of a flat buffer that is communicated at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis
from lightning_megatron.recorder.file_format import Kind

if TYPE_CHECKING:
    from lightning_megatron.optim.buffers.buffer import BufferKey, Slot

# torch 2.13 renamed both and warns about the old names; older torch knows only those.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Bucket:
    """Parameters whose gradients are reduced, and whose new values are gathered, in one collective.

    With sharding each rank owns one equal share: it gets the sum of the gradients of that share only, updates it, and
    the gather puts the shares together again. Without, every rank owns all of it. Collectives work in place: a rank's
    share of the sum replaces its own share of the input, which every backend allows (NCCL's "in-place" rule).

    Attributes:
        key: the key of the buffer.
        slots: the parameters.
        start: first element of the bucket in the buffer.
        params: ``[n]``, the parameters, padded.
        grads: ``[n]``, their accumulated gradients.
        own_start: first element in the buffer of the share that this rank owns.
        own_params: ``[n / ranks]`` (``[n]`` unsharded), a view of ``params``.
        own_grads: the same of ``grads``; the mean over the axis once a reduction is finished.
        reduce_started: whether gradients were sent this step, so that none may be added any more.
        is_mean: whether gradients are what a reduction has left: none may be added before :meth:`take_back`.

    Args:
        key: the key of the buffer.
        slots: the parameters.
        start: first element of the bucket in the buffer.
        params: ``[n]``.
        grads: ``[n]``.
        axis: the ranks that share gradients.
        shard: whether each owns one share or all.
        mean_over: how many ranks' gradients the mean is of. More than the axis has where each of them has already
            summed what other ranks sent it (experts).
    """

    def __init__(
        self,
        key: BufferKey,
        slots: Sequence[Slot],
        start: int,
        params: Tensor,
        grads: Tensor,
        axis: Axis,
        shard: bool,
        mean_over: int,
    ) -> None:
        self.key = key
        self.slots = list(slots)
        self.start = start
        self.params = params
        self.grads = grads
        self.axis = axis
        self._mean_over = mean_over
        self.sharded = shard and axis.size > 1
        length = params.numel() // axis.size if self.sharded else params.numel()
        offset = axis.rank * length if self.sharded else 0
        self.own_start = start + offset
        self.own_params = params[offset : offset + length]
        self.own_grads = grads[offset : offset + length]
        self.reduce_started = self.is_mean = False
        self._reducing: Pending | None = None
        self._gathering: Pending | None = None

    @property
    def own_end(self) -> int:
        """One past the last element in the buffer of this rank's share."""
        return self.own_start + self.own_params.numel()

    def start_reduce(self, dtype: torch.dtype) -> None:
        """Begin to sum gradients over the axis in ``dtype``."""
        self.reduce_started = True
        if self.axis.size == 1:
            return
        sent = self.grads.to(dtype)  # itself where the dtype is that already
        if self.sharded:
            own = sent.view(self.axis.size, -1)[self.axis.rank]
            call = self.axis.call(Kind.REDUCE_SCATTER, sent)
            work = call.issue(_reduce_scatter, own, sent, group=self.axis.group, async_op=True)
            self._reducing = Pending(own, work, call)
        else:
            call = self.axis.call(Kind.ALL_REDUCE, sent)
            work = call.issue(dist.all_reduce, sent, group=self.axis.group, async_op=True)
            self._reducing = Pending(sent, work, call)

    def finish_reduce(self) -> None:
        """Wait for the sum and make it the mean (no AVG on the wire: HCCL has none)."""
        if self._reducing is not None:
            pending, self._reducing = self._reducing, None
            own = pending.wait()
            if own.dtype != self.own_grads.dtype:
                self.own_grads.copy_(own)
        if self.reduce_started and self._mean_over > 1:
            self.own_grads.div_(self._mean_over)
            self.is_mean = True
        self.reduce_started = False

    def take_back(self) -> None:
        """Make of the mean that a reduction has left what gives it again when it is reduced once more."""
        if self.is_mean:
            self.own_grads.mul_(self._mean_over if self.sharded else self._mean_over / self.axis.size)
            if self.sharded:
                end = self.own_start - self.start
                self.grads[:end].zero_()
                self.grads[end + self.own_grads.numel() :].zero_()
        self.is_mean = False

    def start_gather(self) -> None:
        """Begin to put the shares of all ranks together in ``params``."""
        self.finish_gather()
        if self.sharded:
            call = self.axis.call(Kind.ALL_GATHER, self.params)
            work = call.issue(_all_gather, self.params, self.own_params, group=self.axis.group, async_op=True)
            self._gathering = Pending(self.params, work, call)

    def finish_gather(self) -> None:
        """Wait until ``params`` is whole; costs nothing if no gather is under way."""
        if self._gathering is not None:
            pending, self._gathering = self._gathering, None
            pending.wait()
