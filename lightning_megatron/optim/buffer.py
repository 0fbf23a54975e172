"""Parameters and gradients of one kind, laid out end to end.

Collectives, clipping and optimizers are fast on few long tensors, so all parameters that are treated alike share one
flat tensor, and their gradients another. The layout is that of Megatron-LM's distributed optimizer (ZeRO stage 1,
https://arxiv.org/abs/1910.02054); gradients are accumulated in fp32 whatever the dtype of the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Axis
from lightning_megatron.optim.bucket import Bucket
from lightning_megatron.optim.plan import plan_buckets
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
    """The place of one parameter in its buffer.

    Attributes:
        owned: the parameter.
        start: first element in the buffer.
        data: the parameter's elements in the flat parameter tensor, in its shape.
        grad: its accumulated gradient in the flat gradient tensor, in its shape.
        aliased: whether ``param.grad`` *is* ``grad``, so that autograd accumulates right into the buffer. Otherwise
            each gradient is added to it by a hook and freed.
    """

    def __init__(self, owned: OwnedParam, start: int, data: Tensor, grad: Tensor, aliased: bool) -> None:
        self.owned = owned
        self.start = start
        self.data = data
        self.grad = grad
        self.aliased = aliased

    @property
    def end(self) -> int:
        """One past the last element in the buffer."""
        return self.start + self.grad.numel()

    def begin(self) -> None:
        """Nothing is accumulated yet.

        The first gradient of a window is then copied into the buffer instead of added to zeros, which spares a pass
        over all gradients; one that never comes is made zero when the buffer is needed (:meth:`attach`).
        """
        if self.aliased:
            self.owned.param.grad = None
        else:
            self.grad.zero_()

    def alias(self) -> None:
        """Let ``param.grad`` be the buffer again."""
        if self.aliased:
            self.owned.param.grad = self.grad

    def collect(self) -> None:
        """Bring what autograd left in ``param.grad`` into the buffer, if it is not there by itself.

        As in plain torch, a ``param.grad`` that somebody set to ``None`` or replaced before this backward took what
        had been accumulated with it.
        """
        param = self.owned.param
        grad = param.grad
        if grad is self.grad or grad is None:
            return
        with torch.no_grad():
            if self.aliased:
                self.grad.copy_(grad)
                param.grad = self.grad
            else:
                self.grad.add_(grad)
                param.grad = None

    def attach(self) -> None:
        """Make ``param.grad`` the buffer again; a ``None`` there means zero, as in plain torch."""
        if not self.aliased or self.owned.param.grad is self.grad:
            return
        if self.owned.param.grad is None:
            self.grad.zero_()
            self.owned.param.grad = self.grad
        else:
            self.collect()

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
        for plan in plans:
            here = backward_order[plan.first : plan.first + len(plan.starts)]
            slots = [self._slot(o, start, alias_grads) for o, start in zip(here, plan.starts, strict=True)]
            self.buckets.append(
                Bucket(
                    key, slots, plan.start, self.params[plan.start : plan.end], self.grads[plan.start : plan.end],
                    axis, shard, mean_over or axis.size,
                )
            )  # fmt: skip

    def _slot(self, owned: OwnedParam, start: int, aliased: bool) -> Slot:
        param = owned.param
        data = self.params[start : start + param.numel()].view(param.shape)
        grad = self.grads[start : start + param.numel()].view(param.shape)
        data.copy_(param.detach())
        param.grad = None
        param.data = data
        if aliased and grad.dtype != param.dtype:
            _set_grad_dtype(param, grad.dtype)
        slot = Slot(owned, start, data, grad, aliased)
        slot.alias()
        return slot


def _set_grad_dtype(param: Any, dtype: torch.dtype) -> None:
    param.grad_dtype = dtype  # typed Any: torch's stubs know the attribute only in the versions that have it


def supports_grad_dtype(param_dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether autograd here accumulates into a gradient of another dtype than its parameter's.

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
