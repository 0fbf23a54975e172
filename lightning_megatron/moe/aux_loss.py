"""Auxiliary losses of experts, as pure functions.

All are *sums over ranks of local terms*: counts are those of all tokens that share a loss, probabilities only those of
this rank's tokens. So gradients need no communication beyond that of the router's weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.stage import BackwardScale


def count_tokens(experts: Tensor, num_experts: int) -> Tensor:
    """Number of choices of each expert: ``[..., T, k]`` to ``[..., E]``, int64; ids beyond ``E`` are not counted."""
    flat = experts.flatten(-2)
    counts = torch.zeros(*flat.shape[:-1], num_experts + 1, dtype=torch.int64, device=experts.device)
    counts.scatter_add_(-1, flat, torch.ones_like(flat))
    return counts[..., :num_experts]


def load_balancing_loss(probs: Tensor, counts: Tensor, total_tokens: int | Tensor, topk: int) -> Tensor:
    """This rank's part of ``E sum_e(count_e sum_t p_te) / (k T^2)``; 1 where the load is even.

    Switch Transformer's loss (https://arxiv.org/abs/2101.03961, equation 4) for ``k`` choices, as in Megatron-LM. With
    leading dimensions (one loss a sequence), the mean over those that have tokens.

    Args:
        probs: ``[..., T, E]`` of this rank's tokens, over all experts.
        counts: ``[..., E]`` choices of all tokens that share the loss; without gradient.
        total_tokens: number ``T`` of these tokens, ``[...]`` if it differs between losses.
        topk: choices of a token.
    """
    num_experts = probs.shape[-1]
    load = (counts.to(probs.dtype) * probs.sum(-2)).sum(-1)
    tokens = torch.as_tensor(total_tokens, device=load.device)
    losses = load / tokens.to(load.dtype).square().clamp(min=1)
    return losses.sum() / (tokens > 0).expand_as(losses).sum().clamp(min=1) * (num_experts / topk)


def z_loss(logits: Tensor, total_tokens: int | Tensor, counted: Tensor | None = None) -> Tensor:
    """This rank's part of the mean over all tokens of ``logsumexp(logits)^2`` (https://arxiv.org/abs/2202.08906).

    Args:
        logits: ``[..., E]`` of this rank's tokens.
        total_tokens: number of tokens of the mean; with 0 the loss is 0.
        counted: bool ``[...]``, False for tokens that do not count; ``None`` if all do.
    """
    squares = logits.logsumexp(-1).square()
    total = torch.as_tensor(total_tokens, device=logits.device).clamp(min=1)
    return (squares if counted is None else squares * counted).sum() / total


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, carrier: Tensor, extra: Tensor, scale: BackwardScale | None) -> Tensor:
        ctx.scale = scale  # type: ignore[attr-defined]
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        scale: BackwardScale | None = ctx.scale  # type: ignore[attr-defined]
        return grad, grad if scale is None else torch.as_tensor(scale.value, device=grad.device).float(), None


def attach_aux_loss(carrier: Tensor, extra: Tensor, scale: BackwardScale | None = None) -> Tensor:
    """``carrier`` unchanged, with a backward that differentiates ``extra`` too.

    Args:
        carrier: loss, whose gradient is that of ``extra`` too; or an activation.
        extra: auxiliary loss, a scalar.
        scale: gradient of ``extra``; needed if the carrier is not a loss.
    """
    out: Tensor = _Attach.apply(carrier, extra, scale)
    return out
