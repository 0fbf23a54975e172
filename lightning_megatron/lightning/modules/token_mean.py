"""Mean of losses over all tokens of an evaluation, however they were cut into batches and replicas."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric

LossReduction = Literal["sample", "token"]


class TokenMean(Metric):
    """Sum of losses over all batches and replicas, divided by their number of tokens; NaN if there is none."""

    full_state_update = False
    higher_is_better = False
    loss_sum: Tensor
    num_tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss_sum", torch.zeros(()), "sum")
        self.add_state("num_tokens", torch.zeros(()), "sum")

    def update(self, mean: Tensor, num_tokens: Tensor) -> None:
        """Add a batch.

        Args:
            mean: mean loss over its tokens; 0 if it has none.
            num_tokens: number of its tokens that count, by their weights.
        """
        self.loss_sum += mean.detach().float() * num_tokens
        self.num_tokens += num_tokens

    def compute(self) -> Tensor:
        """Mean over all tokens."""
        return self.loss_sum / self.num_tokens
