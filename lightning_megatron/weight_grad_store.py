"""Weight gradients put off until somebody has time for them.

Zero-bubble schedules (https://arxiv.org/abs/2401.10241) split a backward in two: the gradient of the input, for which
the stage before is waiting, and the gradients of the weights, for which nobody is. While a collection is open, linear
layers hand in how to compute their weights' gradients instead of computing them; playing it back runs them through
autograd, so that whatever watches a parameter's gradient sees nothing unusual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Compute = Callable[[], tuple[Tensor | None, ...]]


class _Deposit(torch.autograd.Function):
    """A scalar whose backward computes gradients for some leaves."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, *leaves: Tensor | None) -> Tensor:
        ctx.compute = compute
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.compute()


class Collection:
    """Put-off gradients of one backward."""

    def __init__(self) -> None:
        self._pending: list[tuple[Compute, tuple[Tensor | None, ...]]] = []

    def add(self, compute: Compute, *leaves: Tensor | None) -> None:
        """Put off ``compute``, which returns one gradient a leaf."""
        self._pending.append((compute, leaves))

    def play(self) -> None:
        """Compute them all, in the order they came, and accumulate."""
        pending, self._pending = self._pending, []
        with torch.enable_grad():
            for compute, leaves in pending:
                deposit: Tensor = _Deposit.apply(compute, *leaves)
                if deposit.requires_grad:
                    deposit.backward()


class DeferredGradients:
    """Where the layers of one rank hand in weight gradients, while a collection is open.

    Attributes:
        enabled: whether a schedule of this job defers at all; layers choose their forward by it.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._open: Collection | None = None

    def hand_in(self, compute: Compute, *leaves: Tensor | None) -> None:
        """Put off ``compute``, which returns one gradient a leaf; do it at once if no collection is open."""
        collection = self._open or Collection()
        collection.add(compute, *leaves)
        if self._open is None:
            collection.play()

    @contextmanager
    def collecting(self) -> Iterator[Collection]:
        """Put off the weight gradients of the backward inside."""
        before, self._open = self._open, Collection()
        try:
            yield self._open
        finally:
            self._open = before
