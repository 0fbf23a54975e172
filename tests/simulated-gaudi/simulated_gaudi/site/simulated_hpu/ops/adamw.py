"""One step of AdamW (Loshchilov and Hutter 2019) for many tensors, as the device's kernel does it."""

from __future__ import annotations

import torch
from torch import Tensor

from simulated_hpu.ops.registry import define_op
from simulated_hpu.settings import settings


def _check(vectors: list[list[Tensor]]) -> None:
    sizes = [len(vector) for vector in vectors]
    if sizes[1] == 0:
        raise RuntimeError("optimizer_adamw : can not process empty weight vector")
    if len(set(sizes)) != 1:
        raise RuntimeError(
            "All 4 vector inputs must have the same number of elements but they respectively have: "
            + ", ".join(map(str, sizes))
        )


def _step(
    gradient_vec: list[Tensor], weight_vec: list[Tensor], exp_avg_vec: list[Tensor], exp_avg_sq_vec: list[Tensor],
    neg_step_t: Tensor, beta1: float, beta2: float, epsilon: float, weight_decay: Tensor | float,
    has_weight_decay: bool = True, exp_avg_scales: list[Tensor] | None = None,
    exp_avg_sq_scales: list[Tensor] | None = None,
) -> None:  # fmt: skip
    _check([gradient_vec, weight_vec, exp_avg_vec, exp_avg_sq_vec])
    if exp_avg_scales or exp_avg_sq_scales:
        raise NotImplementedError("moments in fp8 are not simulated")
    for grad, weight, avg, square in zip(gradient_vec, weight_vec, exp_avg_vec, exp_avg_sq_vec, strict=True):
        dtype = torch.promote_types(grad.dtype, avg.dtype)
        g = grad.to(dtype)
        m = beta1 * avg.to(dtype) + (1 - beta1) * g
        v = beta2 * square.to(dtype) + (1 - beta2) * g * g
        avg.copy_(m)
        square.copy_(v)
        if has_weight_decay:
            kept = weight_decay if isinstance(weight_decay, Tensor) else torch.tensor(weight_decay)
            weight.mul_(kept.to(weight.dtype))  # in the weight's dtype: in bf16 a usual decay rounds to none
        # The second moment is not corrected for its bias here: epsilon weighs more than in torch's AdamW.
        weight.add_((neg_step_t.to(weight.dtype) * m / (v.sqrt() + epsilon)).to(weight.dtype))


def define() -> None:
    """Define the op of the mode: eager and lazy mode differ in the arguments for the decay."""
    decay = "float weight_decay" if settings().is_lazy else "Tensor weight_decay, bool has_weight_decay"
    define_op(
        "optimizer_adamw(Tensor[] gradient_vec, Tensor(a!)[] weight_vec, Tensor(b!)[] exp_avg_vec, "
        f"Tensor(c!)[] exp_avg_sq_vec, Tensor neg_step_t, float beta1, float beta2, float epsilon, {decay}, "
        "Tensor(d!)[]? exp_avg_scales = None, Tensor(e!)[]? exp_avg_sq_scales = None) -> ()",
        _step,
    )
