"""Main values of a bucket: the tensors that the user's optimizer updates, split where gradients are missing.

A torch optimizer skips a parameter without a gradient (``None``): no decay, no momentum, no step counted. One long
tensor has one gradient. So where only some parameters of a bucket have a gradient, the tensor is split between them,
and the optimizer itself skips the right ones. Splits are views: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.comm.collectives import all_gather
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.slot import OwnedParam, Slot

States = MutableMapping[Any, dict[str, Any]]
"""The optimizer's state by main parameter."""


@dataclass(frozen=True)
class MainParam:
    """A tensor that a torch optimizer updates: a range of a bucket's main values, or one parameter's in its shape.

    Attributes:
        param: the tensor in the optimizer's group during a step, to which the optimizer's state belongs.
        start: first element in this rank's share of the bucket.
        slots: the parameters of the range, whole or in part; so far all had gradients in the same steps.
        owned: the parameter whose shape ``param`` has; ``None`` for a flat range.
    """

    param: nn.Parameter
    start: int
    slots: tuple[Slot, ...]
    owned: OwnedParam | None = None

    @property
    def span(self) -> slice:
        """Its range in this rank's share of the bucket."""
        return slice(self.start, self.start + self.param.numel())


class MainValues:
    """This rank's share of a bucket, in the dtype in which it is updated.

    Attributes:
        bucket: the bucket.
        flat: ``[n]``, the values; the bucket's own parameters where dtypes agree.
        is_view: True if the values are the parameters themselves.
        converts_grads: True if the values have another dtype than the bucket's gradients.
        parts: the tensors that the optimizer sees, views of ``flat``.

    Args:
        dtype: dtype of the values; ``None`` for the parameters' own.
        whole: True to show the optimizer each parameter in its shape (the model's own ones where dtypes agree).
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype | None, *, whole: bool = False) -> None:
        self.bucket = bucket
        self.flat = bucket.own_params.to(dtype or bucket.own_params.dtype)
        self.is_view = self.flat.dtype == bucket.own_params.dtype
        self.converts_grads = self.flat.dtype != bucket.own_grads.dtype
        if whole:
            assert not bucket.sharded, "a share of a bucket may hold a part of a parameter"
            self.parts = [self._whole_param(slot) for slot in bucket.slots]
        else:
            slots = tuple(slot for slot in bucket.slots if self.local_range(slot))
            self.parts = [MainParam(nn.Parameter(self.flat), 0, slots)]
        self._before_split: list[tuple[MainParam, dict[str, Any]]] = []

    def _whole_param(self, slot: Slot) -> MainParam:
        owned, here = slot.owned, self.local_range(slot)
        shaped = self.flat[here.start : here.stop].view(slot.data.shape)
        return MainParam(owned.param if self.is_view else nn.Parameter(shaped), here.start, (slot,), owned)

    def local_range(self, slot: Slot) -> range:
        """Range of a parameter in this rank's share; empty if the share has none of it."""
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

    def assign_grads(self, states: States) -> None:
        """Give every part its gradient in the bucket, or ``None``; split parts where only some parameters have one.

        A part of another dtype than the bucket's gradients gets its own in :meth:`convert_grads`.
        """
        if [part for part in self.parts if len({slot.has_grad for slot in part.slots}) > 1]:
            self._split(states, lambda slot: slot.has_grad)
        for part in self.parts:
            if not (part.slots and part.slots[0].has_grad):
                part.param.grad = None
            elif part.owned is not None and part.param is part.owned.param:
                part.slots[0].attach()
            else:
                part.param.grad = None if self.converts_grads else self._grad_of(part)

    def grads(self) -> Iterator[tuple[MainParam, Tensor]]:
        """Parts that have gradients, and those gradients: views of the bucket's, in the shapes of the parts."""
        for part in self.parts:
            if part.slots and part.slots[0].has_grad:
                yield part, self._grad_of(part)

    def _grad_of(self, part: MainParam) -> Tensor:
        return self.bucket.own_grads[part.span].view(part.param.shape)

    def convert_grads(self) -> None:
        """Give the optimizer gradients of its parameters' dtype, for a step."""
        if self.converts_grads:
            for part, grad in self.grads():
                part.param.grad = grad.to(part.param.dtype)

    def drop_converted(self) -> None:
        """Free what :meth:`convert_grads` has made."""
        if self.converts_grads:
            for part in self.parts:
                part.param.grad = None

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """Name and gradient of every parameter that has one, parameter by parameter."""
        for part, grad in self.grads():
            for slot in part.slots:
                here = self.local_range(slot)
                yield slot.owned.name, grad.view(-1)[here.start - part.start : here.stop - part.start]

    @torch.no_grad()
    def to_params(self) -> None:
        """Copy main values into the model's parameters."""
        if not self.is_view:
            self.bucket.own_params.copy_(self.flat)

    @torch.no_grad()
    def from_params(self) -> None:
        """Copy the model's parameters into main values."""
        if not self.is_view:
            self.flat.copy_(self.bucket.own_params)

    # Splits

    def _split(self, states: States, key: Callable[[Slot], object]) -> None:
        self.parts = [new for part in self.parts for new in self._split_part(states, part, key)]

    def _split_part(self, states: States, part: MainParam, key: Callable[[Slot], object]) -> list[MainParam]:
        runs = [tuple(run) for _, run in groupby(part.slots, key)]
        if len(runs) < 2:
            return [part]
        starts = [part.start, *(self.local_range(run[0]).start for run in runs[1:]), part.span.stop]
        state = states.pop(part.param, {})
        made = []
        for start, end, run in zip(starts, starts[1:], runs, strict=False):
            new = MainParam(nn.Parameter(self.flat[start:end]), start, run)
            here = slice(start - part.start, end - part.start)
            if state:
                states[new.param] = {
                    name: value[here] if is_per_element(value, part.param) else copy_of(value)
                    for name, value in state.items()
                }
            made.append(new)
        return made

    def split_part(self, states: States, part: MainParam) -> list[MainParam]:
        """Split one of the parts between its parameters, and return the new ones."""
        made = self._split_part(states, part, id)
        self.parts = [new for old in self.parts for new in (made if old is part else [old])]
        return made

    def split_all(self, states: States) -> None:
        """Split between all parameters, so that each can be loaded with a step count of its own."""
        self._before_split = [(part, dict(states.get(part.param, {}))) for part in self.parts]
        self._split(states, id)

    def undo_split_all(self, states: States) -> None:
        """Undo :meth:`split_all` where all pieces have the same shared state (the step count), or none has state."""
        whole, self._before_split = self._before_split, []
        if not whole:
            return
        parts = []
        for part, state in whole:
            split = [new for new in self.parts if set(new.slots) <= set(part.slots) and new.slots]
            after = [states.get(new.param, {}) for new in split]
            shared = [_shared(kept, new.param) for kept, new in zip(after, split, strict=True)]
            if len(split) < 2:
                parts.append(part)
            elif len(set(map(bool, after))) == 1 and all(have_equal_values(one, shared[0]) for one in shared):
                for new in split:
                    states.pop(new.param, None)
                if state and after[0]:
                    states[part.param] = {**state, **shared[0]}  # the rest was loaded through views
                parts.append(part)
            else:
                parts += split
        self.parts = parts


def is_per_element(value: object, main: Tensor) -> bool:
    """True if a state value has one element per element of the main parameter."""
    return isinstance(value, Tensor) and value.shape == main.shape


def copy_of(value: Any) -> Any:
    """A copy of a tensor; any other value itself."""
    return value.clone() if isinstance(value, Tensor) else value


def _shared(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not is_per_element(value, param)}


def have_equal_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two states have the same names and equal values."""
    return one.keys() == other.keys() and all(bool(torch.as_tensor(one[k] == other[k]).all()) for k in one)
