"""Bucket: the range of a flat buffer that one collective communicates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import (
    Pending,
    start_all_gather_in_place,
    start_all_reduce_in_place,
    start_reduce_scatter_into,
)
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.buffers.slot import BufferKey, Slot


class Bucket:
    """Parameters whose gradients are reduced, and whose new values are gathered, in one collective.

    With sharding each rank owns one equal share: it receives the summed gradients of that share only, updates it, and
    an all-gather restores the whole bucket. Without sharding every rank owns all of it. Collectives work in place: a
    rank's share of the sum replaces its share of the input, which every backend allows (NCCL's "in-place" rule).

    Attributes:
        key: the key of the buffer.
        slots: the parameters.
        start: first element of the bucket in the buffer.
        params: ``[n]``, the parameters, padded: the bucket's range of the flat parameters.
        grads: ``[n]``, their accumulated gradients: the bucket's range of the flat gradients.
        axis: the ranks that share gradients.
        sharded: True if each rank owns one share, False if each owns all.
        own_start: first element in the buffer of the share that this rank owns.
        own_params: ``[n / ranks]`` (``[n]`` unsharded), a view of ``params``.
        own_grads: this rank's view of ``grads``; the mean over the axis once a reduction is finished.
        reduce_started: True if the reduction has started in this step, so that no gradient may be added.
        is_mean: True if gradients have been reduced; none may be added before :meth:`undo_mean`.
        is_whole: True if ``grads`` has the means of all ranks' shares, not only of this rank's.

    Args:
        shard: True if each rank owns one share, False if each owns all.
        mean_over: number of ranks over whose gradients the mean is taken. It exceeds the size of the axis for experts,
            whose gradients already include the tokens of other ranks.
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
        self.is_whole = not self.sharded
        self._reducing: Pending | None = None
        self._gathering: Pending | None = None

    @property
    def own_end(self) -> int:
        """One past the last element in the buffer of this rank's share."""
        return self.own_start + self.own_params.numel()

    def start_reduce(self, dtype: torch.dtype) -> None:
        """Begin to sum gradients over the axis in ``dtype``."""
        self.reduce_started, self.is_whole = True, not self.sharded
        if self.axis.size == 1:
            return
        sent = self.grads.to(dtype)  # no copy if it has that dtype already
        if self.sharded:
            own = sent.view(self.axis.size, -1)[self.axis.rank]
            self._reducing = start_reduce_scatter_into(own, sent, self.axis)
        else:
            self._reducing = start_all_reduce_in_place(sent, self.axis)

    def finish_reduce(self) -> None:
        """Wait for the sum and divide it to get the mean (HCCL has no AVG reduction)."""
        if self._reducing is not None:
            pending, self._reducing = self._reducing, None
            own = pending.wait()
            if own.dtype != self.own_grads.dtype:
                self.own_grads.copy_(own)
        if self.reduce_started and self._mean_over > 1:
            self.own_grads.div_(self._mean_over)
            self.is_mean = True
        self.reduce_started = False

    def show_grads(self) -> None:
        """Make ``param.grad`` the mean on every rank, after the reduction; all ranks of the axis call this."""
        is_new = not self.is_whole
        if self.sharded:
            start_all_gather_in_place(self.grads, self.axis).wait()
        self.is_whole = True
        for slot in self.slots:
            is_missing = is_new and slot.owned.param.requires_grad and not slot.has_grad
            if slot.aliased and (slot.grad_is_remote or (is_missing and slot.grad.any())):
                slot.show()

    def undo_mean(self) -> None:
        """Undo the averaging so that more gradients can be accumulated; reducing again gives the same mean."""
        if self.is_mean:
            self.own_grads.mul_(self._mean_over if self.sharded else self._mean_over / self.axis.size)
            if self.sharded:
                end = self.own_start - self.start
                self.grads[:end].zero_()
                self.grads[end + self.own_grads.numel() :].zero_()
        self.is_mean = False

    def start_gather(self) -> None:
        """Begin to gather the shares of all ranks into ``params``."""
        self.finish_gather()
        if self.sharded:
            self._gathering = start_all_gather_in_place(self.params, self.axis)

    def finish_gather(self) -> None:
        """Wait until ``params`` is complete; costs nothing if no gather is running."""
        if self._gathering is not None:
            pending, self._gathering = self._gathering, None
            pending.wait()
