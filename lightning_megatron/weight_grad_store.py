"""Store of deferred weight gradients.

Zero-bubble schedules (https://arxiv.org/abs/2401.10241) split a backward in two: the gradient of the input, which the
previous stage waits for, and the gradients of the weights, which nothing waits for. While the store defers, linear
layers put functions that compute their weights' gradients into it. A flush runs these functions through autograd, so
that the hooks of a parameter see an ordinary gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Compute = Callable[[], tuple[Tensor | None, ...]]


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
    """

    def __init__(self) -> None:
        self.enabled = False
        self._open: PendingWeightGrads | None = None

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
