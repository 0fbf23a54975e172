"""Main parameters: the tensors that a torch optimizer updates, and the stretch of a bucket that each is of."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_megatron.optim.bucket import Bucket
from lightning_megatron.optim.buffer import Slot


class MainParam:
    """The values of a whole share of a bucket, laid flat, or of one parameter in its own shape.

    Attributes:
        bucket: what it is of.
        owned: the one parameter; ``None`` for a share of a bucket.
        param: what stands in the optimizer's groups: a view of the bucket where dtypes agree.
        start: its first element in the buffer.
        end: one past its last.

    Args:
        bucket: the parameters.
        dtype: of the values; ``None`` for that of the parameters.
        slot: the one parameter; ``None`` for all of this rank's share.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype | None, slot: Slot | None = None) -> None:
        self.bucket = bucket
        self.owned = None if slot is None else slot.owned
        self.start, self.end = (bucket.own_start, bucket.own_end) if slot is None else (slot.start, slot.end)
        shape = bucket.own_params.shape if slot is None else slot.data.shape
        here = slice(self.start - bucket.own_start, self.end - bucket.own_start)
        self._values = bucket.own_params[here].view(shape)
        self._grads = bucket.own_grads[here].view(shape)
        self.param = nn.Parameter(self._values.to(dtype or self._values.dtype))

    def grad_pieces(self) -> Iterator[tuple[str, Tensor]]:
        """The gradient, parameter by parameter with their names; nothing if there is none."""
        if self.param.grad is None:
            return
        flat = self.param.grad.view(-1)
        for slot in self.bucket.slots:
            start, end = max(slot.start, self.start), min(slot.end, self.end)
            if start < end:
                yield slot.owned.name, flat[start - self.start : end - self.start]

    @property
    def is_view(self) -> bool:
        """Whether the optimizer updates the model's parameters themselves."""
        return self.param.dtype == self._values.dtype

    def take_grad(self) -> None:
        """Make what is accumulated the gradient: the buffer itself where dtypes agree."""
        self.param.grad = self._grads.to(self.param.dtype)

    @torch.no_grad()
    def to_params(self) -> None:
        """Main values into the model's parameters."""
        if not self.is_view:
            self._values.copy_(self.param)

    @torch.no_grad()
    def from_params(self) -> None:
        """Main values from the model's parameters."""
        if not self.is_view:
            self.param.copy_(self._values)


def main_params_of(bucket: Bucket, dtype: torch.dtype | None, *, flat: bool) -> list[MainParam]:
    """The main parameters of a bucket: one for this rank's share, or, unsharded, one for each parameter."""
    if flat:
        return [MainParam(bucket, dtype)]
    assert not bucket.sharded, "a share of a bucket may hold a part of a parameter"
    return [MainParam(bucket, dtype, slot) for slot in bucket.slots]
