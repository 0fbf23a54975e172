"""Parameters and gradients of one kind, laid out end to end.

Collectives, clipping and optimizers are fast on few long tensors, so all parameters that are treated alike share one
flat tensor, and their gradients another. The layout is that of Megatron-LM's distributed optimizer (ZeRO stage 1,
https://arxiv.org/abs/1910.02054); gradients are accumulated in fp32 whatever the dtype of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Axis
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.bucket_plan import plan_buckets
from lightning_megatron.params import ParamSpec


class BufferKey(NamedTuple):
    """What parameters must agree in to share a buffer, so that whatever is done to it is done to all of it.

    Attributes:
        dtype: of the parameters.
        group: index of the user's ``param_groups`` entry.
        replicated_over_tp: every tp rank holds the same elements: they count once in a norm.
        grad_sum_over_tp: gradients are summed over tp before data parallelism sees them.
        tied_copy: the elements repeat a parameter of another pipeline stage: they do not count in a norm.
        expert: experts own the elements, and their replicas, who share gradients and state, are other ranks than those
            of dense layers: the expert-data axis.
        held: gradients are not final when backward is (tied embeddings): not reduced before the end of the step.
    """

    dtype: torch.dtype
    group: int
    replicated_over_tp: bool = False
    grad_sum_over_tp: bool = False
    tied_copy: bool = False
    expert: bool = False
    held: bool = False


@dataclass(frozen=True)
class OwnedParam:
    """A parameter with its global name, its spec and its place in the order of definition."""

    name: str
    param: nn.Parameter
    spec: ParamSpec
    order: int


class Slot:
    """The place of one parameter in its buffer, and the plain meaning of its ``.grad``.

    To a user ``param.grad`` is what it is in plain torch: ``None`` until a backward reaches the parameter, added to by
    each, gone when somebody sets it to ``None``, and whatever somebody puts in its place.

    Attributes:
        owned: the parameter.
        start: first element in the buffer.
        data: the parameter's elements in the flat parameter tensor, in its shape.
        grad: its accumulated gradient in the flat gradient tensor, in its shape.
        aliased: whether ``param.grad`` *is* ``grad``, so that autograd accumulates right into the buffer. Otherwise
            each gradient is added to it by a hook and freed, so that ``param.grad`` is ``None`` between backwards.
        left_alone: for what is not aliased: whether gradients stay in ``param.grad`` until the step. They add up in
            the parameter's dtype then, and whoever clears or replaces them is heard (manual optimization).
        filled: whether the parameter has a gradient in this step.
        lent: whether that is only because other data-parallel ranks have one.
        arrived: whether a backward has reached the parameter since its gradient was last sent or cleared.
        version: of the parameter's values when they were last known to be the optimizer's.
    """

    def __init__(
        self, owned: OwnedParam, start: int, data: Tensor, grad: Tensor, aliased: bool, left_alone: bool
    ) -> None:
        self.owned = owned
        self.start = start
        self.data = data
        self.grad = grad
        self.aliased = aliased
        self.left_alone = left_alone and not aliased
        self.filled = self.lent = self.arrived = False
        self._is_hidden = False
        self._address = data.data_ptr()
        self.version = owned.param._version
        self._seen: Tensor | None = grad if aliased else None

    @property
    def end(self) -> int:
        """One past the last element in the buffer."""
        return self.start + self.grad.numel()

    # Gradients

    def begin(self) -> None:
        """Nothing is accumulated yet.

        The first gradient of a window is then copied into the buffer instead of added to zeros, which spares a pass
        over all gradients; one that never comes is made zero when the buffer is needed (:meth:`settle`).
        """
        self.owned.param.grad = None
        self.filled = self.lent = self.arrived = self._is_hidden = False
        if not self.aliased:
            self._seen = None
            if not self.left_alone:
                self.grad.zero_()

    def collect(self) -> None:
        """Bring what autograd left in ``param.grad`` into the buffer, if it is not there by itself.

        As in plain torch, a ``param.grad`` that somebody set to ``None`` or replaced before this backward took what
        had been accumulated with it.
        """
        param = self.owned.param
        grad = param.grad
        self.arrived = True
        if self.left_alone:
            self._seen = grad
        elif grad is not self.grad and grad is not None:
            with torch.no_grad():
                if self.aliased:
                    self.grad.copy_(grad)
                    param.grad = self.grad
                else:
                    self.grad.add_(grad)
                    param.grad = None

    @property
    def is_replaced(self) -> bool:
        """True if ``param.grad`` is a tensor that somebody has put there since the last backward."""
        grad = self.owned.param.grad
        return grad is not None and grad is not self._seen

    @property
    def is_cleared(self) -> bool:
        """True if a gradient was there and is ``None`` now."""
        own = self.filled and not self.lent
        return own and (self.aliased or self.left_alone) and self.owned.param.grad is None

    @property
    def is_empty(self) -> bool:
        """True if nothing of earlier backwards is in the buffer that counts."""
        return self.owned.param.grad is None and (self.aliased or self.left_alone or not (self.arrived or self.filled))

    def settle(self, sent: bool = False) -> None:
        """Make the buffer say what ``param.grad`` says, before it is sent or stepped on; ``None`` there is zero here.

        Args:
            sent: whether the buffer is on its way already.
        """
        grad = self.owned.param.grad
        self.lent = False
        self.filled = not self.is_empty
        if grad is None:
            if not (self.filled or sent):
                self.grad.zero_()
        elif grad is not self.grad:
            self.take(grad)

    def take(self, grad: Tensor) -> None:
        """Make a gradient that somebody has assigned the accumulated one."""
        with torch.no_grad():
            self.grad.copy_(grad)
        self.filled = True
        if self.aliased:
            self.owned.param.grad = self.grad
        elif self.left_alone:
            self._seen = grad
        else:
            self.owned.param.grad = None

    def adopt(self, grad: Tensor) -> None:
        """Go on with what autograd had accumulated before the parameter had a place."""
        if self.left_alone:
            self.owned.param.grad = grad
        self.take(grad)
        self.arrived = True

    def attach(self) -> None:
        """Have a gradient, zero if there was none, for somebody who adds to it in the buffer."""
        self.settle()
        self.filled = True
        if self.aliased:
            self.owned.param.grad = self.grad
        else:
            self.arrived = True

    def hide(self) -> None:
        """Show ``param.grad`` as ``None`` while somebody clears what has been replaced by it already."""
        if self.aliased and self.owned.param.grad is self.grad:
            self._is_hidden, self.owned.param.grad = True, None

    def unhide(self) -> None:
        """Undo :meth:`hide`."""
        if self._is_hidden:
            self._is_hidden, self.owned.param.grad = False, self.grad

    # Values

    @property
    def is_moved(self) -> bool:
        """True if somebody has given the parameter other storage (``param.data = x``)."""
        return self.owned.param.data_ptr() != self._address

    def release(self) -> None:
        """Give the parameter storage of its own and no gradient."""
        param = self.owned.param
        param.grad = None
        if self.aliased and self.grad.dtype != param.dtype:
            _set_grad_dtype(param, param.dtype)
        param.data = self.data.detach().clone()


class FlatBuffer:
    """The parameters of one key in one flat tensor, their gradients in another.

    Parameters lie in reverse order of definition, which is about the order in which backward finishes them.

    Attributes:
        key: what the parameters have in common.
        params: ``[n]`` in the dtype of the parameters; each ``param.data`` is a view of it.
        grads: ``[n]``, what backward accumulates.
        buckets: the stretches of both that are communicated at once.

    Args:
        key: what the parameters have in common.
        owned: the parameters, in order of definition, all on one device.
        axis: the ranks that share gradients.
        mean_over: how many ranks' gradients the mean is of; ``None`` for those of ``axis``.
        grad_dtype: accumulate gradients in this dtype (or the parameters' own where that is wider).
        bucket_size: elements after which a bucket is closed.
        shard: whether each rank of ``axis`` owns one share of every bucket, or the whole.
        alias_grads: whether ``param.grad`` can be a view of ``grads``; ``None`` finds out.
        leave_grads: see :attr:`Slot.left_alone`.
    """

    def __init__(
        self,
        key: BufferKey,
        owned: Sequence[OwnedParam],
        axis: Axis,
        *,
        grad_dtype: torch.dtype,
        bucket_size: int,
        shard: bool,
        mean_over: int | None = None,
        alias_grads: bool | None = None,
        leave_grads: bool = False,
    ) -> None:
        self.key = key
        backward_order = list(reversed(owned))
        device = backward_order[0].param.device
        plans = plan_buckets([o.param.numel() for o in backward_order], bucket_size, axis.size)
        grad_dtype = torch.promote_types(grad_dtype, key.dtype)
        if alias_grads is None:
            alias_grads = grad_dtype == key.dtype or supports_grad_dtype(key.dtype, grad_dtype, device)
        self.params = torch.zeros(plans[-1].end, dtype=key.dtype, device=device)
        self.grads = torch.zeros(plans[-1].end, dtype=grad_dtype, device=device)
        self.buckets: list[Bucket] = []
        starts = [start for plan in plans for start in plan.starts]
        taken = zip(starts, (o.param.numel() for o in backward_order), strict=True)
        self._gaps = _gaps(taken, plans[-1].end).to(device)
        for plan in plans:
            here = backward_order[plan.first : plan.first + len(plan.starts)]
            slots = [self._slot(o, start, alias_grads, leave_grads) for o, start in zip(here, plan.starts, strict=True)]
            self.buckets.append(
                Bucket(
                    key, slots, plan.start, self.params[plan.start : plan.end], self.grads[plan.start : plan.end],
                    axis, shard, mean_over or axis.size,
                )
            )  # fmt: skip

    def clear_gaps(self) -> None:
        """Zeros between parameters: a NaN that gradients are scaled with would stay there, and count in every norm."""
        if self._gaps.numel():
            self.grads.index_fill_(0, self._gaps, 0)

    def _slot(self, owned: OwnedParam, start: int, aliased: bool, left_alone: bool) -> Slot:
        param = owned.param
        data = self.params[start : start + param.numel()].view(param.shape)
        grad = self.grads[start : start + param.numel()].view(param.shape)
        data.copy_(param.detach())
        given, param.grad = param.grad, None
        param.data = data
        if aliased and grad.dtype != param.dtype:
            _set_grad_dtype(param, grad.dtype)
        slot = Slot(owned, start, data, grad, aliased, left_alone)
        if given is not None:
            slot.adopt(given)
        return slot


def _gaps(taken: Iterable[tuple[int, int]], end: int) -> Tensor:
    """Places in a buffer of ``end`` elements that belong to no parameter.

    Args:
        taken: start and length of the parameters, in order.
        end: elements of the buffer.
    """
    found, free = [torch.empty(0, dtype=torch.int64)], 0
    for start, length in (*taken, (end, 0)):
        found.append(torch.arange(free, start))
        free = start + length
    return torch.cat(found)


def _set_grad_dtype(param: Any, dtype: torch.dtype) -> None:
    param.grad_dtype = dtype  # typed Any: torch's stubs know the attribute only in the versions that have it


def supports_grad_dtype(param_dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device) -> bool:
    """True if autograd here accumulates into a gradient of another dtype than its parameter's.

    Asked of torch itself, on the device in question: builds for accelerators differ in what they back-port.
    """
    probe = nn.Parameter(torch.ones(1, dtype=param_dtype, device=device))
    if not hasattr(probe, "grad_dtype"):
        return False
    try:
        _set_grad_dtype(probe, grad_dtype)
        probe.grad = total = torch.ones(1, dtype=grad_dtype, device=device)
        with torch.enable_grad():
            (probe * 2).sum().backward()
    except (RuntimeError, TypeError):
        return False
    return probe.grad is total and bool(total.item() == 3)
