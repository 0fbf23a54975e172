"""What a router has seen: tokens of each expert and auxiliary losses, for whoever wants to look."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor


class ExpertLoad:
    """Counts of one router on one rank. Nothing here is part of a model's state: all of it is since some event.

    Args:
        num_experts: experts ``E``.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._shown: Tensor | None = None  # since somebody looked
        self._step: Tensor | None = None  # since the last optimizer step
        self._losses: dict[str, Tensor] = {}
        self._forwards = 0
        self._batch: Tensor | None = None  # global counts of the micro-batches of this batch
        self._micro_batches = 0
        self._means: deque[Tensor] = deque()  # what each of them was told

    def add(self, counts: Tensor) -> None:
        """A micro-batch with ``[E]`` tokens for each expert."""
        self._shown = counts if self._shown is None else self._shown + counts
        self._step = counts if self._step is None else self._step + counts
        self._forwards += 1

    def add_losses(self, losses: Mapping[str, Tensor]) -> None:
        """This rank's parts of the losses of a micro-batch, by name."""
        for name, value in losses.items():
            self._losses[name] = self._losses.get(name, 0.0) + value.detach()

    def mean_of_batch(self, counts: Tensor) -> Tensor:
        """Mean counts ``[E]`` a micro-batch, over those of this batch so far.

        Args:
            counts: of the micro-batch that is next, over all ranks.
        """
        self._batch = counts if self._batch is None else self._batch + counts
        self._micro_batches += 1
        self._means.append(self._batch.float() / self._micro_batches)
        return self._means[-1]

    def recalled_mean(self) -> Tensor:
        """What :meth:`mean_of_batch` said when a micro-batch that is now recomputed came first.

        Micro-batches are recomputed in the order in which they came, by every schedule.
        """
        return self._means.popleft()

    def end_batch(self) -> None:
        """The next micro-batch begins another batch."""
        self._batch, self._micro_batches = None, 0
        self._means.clear()

    def take_step(self, device: torch.device) -> Tensor:
        """Counts ``[E]`` since this was last asked."""
        counts, self._step = self._step, None
        return self._none(device) if counts is None else counts

    def _none(self, device: torch.device) -> Tensor:
        return torch.zeros(self.num_experts, dtype=torch.int64, device=device)

    def take(self, device: torch.device) -> tuple[Tensor, dict[str, Tensor], int]:
        """Counts ``[E]``, sums of this rank's parts of losses, and micro-batches, since this was last asked."""
        seen = self._none(device) if self._shown is None else self._shown, self._losses, self._forwards
        self._shown, self._losses, self._forwards = None, {}, 0
        return seen
