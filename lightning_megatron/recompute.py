"""Activation recomputation that draws the same random numbers twice.

Plain ``torch.utils.checkpoint`` rewinds only torch's default generator; dropout inside tensor-parallel regions draws
from a second stream, and without rewinding that too the gradients are silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.utils.checkpoint import checkpoint

from lightning_megatron.rng import RNGStreams

T = TypeVar("T")


def recomputed(function: Callable[..., T], *args: object, rng: RNGStreams) -> T:
    """Run ``function(*args)`` keeping only its inputs, and run it again when its gradients are wanted.

    Nothing is wrapped: parameter names stay as they are (https://arxiv.org/abs/1604.06174 for the method).

    Args:
        function: a module or function of tensors.
        *args: its inputs.
        rng: the streams that ``function`` may draw from.
    """
    out: T = checkpoint(function, *args, use_reentrant=False, context_fn=rng.replay_contexts)
    return out
