"""Root mean square norm in one op."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor


class RmsNormBwdMode(Enum):
    """Partitioning of the backward; the results are the same."""

    DEFAULT = 0
    STATIC_CASE_WIDTH_PARTITIONING = 1


class FusedRMSNorm(torch.autograd.Function):
    """``apply(data_in, gamma, eps, ...)``, by position; the result is fp32 where the two dtypes differ."""

    @staticmethod
    def forward(
        ctx: Any,
        data_in: Tensor,
        gamma: Tensor,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
    ) -> Tensor:
        """Norm over the last dimension."""
        ops = torch.ops.hpu
        out, inverse_rms = (ops.rms_norm_fast if fast_math else ops.rms_norm)(data_in, gamma, eps)
        ctx.save_for_backward(data_in, gamma, inverse_rms)
        ctx.options = use_stages, bwd_mode, fast_math
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input and gamma."""
        use_stages, bwd_mode, fast_math = ctx.options
        ops = torch.ops.hpu
        backward = ops.rms_norm_fast_backward if fast_math else ops.rms_norm_backward
        return *backward(grad, *ctx.saved_tensors, use_stages, bwd_mode), None, None, None, None
