"""How many tokens an expert takes, and which."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.moe.aux_loss import count_tokens


def expert_capacity(tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Tokens of one rank that an expert takes: ``ceil(T k / E x factor)``, Megatron-LM's rule."""
    return ceil(tokens * topk / num_experts * factor)


class Places(NamedTuple):
    """Where each choice of a token stands in the queue of its expert.

    Attributes:
        order: ``[T k]`` choices by expert, inside an expert in the order of the queue; those sent nowhere at the end.
        counts: ``[E]`` length of each queue, int64.
        place: ``[T k]`` position of each choice *of* ``order`` in the queue of its expert.
    """

    order: Tensor
    counts: Tensor
    place: Tensor


def queue_up(experts: Tensor, num_experts: int, priority: Tensor | None = None) -> Places:
    """Put choices in line at their experts.

    Args:
        experts: ``[T, k]`` ids; ``num_experts`` stands for nowhere.
        num_experts: experts ``E``.
        priority: ``[T, k]``, highest first in line; ``None`` for the order of tokens.
    """
    flat = experts.flatten()
    if priority is None:
        order = flat.argsort(stable=True)
    else:
        first = priority.flatten().argsort(descending=True, stable=True)
        order = first[flat[first].argsort(stable=True)]
    counts = count_tokens(experts, num_experts)
    begins = F.pad(counts.cumsum(0), (1, 0))  # the last one of those sent nowhere
    place = torch.arange(flat.numel(), device=flat.device) - begins[flat[order]]
    return Places(order, counts, place)


def drop_overflow(experts: Tensor, num_experts: int, capacity: int, priority: Tensor | None = None) -> Tensor:
    """Send choices nowhere (id ``num_experts``) that an expert of limited capacity does not take.

    Args:
        experts: ``[T, k]`` ids.
        num_experts: experts ``E``, the id of nowhere.
        capacity: choices that an expert takes.
        priority: ``[T, k]``, whose highest stay; ``None`` for the first.
    """
    order, _, place = queue_up(experts, num_experts, priority)
    flat = experts.flatten().clone()
    flat[order] = torch.where(place < capacity, flat[order], num_experts)
    return flat.view_as(experts)
