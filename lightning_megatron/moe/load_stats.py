"""Load statistics of a router: tokens of each expert and auxiliary losses, over three windows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class CountSum:
    """Sum of ``[E]`` counts since the last :meth:`take`.

    From the first counts on, the sum is always a tensor and never ``None``, so that compiled graphs stay valid.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._sum: Tensor | None = None

    def add(self, counts: Tensor) -> None:
        """Add the ``[E]`` counts of a micro-batch."""
        self._sum = counts.clone() if self._sum is None else self._sum + counts

    def take(self, device: torch.device) -> Tensor:
        """Return the sum ``[E]``, int64, and start again at 0."""
        if self._sum is None:
            return torch.zeros(self._num_experts, dtype=torch.int64, device=device)
        total, self._sum = self._sum, torch.zeros_like(self._sum)
        return total


class BatchMean:
    """Mean of ``[E]`` counts over the micro-batches of a batch so far."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new batch."""
        self._sum: Tensor | None = None
        self._micro_batches = 0

    def mean_with(self, counts: Tensor) -> Tensor:
        """Mean ``[E]``, fp32, with the counts of the next micro-batch, over all ranks."""
        self._sum = counts if self._sum is None else self._sum + counts
        self._micro_batches += 1
        return self._sum.float() / self._micro_batches


class ExpertLoad:
    """Load of one router on one rank; it is not part of the model's state.

    Attributes:
        step: counts of the forwards that trained the router since its last optimizer step.
        batch: mean counts of the current batch, over all ranks.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.step, self.batch = CountSum(num_experts), BatchMean()
        self._window = CountSum(num_experts)
        self._losses: dict[str, Tensor] = {}
        self._forwards = CountSum(1)  # an int would be a constant of a compiled graph: a new graph for each forward

    def add(self, counts: Tensor, losses: Mapping[str, Tensor], *, trains: bool) -> None:
        """Add a forward in training.

        Args:
            counts: ``[E]`` choices of this rank's tokens.
            losses: this rank's parts of the losses, by name.
            trains: True if the forward trains the router; a frozen one must not follow its load.
        """
        self._window.add(counts)
        if trains:
            self.step.add(counts)
        self._forwards.add(torch.ones(1, dtype=counts.dtype, device=counts.device))
        for name, value in losses.items():
            self._losses[name] = self._losses.get(name, 0.0) + value.detach()

    def take(self, device: torch.device) -> tuple[Tensor, dict[str, Tensor], int]:
        """Return and reset counts ``[E]``, sums of this rank's parts of losses, and the number of micro-batches."""
        losses, self._losses = self._losses, {}
        return self._window.take(device), losses, int(self._forwards.take(device))
