"""Weight gradients that layers defer, or accumulate themselves.

Zero-bubble schedules (https://arxiv.org/abs/2401.10241) split a backward in two: the gradient of the input, which the
previous stage waits for, and the gradients of the weights, which nothing waits for. While the store defers, linear
layers put functions that compute their weights' gradients into it. A flush runs these functions through autograd, so
that the hooks of a parameter see an ordinary gradient.

Autograd makes a new tensor of each gradient, and adds it to that of earlier micro-batches: three more passes over
memory of the parameters' size. Where nothing needs that tensor, a layer adds its product to the accumulated gradient
itself, and returns ``None`` to autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

Compute = Callable[[], tuple[Tensor | None, ...]]

BLOCK = 1 << 18
"""Elements of a gradient that are added at a time, where a processor has caches."""


class GradPlace(NamedTuple):
    """Buffer of a parameter's accumulated gradient.

    Attributes:
        grad: the gradient, in the parameter's shape.
        is_new: True if the buffer holds no gradient yet and must be overwritten.
        block: elements that are added at a time.
    """

    grad: Tensor
    is_new: bool
    block: int = BLOCK


FindPlace = Callable[[Tensor], GradPlace | None]


class _Deposit(torch.autograd.Function):
    """A scalar whose backward computes gradients of some leaves."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, *leaves: Tensor | None) -> Tensor:
        ctx.compute = compute
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.compute()


class PendingWeightGrads:
    """Deferred weight gradients of one backward."""

    def __init__(self) -> None:
        self._pending: list[tuple[Compute, tuple[Tensor | None, ...]]] = []

    def put(self, compute: Compute, *leaves: Tensor | None) -> None:
        """Defer ``compute``, which returns one gradient per leaf."""
        self._pending.append((compute, leaves))

    def flush(self) -> None:
        """Compute and accumulate all gradients, in the order in which they were put."""
        pending, self._pending = self._pending, []
        with torch.enable_grad():
            for compute, leaves in pending:
                deposit: Tensor = _Deposit.apply(compute, *leaves)
                if deposit.requires_grad:
                    deposit.backward()


class WeightGradStore:
    """Weight gradients that the layers of one rank defer.

    Attributes:
        enabled: True if this job's schedule splits backwards; layers choose their forward by it.
        block: elements of a gradient that are added at a time; by default as many as stay in a processor's caches.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.block = BLOCK
        self._open: PendingWeightGrads | None = None
        self._find_place: FindPlace | None = None
        self._is_accumulating = False

    def __getstate__(self) -> dict[str, Any]:
        """State without the gradient buffers, which belong to the parameters of the original."""
        return {**self.__dict__, "_find_place": None, "_is_accumulating": False}

    @property
    def has_places(self) -> bool:
        """True if there are gradient buffers that layers may add to."""
        return self._find_place is not None

    @property
    def takes_gradients(self) -> bool:
        """True if a forward may choose a backward that adds to the gradient buffers; False under ``torch.compile``."""
        return not torch.compiler.is_compiling() and self.has_places and torch.is_grad_enabled()

    def set_places(self, find_place: FindPlace | None) -> None:
        """Set the function that finds the buffer of a parameter's gradient.

        Args:
            find_place: function of the parameter, called when its gradient is about to be computed. It returns ``None``
                for a parameter whose gradient autograd has to see.
        """
        self._find_place = find_place

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context of a backward that accumulates all gradients in ``param.grad``, unlike ``torch.autograd.grad``."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def place_of(self, param: Tensor | None) -> GradPlace | None:
        """Buffer to which the caller adds the gradient itself; ``None`` if it must return it to autograd."""
        if param is None or self._find_place is None or not self._is_accumulating or torch.is_grad_enabled():
            return None
        place = self._find_place(param)
        return None if place is None else place._replace(block=self.block)

    def put(self, compute: Compute, *leaves: Tensor | None) -> None:
        """Defer ``compute``, which returns one gradient per leaf; outside of :meth:`deferring`, run it at once."""
        pending = self._open or PendingWeightGrads()
        pending.put(compute, *leaves)
        if self._open is None:
            pending.flush()

    @contextmanager
    def deferring(self) -> Iterator[PendingWeightGrads]:
        """Defer the weight gradients of the backward inside; the caller flushes the result."""
        before, self._open = self._open, PendingWeightGrads()
        try:
            yield self._open
        finally:
            self._open = before
