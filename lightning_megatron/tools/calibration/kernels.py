"""Rates of single kernels: matrix products, attention, norms and activations, copies, and the start of a kernel.

Each is measured forward and backward, by the functions that the layers call, and related to the FLOPs and bytes that
``tools/planning/time`` counts for it: the rate includes whatever a formula leaves out. ``limit`` is the total number of
seconds that the calls of one measurement should take.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_megatron.ops.activation import swiglu
from lightning_megatron.ops.attention import attention
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.matmul import linear
from lightning_megatron.ops.registry import Ops
from lightning_megatron.tools.calibration.timing import seconds_of
from lightning_megatron.tools.planning.time.software import Software

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
ROWS = 1024
LONGEST = 0.4
"""Seconds of one call after which no larger size is tried."""


def _forward_and_backward(made: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Callable[[], object]:
    gradient = torch.ones_like(made())
    return lambda: torch.autograd.grad(made(), inputs, gradient)


def copy_rate(device: torch.device, limit: float) -> float:
    """Bytes a second that a copy reads and writes, of a tensor that no cache holds."""
    best = 0.0
    for size in (1 << 26, 1 << 28):
        source = torch.ones(size // 4, device=device)
        target = torch.empty_like(source)
        best = max(best, 2 * size / seconds_of(lambda t=target, s=source: t.copy_(s), device, limit))  # type: ignore[misc]
    return best


def kernel_seconds(device: torch.device, limit: float) -> float:
    """Seconds in which the host launches a kernel, averaged over forward and backward."""
    x = torch.ones(8, device=device, requires_grad=True)

    def chain() -> Tensor:
        y = x
        for _ in range(50):
            y = y + x
        return y

    return seconds_of(_forward_and_backward(chain, (x,)), device, limit) / 150


def matmul_seconds(device: torch.device, limit: float, dtype: torch.dtype) -> list[tuple[float, float, float]]:
    """FLOPs, bytes and seconds of square products of several widths, forward and backward."""
    found = []
    for width in WIDTHS:
        rows = max(ROWS, width)
        x = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
        w = torch.randn(width, width, device=device, dtype=dtype, requires_grad=True)
        took = seconds_of(_forward_and_backward(lambda x=x, w=w: linear(x, w), (x, w)), device, limit)  # type: ignore[misc]
        moved = 3 * (2 * rows * width + width * width) * dtype.itemsize
        found.append((6.0 * rows * width * width, float(moved), took))
        if took > LONGEST:
            break
    return found


def attention_rate(device: torch.device, limit: float, dtype: torch.dtype) -> float:
    """FLOP/s of causal attention, forward and backward, by the count of ``tools/planning/time/compute.py``."""
    rates, call = [], AttentionCall(causal=True)
    for seq in (512, 2048, 4096):
        q, k, v = (torch.randn(seq, 1, 8, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        work = _forward_and_backward(lambda q=q, k=k, v=v: attention(q, k, v, call), (q, k, v))  # type: ignore[misc]
        took = seconds_of(work, device, limit)
        rates.append(3.5 * 2.0 * seq * seq * 8 * 64 / took)
        if took > LONGEST:
            break
    return statistics.median(rates)


def elementwise_rate(device: torch.device, limit: float, dtype: torch.dtype) -> float:
    """Bytes a second of a norm, a residual sum and an activation, forward and backward, as the formulas count bytes."""
    ops = Ops(device.type)
    norm = ops.choose("rms_norm")
    rates = []
    for width in (512, 2048, 4096):
        x = torch.randn(ROWS, width, device=device, dtype=dtype, requires_grad=True)
        weight = torch.ones(width, device=device, dtype=dtype, requires_grad=True)

        def block(x: Tensor = x, weight: Tensor = weight) -> Tensor:
            normed = norm.run(x, weight, 1e-5)
            return x + torch.cat((swiglu(normed), swiglu(normed)), -1)

        took = seconds_of(_forward_and_backward(block, (x, weight)), device, limit)
        # Norm and sum 5 values, two activations of half the width 1.5 each, joining them 2.
        values = ROWS * width * (5 + 3 + 2)
        rates.append(3 * values * dtype.itemsize * Software.passes / took)
        if took > LONGEST:
            break
    return statistics.median(rates)
