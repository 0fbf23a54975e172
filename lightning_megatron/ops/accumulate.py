"""Accumulation of gradients in place, without a tensor for each summand. Autograd must not record these functions.

On a CPU a summand of another dtype than the sum is converted in blocks that stay in the caches: torch would convert
the whole summand first, into new memory. An accelerator converts in the kernel that adds, so there one call does all:
each kernel launch costs time. On CUDA a product of 16-bit matrices is added to an fp32 sum before it is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.by_shape import by_shape
from lightning_megatron.device import adds_products, cache_bytes
from lightning_megatron.ops.matmul import product, upcasts
from lightning_megatron.weight_grad_store import GradPlace


@by_shape
def add_(place: GradPlace, value: Tensor, scale: Tensor | None = None) -> None:
    """Add a gradient, in the shape of the parameter, times ``scale``, which is 0-dim; ``None`` for 1."""
    block = max(1, value.numel()) if cache_bytes(value.device) is None else place.block
    for here, some in zip(place.grad.view(-1).split(block), value.reshape(-1).split(block), strict=True):
        if scale is None:
            here.copy_(some) if place.is_new else here.add_(some)
        elif place.is_new:
            here.copy_(some).mul_(scale)
        else:
            here.addcmul_(some.to(here.dtype) if some.is_cpu else some, scale)


def add_product_(place: GradPlace, a: Tensor, b: Tensor) -> None:
    """Add ``a b``; in the dtype of the sum the product kernel itself accumulates.

    Args:
        place: place of the sum; all dimensions of the gradient before the last count as ``n``.
        a: ``[n, k]``.
        b: ``[k, m]``.
    """
    total, beta = place.grad.flatten(0, -2), 0 if place.is_new else 1  # beta 0 does not read what was there
    upcast = upcasts(a, b)
    if upcast and a.dtype != total.dtype:
        a, b, upcast = a.to(total.dtype), b.to(total.dtype), False
    if a.dtype == total.dtype and not upcast:
        total.addmm_(a, b, beta=beta)
    elif total.dtype == torch.float32 and adds_products(total.device.type):
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        add_(place, product(a, b))


def add_rows_(place: GradPlace, rows: Tensor, values: Tensor) -> None:
    """Add gradients ``[t, h]`` of the rows with numbers ``[t]``, which may repeat, to a sum ``[n, h]``."""
    if place.is_new:
        place.grad.zero_()
    values = values.to(place.grad.dtype)
    if place.grad.is_cuda:
        # `index_add_` adds in an order that changes from run to run. The check of bounds that `index_put_` makes, and
        # the lookup of these rows has made, lets the host wait in older torch.
        torch.ops.aten._index_put_impl_(place.grad, [rows], values, accumulate=True, unsafe=True)
    else:
        place.grad.index_add_(0, rows, values)
