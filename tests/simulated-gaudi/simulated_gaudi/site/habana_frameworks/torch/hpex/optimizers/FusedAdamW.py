"""AdamW in one op a group; its step is counted in the group, and epsilon is not corrected as torch corrects it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from simulated_hpu.settings import settings


class FusedAdamW(torch.optim.Optimizer):
    """AdamW.

    Args:
        params: parameters or groups; those of one group share type and device.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, times the learning rate.
        bias_correction: True to correct the moments' start from zero.
        moments_dtype: dtype of the moments; ``None`` for the parameter's.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        moments_dtype: torch.dtype | None = None,
    ) -> None:
        if lr < 0.0:
            raise ValueError(f"Invalid learning rate: {lr} - should be >= 0.0")
        for beta in betas:
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter: {beta} - should be in [0.0, 1.0[")
        if eps < 0.0:
            raise ValueError(f"Invalid epsilon value: {eps} - should be >= 0.0")
        if moments_dtype is not None and moments_dtype.itemsize == 1:
            raise NotImplementedError("moments in fp8 are not simulated")
        self.moments_dtype = moments_dtype
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; a closure is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        weights = [p for p in group["params"] if p.grad is not None]
        for p in weights:
            if p.grad.is_sparse:
                raise RuntimeError("Adam does not support sparse gradients, please consider SparseAdam")
            if not self.state[p]:
                zeros = torch.zeros_like(p, dtype=self.moments_dtype or p.dtype)
                self.state[p].update(step=0, exp_avg=zeros, exp_avg_sq=zeros.clone())
        if not weights:
            return
        t = group["step"] = group.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        rate = group["lr"]
        if group["bias_correction"]:
            rate = rate * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        kept = 1 - group["lr"] * group["weight_decay"]
        device = weights[0].device
        decay = (kept,) if settings().is_lazy else (torch.tensor(kept).to(device), kept != 1)
        torch.ops.hpu.optimizer_adamw(
            [p.grad for p in weights],
            weights,
            [self.state[p]["exp_avg"] for p in weights],
            [self.state[p]["exp_avg_sq"] for p in weights],
            torch.tensor(-rate).to(device),
            beta1,
            beta2,
            group["eps"],
            *decay,
        )
