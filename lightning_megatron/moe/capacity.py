"""Capacity of experts: the permutation of choices by expert, and the choices beyond the capacity."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.moe.aux_loss import count_tokens


class Permutation(NamedTuple):
    """Choices of all tokens, sorted by expert.

    Attributes:
        order: ``[T k]`` choices by expert, for each expert by priority; dropped choices at the end.
        counts: ``[E]`` number of choices of each expert, int64.
        place: ``[T k]`` position of each choice *of* ``order`` among those of its expert.
    """

    order: Tensor
    counts: Tensor
    place: Tensor


def permute_by_expert(experts: Tensor, num_experts: int, priority: Tensor | None = None) -> Permutation:
    """Sort choices by expert.

    Args:
        experts: ``[T, k]`` ids; ``num_experts`` for a dropped choice.
        num_experts: number of experts ``E``.
        priority: ``[T, k]``, highest first within an expert; ``None`` for the order of tokens.
    """
    flat = experts.flatten()
    if priority is None:
        order = flat.argsort(stable=True)
    else:
        first = priority.flatten().argsort(descending=True, stable=True)
        order = first[flat[first].argsort(stable=True)]
    counts = count_tokens(experts, num_experts)
    begins = F.pad(counts.cumsum(0), (1, 0))  # [E + 1], the last one of dropped choices
    place = torch.arange(flat.numel(), device=flat.device) - begins[flat[order]]
    return Permutation(order, counts, place)


def drop_overflow(experts: Tensor, num_experts: int, capacity: int, priority: Tensor | None = None) -> Tensor:
    """Drop the choices beyond an expert's capacity: their id becomes ``num_experts``.

    Args:
        experts: ``[T, k]`` ids.
        num_experts: number of experts ``E``, the id of a dropped choice.
        capacity: most choices of an expert.
        priority: ``[T, k]``, the highest are kept; ``None`` to keep the first ones.
    """
    order, _, place = permute_by_expert(experts, num_experts, priority)
    flat = experts.flatten().clone()
    flat[order] = torch.where(place < capacity, flat[order], num_experts)
    return flat.view_as(experts)
