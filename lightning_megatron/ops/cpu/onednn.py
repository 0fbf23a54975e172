"""Products of fp32 matrices by oneDNN, on processors where torch's own choice is slower.

On x86, torch multiplies fp32 matrices with Intel's MKL, and those of 16 bits with oneDNN. MKL runs slower code on
processors of other vendors: on AMD's Zen 4, oneDNN is faster by a tenth to a quarter
(``benchmarks/profile_step_cpu_202611.md``). Both sum in fp32, in another order.

torch has no public function for it. ``mkldnn._linear_pointwise`` is the operator that code of ``torch.compile`` calls;
without it, torch's own choice is used. In a graph, :func:`linear_onednn` is a custom operator
(``graph_operators.py``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.device import mkl_is_slow

SMALLEST = 1 << 25
"""Multiplications of the smallest product whose call is worth preparing for oneDNN."""


@cache
def _operator() -> Any:
    namespace = getattr(torch.ops, "mkldnn", None)
    return getattr(namespace, "_linear_pointwise", None)


def why_not_onednn(vendor: str | None = None) -> str | None:
    """Reason not to use oneDNN for fp32 products on this machine, or ``None``.

    Args:
        vendor: vendor of the processor as in ``/proc/cpuinfo``; ``None`` means this machine's.
    """
    if not mkl_is_slow(vendor):
        return "torch's own choice is fast on this processor"
    if not torch.backends.mkldnn.is_available() or _operator() is None:
        return "this torch has no such operator of oneDNN"
    return None


_MISSING = why_not_onednn()


def by_onednn(a: Tensor, b: Tensor) -> bool:
    """True if oneDNN computes ``a b``.

    Args:
        a: ``[..., n, k]``. Not for strided rows, as in a weight's gradient: oneDNN would copy it and gain nothing.
        b: ``[k, m]``.
    """
    if _MISSING is not None:
        return False
    if not a.dtype == b.dtype == torch.float32 or a.device.type != "cpu" or b.dim() != 2:
        return False
    if a.stride(-1) != 1 or a.numel() * b.shape[1] < SMALLEST:
        return False
    return not torch.is_autocast_enabled("cpu")


def linear_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` of fp32 operands; autograd must not record this.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``, of any strides.
        bias: ``[out]``.
    """
    out: Tensor = _operator()(x, weight, bias, "none", [], "")
    return out
