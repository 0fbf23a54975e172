"""Activation recomputation: a forward drops activations, and the backward computes them again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_megatron.comm.collectives import all_gather, local_shard
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.device import initialize_generators, recomputes_in_graphs
from lightning_megatron.mesh import Axis
from lightning_megatron.rng import RNGStreams

T = TypeVar("T")


def run_part(
    plan: RecomputePlan,
    module: str,
    function: Callable[..., T],
    *args: object,
    rng: RNGStreams,
    is_pure: bool = False,
) -> T:
    """Call a part of a layer, recomputed if planned; other arguments as in :func:`recomputed`.

    Args:
        plan: plan of activation recomputation.
        module: name of the part, one of ``config.recompute_plan.MODULES``.
        function: the part.
        *args: inputs of the function.
        rng: random streams that the part may draw from.
        is_pure: True if the part neither draws random numbers nor communicates. ``torch.compile`` then traces it into
            its graph and recomputes it in the backward, on devices whose backend is known to do so.
    """
    if not plan.wraps(module):
        return function(*args)
    if not (is_pure and torch.compiler.is_compiling() and recomputes_in_graphs(rng.device)):
        return recomputed(function, *args, rng=rng)
    if not torch.is_grad_enabled():
        return function(*args)
    out: T = checkpoint(function, *args, use_reentrant=False)
    return out


@torch.compiler.disable  # it supports no random streams but torch's own
def recomputed(function: Callable[..., T], *args: object, rng: RNGStreams, shard_over: Axis | None = None) -> T:
    """Run ``function(*args)`` keeping only its inputs, and run it again in the backward.

    Parameter names do not change, since no module is wrapped (https://arxiv.org/abs/1604.06174 for the method). If no
    gradients are recorded this is a plain call.

    Args:
        function: module or function of tensors; it may return a tuple.
        *args: inputs of the function.
        rng: random streams that ``function`` may draw from.
        shard_over: ranks that hold the same inputs; each keeps its shard of them, and recomputation gathers them.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    initialize_generators(*(value.device for value in args if isinstance(value, Tensor)))
    with nullcontext() if shard_over is None else _saved_in_shards(shard_over):
        out: T = checkpoint(function, *args, use_reentrant=False)
    return out


def _saved_in_shards(axis: Axis) -> AbstractContextManager[None]:
    """Hooks that keep this rank's shard of every input that ``checkpoint`` saves."""

    def pack(x: Tensor) -> tuple[Tensor, torch.Size]:
        flat = x.detach().reshape(-1)
        missing = -flat.numel() % axis.size
        if missing:
            flat = torch.cat((flat, flat.new_zeros(missing)))
        return local_shard(flat, axis).clone(), x.shape

    def unpack(kept: tuple[Tensor, torch.Size]) -> Tensor:
        share, shape = kept
        whole = all_gather(share, axis) if share.numel() else share  # torch 2.6 saves an empty tensor of its own
        return whole[: shape.numel()].view(shape)

    return saved_tensors_hooks(pack, unpack)
