"""Initialization that does not depend on the layout.

A layer draws one number from torch's default generator, equal on all ranks, which alone determines its whole weight:
each slab of rows of the *global* weight has its own generator, and a rank keeps its slice of each slab. So one seed
gives the same whole weights in every layout, and no rank ever holds a whole large weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from lightning_megatron.params import ParamSpec, ShardRanks

_SLAB_ELEMENTS = 1 << 22
_SEEDS = 1 << 62
_ARE_ZERO: ContextVar[bool] = ContextVar("weights_are_zero", default=False)


@torch.no_grad()
def normal_(param: Tensor, spec: ParamSpec, ranks: ShardRanks, std: float) -> None:
    """Fill a local parameter with its slice of a global normal draw; padding becomes zero.

    Draws one number from torch's default CPU generator even on the meta device, where nothing is filled, so that the
    weights of later layers do not depend on the device.
    """
    _fill(param, spec, ranks, lambda values, generator: values.normal_(std=std, generator=generator))


@torch.no_grad()
def uniform_(param: Tensor, spec: ParamSpec, ranks: ShardRanks, bound: float) -> None:
    """Fill a local parameter as :func:`normal_` does, with numbers between ``-bound`` and ``bound``."""
    _fill(param, spec, ranks, lambda values, generator: values.uniform_(-bound, bound, generator=generator))


def _fill(param: Tensor, spec: ParamSpec, ranks: ShardRanks, draw: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    base = draw_seed()
    if param.is_meta:
        return
    box = spec.local_box(tuple(param.shape), ranks)
    param.zero_()
    if box.is_empty or _ARE_ZERO.get():
        return
    rows, *rest = spec.global_shape
    numel_of_row = torch.Size(rest).numel()
    slab = max(1, _SLAB_ELEMENTS // numel_of_row)
    first, count = box.offsets[0], box.sizes[0]
    for start in range(first // slab * slab, first + count, slab):
        stop = min(start + slab, rows)
        generator = torch.Generator().manual_seed((base + start // slab) % _SEEDS)
        values = draw(torch.empty(stop - start, *rest, dtype=torch.float32, device="cpu"), generator)
        low, high = max(start, first), min(stop, first + count)
        values = values[low - start : high - start]
        for dim, (offset, size) in enumerate(zip(box.offsets[1:], box.sizes[1:], strict=True), start=1):
            values = values.narrow(dim, offset, size)
        target = param[low - first : high - first]
        for dim, size in enumerate(box.sizes[1:], start=1):
            target = target.narrow(dim, 0, size)
        target.copy_(values)


@contextmanager
def weights_follow() -> Iterator[None]:
    """Within the context layers get zero weights, which takes no time: for weights that are loaded afterwards.

    Later draws from the default generator do not change.
    """
    token = _ARE_ZERO.set(True)
    try:
        yield
    finally:
        _ARE_ZERO.reset(token)


@contextmanager
def seeded(base: int, number: int) -> Iterator[None]:
    """Seed the initialization of one part of a model, so that ranks with only some parts draw the same weights."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reseed accelerators, and differently on ranks with other parts.
        torch.default_generator.manual_seed((base + 7919 * number) % _SEEDS)
        yield


def draw_seed() -> int:
    """Draw from the default generator the base seed of numbered parts (:func:`seeded`)."""
    return int(torch.randint(_SEEDS, (), device="cpu").item())
