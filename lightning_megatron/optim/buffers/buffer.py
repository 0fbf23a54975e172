"""Flat buffers for the parameters and gradients of one kind.

Collectives, clipping and optimizers are fast on few long tensors. So all parameters that are treated alike share one
flat tensor, and their gradients another. The layout is that of Megatron-LM's distributed optimizer (ZeRO stage 1,
https://arxiv.org/abs/1910.02054). Gradients are accumulated in fp32 for every dtype of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_megatron.mesh import Axis
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.bucket_plan import default_bucket_size, plan_buckets
from lightning_megatron.optim.buffers.slot import BufferKey, OwnedParam, Slot, set_grad_dtype, supports_grad_dtype
from lightning_megatron.optim.core.config import DistributedOptimizerConfig


class FlatBuffer:
    """The parameters of one key in one flat tensor, their gradients in another.

    Parameters lie in reverse order of definition, which is about the order in which backward finishes them.

    Attributes:
        key: properties that the parameters have in common.
        params: ``[n]`` in the dtype of the parameters; each ``param.data`` is a view of it.
        grads: ``[n]``, the gradients that backward accumulates.
        buckets: ranges of both tensors, each communicated in one collective.

    Args:
        owned: the parameters, in order of definition, all on one device.
        axis: the ranks that share gradients.
        mean_over: number of ranks over whose gradients the mean is taken; ``None`` for the size of ``axis``.
    """

    def __init__(
        self,
        key: BufferKey,
        owned: Sequence[OwnedParam],
        axis: Axis,
        config: DistributedOptimizerConfig,
        mean_over: int | None = None,
    ) -> None:
        self.key = key
        backward_order = list(reversed(owned))
        device = backward_order[0].param.device
        bucket_size = config.bucket_size or default_bucket_size(axis.size)
        plans = plan_buckets([o.param.numel() for o in backward_order], bucket_size, axis.size)
        grad_dtype = torch.promote_types(config.grad_dtype, key.dtype)
        self._keep_param_grads = config.keep_param_grads
        self._alias_grads = (
            grad_dtype == key.dtype or supports_grad_dtype(key.dtype, grad_dtype, device)
            if config.alias_grads is None
            else config.alias_grads
        )
        self.params = torch.zeros(plans[-1].end, dtype=key.dtype, device=device)
        self.grads = torch.zeros(plans[-1].end, dtype=grad_dtype, device=device)
        self.buckets: list[Bucket] = []
        starts = [start for plan in plans for start in plan.starts]
        taken = zip(starts, (o.param.numel() for o in backward_order), strict=True)
        self._gaps = _gaps(taken, plans[-1].end).to(device)
        for plan in plans:
            here = backward_order[plan.first : plan.first + len(plan.starts)]
            slots = [self._slot(o, start) for o, start in zip(here, plan.starts, strict=True)]
            self.buckets.append(
                Bucket(
                    key, slots, plan.start, self.params[plan.start : plan.end], self.grads[plan.start : plan.end],
                    axis, config.shard, mean_over or axis.size,
                )
            )  # fmt: skip

    def clear_gaps(self) -> None:
        """Zero the padding between parameters: scaling by NaN would leave NaN there and spoil every later norm."""
        if self._gaps.numel():
            self.grads.index_fill_(0, self._gaps, 0)

    def _slot(self, owned: OwnedParam, start: int) -> Slot:
        param, aliased = owned.param, self._alias_grads
        data = self.params[start : start + param.numel()].view(param.shape)
        grad = self.grads[start : start + param.numel()].view(param.shape)
        data.copy_(param.detach())
        given, param.grad = param.grad, None
        param.data = data
        if aliased and getattr(param, "grad_dtype", param.dtype) != grad.dtype:  # an earlier buffer may have set it
            set_grad_dtype(param, grad.dtype)
        slot = Slot(owned, start, data, grad, aliased, self._keep_param_grads)
        if given is not None:
            slot.adopt(given)
        return slot


def _gaps(taken: Iterable[tuple[int, int]], end: int) -> Tensor:
    """Indices of the elements of a buffer that belong to no parameter.

    Args:
        taken: start and length of each parameter, in order.
        end: number of elements of the buffer.
    """
    found, free = [torch.empty(0, dtype=torch.int64)], 0
    for start, length in (*taken, (end, 0)):
        found.append(torch.arange(free, start))
        free = start + length
    return torch.cat(found)
