"""A whole tensor of known shape and dtype whose values are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_megatron.errors import CheckpointError
from lightning_megatron.params import Box


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of the whole model, without its values.

    Attributes:
        shape: shape of the whole tensor, without padding.
        dtype: its dtype.
        materialize: function that reads or computes the values; each call does so anew, and nothing is kept.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    materialize: Callable[[], Tensor]

    @property
    def box(self) -> Box:
        """The box of the whole tensor."""
        return Box.whole(self.shape)

    def to(self, dtype: torch.dtype | None, name: str = "a tensor") -> LazyTensor:
        """This tensor in another dtype, ``None`` for its own; ``name`` is that in the error of :func:`cast`."""
        if dtype is None or dtype == self.dtype:
            return self
        return replace(self, dtype=dtype, materialize=lambda: cast(name, self.materialize(), dtype))

    def on_meta(self) -> Tensor:
        """A tensor on the meta device, to work out shapes and dtypes without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def cast(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another dtype.

    Args:
        name: its name, for the error.
        value: the tensor.
        dtype: the new dtype.

    Raises:
        CheckpointError: if a finite value becomes infinite or NaN.
    """
    made = value.to(dtype)
    if made.dtype != value.dtype and (lost := int((value.isfinite() & ~made.isfinite()).sum())):
        largest, which = torch.finfo(dtype).max, str(dtype).removeprefix("torch.")
        fault = f"{lost} values are beyond {largest:g}, the largest of {which}"
        raise CheckpointError(f"{name}: {fault}: choose bf16 or fp32, or keep the dtype of the file")
    return made
