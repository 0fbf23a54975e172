"""A whole tensor of known shape and dtype whose values are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lightning_megatron.checkpoint.tensors.fragment import part_of
from lightning_megatron.errors import CheckpointError
from lightning_megatron.params import Box

_SHOWN = 8


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of the whole model, without its values.

    Attributes:
        shape: shape of the whole tensor, without padding.
        dtype: its dtype.
        materialize: function that reads or computes the values; nothing is cached, so each call does so again.
        read: function that reads a box of the values alone; ``None`` if there is no cheaper way than all of them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    materialize: Callable[[], Tensor]
    read: Callable[[Box], Tensor] | None = None

    def part(self, box: Box) -> Tensor:
        """The values of a box."""
        if box.is_empty:
            return torch.empty(box.sizes, dtype=self.dtype)
        return part_of(self.materialize(), box) if self.read is None else self.read(box)

    def on_meta(self) -> Tensor:
        """A tensor on the meta device, to work out shapes and dtypes without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def in_dtype(tensors: Mapping[str, LazyTensor], dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """Convert tensors to another dtype by :func:`cast`, or not at all (``None``); integers keep theirs."""
    kinds = {name: dtype if dtype and x.dtype.is_floating_point else x.dtype for name, x in tensors.items()}

    def read(name: str) -> Tensor:
        others = (other for other in tensors if other != name and kinds[other] == kinds[name])
        more = ((other, tensors[other].materialize()) for other in others)
        return cast(name, tensors[name].materialize(), kinds[name], more)

    return {
        name: replace(x, dtype=kinds[name], materialize=partial(read, name), read=None) for name, x in tensors.items()
    }


def cast(name: str, value: Tensor, dtype: torch.dtype, others: Iterable[tuple[str, Tensor]]) -> Tensor:
    """A tensor in another dtype.

    ``others`` are cast to it too; they are read only for the error text.

    Raises:
        CheckpointError: naming the tensors of which a finite value becomes infinite or NaN.
    """
    made = value.to(dtype)
    if not (lost := _lost(value, made)):
        return made
    counts = {name: lost} | {other: _lost(x, x.to(dtype)) for other, x in others}
    found = [f"{name} ({count})" for name, count in counts.items() if count]
    shown = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more tensors" if len(found) > _SHOWN else "")
    limit = f"{str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:g}"
    raise CheckpointError(f"{limit}, and values are beyond it in {shown}: write them in fp32 (dtype, --dtype)")


def _lost(value: Tensor, made: Tensor) -> int:
    return 0 if made.dtype == value.dtype else int((value.isfinite() & ~made.isfinite()).sum())
