"""A whole tensor of known shape and dtype whose values are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

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

    def to(self, dtype: torch.dtype | None) -> LazyTensor:
        """This tensor in another dtype; ``None`` for its own."""
        if dtype is None or dtype == self.dtype:
            return self
        return replace(self, dtype=dtype, materialize=lambda: self.materialize().to(dtype))

    def on_meta(self) -> Tensor:
        """A tensor on the meta device, to work out shapes and dtypes without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")
