"""A tensor of the whole model that need not exist yet: streams hold one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_megatron.params import Box


@dataclass(frozen=True)
class WholeTensor:
    """What is known of a tensor before it is made.

    Attributes:
        shape: shape of the whole tensor, without padding.
        dtype: its dtype.
        make: reads or computes it; called each time somebody needs the values, and nothing is kept.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def box(self) -> Box:
        """All of it."""
        return Box.whole(self.shape)

    def to(self, dtype: torch.dtype | None) -> WholeTensor:
        """The same in another dtype; ``None`` for its own."""
        if dtype is None or dtype == self.dtype:
            return self
        return replace(self, dtype=dtype, make=lambda: self.make().to(dtype))

    def on_meta(self) -> Tensor:
        """A tensor without memory, to work out shapes and dtypes with."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")
