"""Assumed choices of experts in a rehearsal; in a run they depend on the values of the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.mesh import Axis


def choices_on(ep: Axis, shape: torch.Size, num_experts: int, imbalance: float) -> Tensor:
    """:func:`routed_choices` ``[..., k]`` of this rank on the expert-parallel axis.

    Args:
        ep: expert-parallel axis.
        shape: shape of the choices.
        num_experts: number of experts.
        imbalance: choices of this rank's experts over the mean of all ranks.
    """
    here = range(ep.rank * num_experts // ep.size, (ep.rank + 1) * num_experts // ep.size)
    topk = shape[-1]
    return routed_choices(shape.numel() // topk, topk, num_experts, here, imbalance).view(shape)


def routed_choices(tokens: int, topk: int, num_experts: int, here: range, imbalance: float) -> Tensor:
    """Choices ``[T, k]`` that give the experts of this rank ``imbalance`` times the mean, and spread the rest evenly.

    All ranks are assumed to choose like this one, so with an imbalance above 1 this rank gets most. If one rank holds
    all experts, the first expert gets more.

    Args:
        tokens: number of tokens ``T``.
        topk: choices of a token ``k``, all different.
        num_experts: number of experts.
        here: experts of this rank.
        imbalance: choices of this rank's experts over the mean of all ranks.
    """
    favoured = torch.tensor(list(here) if len(here) < num_experts else [0])
    others = torch.tensor([e for e in range(num_experts) if e not in set(favoured.tolist())], dtype=torch.int64)
    least, most = max(0, topk - len(others)), min(topk, len(favoured))
    wanted = round(imbalance * tokens * topk * len(favoured) / num_experts)
    wanted = min(max(wanted, tokens * least), tokens * most)
    upto = torch.arange(tokens + 1) * wanted // max(tokens, 1)
    own = upto.diff()[:, None]  # choices of this rank's experts, by token
    choice = torch.arange(topk)[None, :]
    before, before_others = upto[:-1, None], torch.arange(tokens)[:, None] * topk - upto[:-1, None]
    first = favoured[(before + choice) % len(favoured)]
    if not len(others):
        return first
    rest = others[(before_others + choice - own) % len(others)]
    return torch.where(choice < own, first, rest)
