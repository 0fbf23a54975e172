"""Main values of a bucket: what the user's optimizer updates, cut where gradients are missing.

To a torch optimizer a parameter without a gradient (``None``) is one to leave alone: no decay, no momentum, no step
counted. One long tensor has one gradient. So where some parameters of a bucket have a gradient and others have none, it
is cut between them, and the optimizer itself leaves the right ones alone. Cuts are views: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.comm.collectives import all_gather
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.buffer import OwnedParam, Slot


@dataclass(frozen=True)
class MainParam:
    """A tensor that a torch optimizer updates: a stretch of a bucket's main values, or one parameter's in its shape.

    Attributes:
        param: what stands in the optimizer's group while it steps, and has its state.
        start: first element, in this rank's share of the bucket.
        slots: the parameters that lie here, whole or in part; they have always had gradients in the same steps.
        owned: the one parameter whose shape it has; ``None`` for a flat stretch.
    """

    param: nn.Parameter
    start: int
    slots: tuple[Slot, ...]
    owned: OwnedParam | None = None

    @property
    def here(self) -> slice:
        """Where it lies in this rank's share of the bucket."""
        return slice(self.start, self.start + self.param.numel())


class MainValues:
    """This rank's share of a bucket, in the dtype in which it is updated.

    Attributes:
        bucket: whose share.
        flat: ``[n]``, the values; the bucket's own parameters where dtypes agree.
        parts: the same as the optimizer sees it.

    Args:
        bucket: whose share.
        dtype: of the values; ``None`` for the parameters' own.
        whole: show the optimizer each parameter in its shape: the model's own ones where dtypes agree.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype | None, *, whole: bool = False) -> None:
        self.bucket = bucket
        self.flat = bucket.own_params.to(dtype or bucket.own_params.dtype)
        if whole:
            assert not bucket.sharded, "a share of a bucket may hold a part of a parameter"
            self.parts = [self._whole_param(slot) for slot in bucket.slots]
        else:
            slots = tuple(slot for slot in bucket.slots if self.stretch(slot))
            self.parts = [MainParam(nn.Parameter(self.flat), 0, slots)]
        self._united: list[tuple[MainParam, dict[str, Any]]] = []

    def _whole_param(self, slot: Slot) -> MainParam:
        owned, here = slot.owned, self.stretch(slot)
        shaped = self.flat[here.start : here.stop].view(slot.data.shape)
        return MainParam(owned.param if self.is_view else nn.Parameter(shaped), here.start, (slot,), owned)

    @property
    def is_view(self) -> bool:
        """True if the values are the parameters themselves."""
        return self.flat.dtype == self.bucket.own_params.dtype

    def stretch(self, slot: Slot) -> range:
        """Where a parameter lies in this rank's share; empty if it does not."""
        own = self.bucket.own_start
        begin = max(slot.start, own)
        return range(begin - own, max(begin, min(slot.end, self.bucket.own_end)) - own)

    def values(self) -> Iterator[tuple[Slot, Tensor]]:
        """Main values of whole parameters, in their shapes; all ranks of the bucket's axis call this."""
        whole = all_gather(self.flat, self.bucket.axis) if self.bucket.sharded else self.flat
        for slot in self.bucket.slots:
            start = slot.start - self.bucket.start
            yield slot, whole[start : start + slot.grad.numel()].view(slot.data.shape)

    # Gradients

    def take_grads(self, optimizer: Optimizer, has_grad: Callable[[Slot], bool]) -> None:
        """Give every part the gradient that lies in the bucket, or ``None``; cut parts where both are due."""
        self._cut(optimizer, has_grad)
        for part in self.parts:
            if not (part.slots and has_grad(part.slots[0])):
                part.param.grad = None
            elif part.owned is not None and part.param is part.owned.param:
                part.slots[0].attach()
            else:  # the buffer itself where dtypes agree
                part.param.grad = self.bucket.own_grads[part.here].view(part.param.shape).to(part.param.dtype)

    def grad_pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Gradients, parameter by parameter with their names, of those that have one."""
        for part in self.parts:
            grad = part.param.grad
            if grad is None:
                continue
            for slot in part.slots:
                here = self.stretch(slot)
                yield slot.owned.name, grad.view(-1)[here.start - part.start : here.stop - part.start]

    @torch.no_grad()
    def to_params(self) -> None:
        """Main values into the model's parameters."""
        if not self.is_view:
            self.bucket.own_params.copy_(self.flat)

    @torch.no_grad()
    def from_params(self) -> None:
        """Main values from the model's parameters."""
        if not self.is_view:
            self.flat.copy_(self.bucket.own_params)

    # Cuts

    def _cut(self, optimizer: Optimizer, key: Callable[[Slot], object]) -> None:
        if all(len({key(slot) for slot in part.slots}) < 2 for part in self.parts):
            return
        self.parts = [new for part in self.parts for new in self._pieces(optimizer, part, key)]

    def _pieces(self, optimizer: Optimizer, part: MainParam, key: Callable[[Slot], object]) -> list[MainParam]:
        runs = [tuple(run) for _, run in groupby(part.slots, key)]
        if len(runs) < 2:
            return [part]
        starts = [part.start, *(self.stretch(run[0]).start for run in runs[1:]), part.here.stop]
        state = optimizer.state.pop(part.param, {})
        made = []
        for start, end, run in zip(starts, starts[1:], runs, strict=False):
            new = MainParam(nn.Parameter(self.flat[start:end]), start, run)
            here = slice(start - part.start, end - part.start)
            if state:
                optimizer.state[new.param] = {
                    name: value[here] if is_per_element(value, part.param) else _copy(value)
                    for name, value in state.items()
                }
            made.append(new)
        return made

    def spread(self, optimizer: Optimizer) -> None:
        """Cut between all parameters, so that each can be loaded with a step count of its own."""
        self._united = [(part, dict(optimizer.state.get(part.param, {}))) for part in self.parts]
        self._cut(optimizer, id)

    def unite(self, optimizer: Optimizer) -> None:
        """Undo :meth:`spread` where all that elements share (the step count) turned out equal."""
        whole, self._united = self._united, []
        if not whole:
            return
        parts = []
        for part, state in whole:
            pieces = [piece for piece in self.parts if set(piece.slots) <= set(part.slots) and piece.slots]
            shared = [_shared(optimizer.state.get(piece.param, {}), piece.param) for piece in pieces]
            if len(pieces) < 2:
                parts.append(part)
            elif all(_equal(one, shared[0]) for one in shared):
                for piece in pieces:
                    optimizer.state.pop(piece.param, None)
                if state:
                    optimizer.state[part.param] = {**state, **shared[0]}  # the rest was loaded through views
                parts.append(part)
            else:
                parts += pieces
        self.parts = parts


def is_per_element(value: object, main: Tensor) -> bool:
    """True if a state value has one element per element of the main parameter."""
    return isinstance(value, Tensor) and value.shape == main.shape


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _shared(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not is_per_element(value, param)}


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool(torch.as_tensor(one[k] == other[k]).all()) for k in one)
