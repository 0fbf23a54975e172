"""Losses that are sums over tokens, and their mean over all tokens of a step.

Micro-batches, replicas and accumulated batches hold different numbers of tokens, so that a mean of their means is not
the mean. How many tokens a step has is known only after its last forward. So the sums are differentiated, and the
gradient that they leave is scaled once, before clipping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.mesh import Axis
from lightning_megatron.stage import BackwardScale

NUM_TOKENS = "num_tokens"


def num_tokens_in(output: Any) -> Any:
    """The number of tokens that a step's output says its loss is the sum of; ``None`` for a loss that is a mean."""
    return output.get(NUM_TOKENS) if isinstance(output, Mapping) else None


def check_all_alike(one: Any, other: Any) -> None:
    """Losses of one optimizer step are all sums, or all means.

    Args:
        one: number of tokens of a micro-batch or batch, or ``None``.
        other: of another.

    Raises:
        MisconfigurationException: if they are not.
    """
    if (one is None) != (other is None):
        raise MisconfigurationException(
            f"training_step returned '{NUM_TOKENS}' for some of the batches or micro-batches of one optimizer step, and"
            " for others not: a sum over tokens and a mean cannot be added; return it always (0 where nothing counts)"
        )


def check_stages_can_count(module: object, num_stages: int) -> None:
    """Stages before the last weigh their experts' losses before anybody knows how many tokens there are.

    Args:
        module: whose ``training_step`` returned a number of tokens.
        num_stages: of the pipeline.

    Raises:
        MisconfigurationException: for a model with experts in more than one stage.
    """
    num_experts: int = getattr(getattr(module, "model_shape", None), "num_experts", 0)
    if num_stages > 1 and num_experts:
        raise MisconfigurationException(
            f"'{NUM_TOKENS}' does not go with experts in a pipeline: the losses that balance them would be divided by"
            " the number of tokens; return a mean, or use pp=1"
        )


def scale_with_tokens(scale: BackwardScale, tokens: Any) -> None:
    """Let what is minimized besides a loss that is a sum over tokens weigh as it does beside a mean.

    Args:
        scale: of the loss.
        tokens: how many the loss is the sum of; ``None`` for a mean.
    """
    if tokens is not None:
        scale.value = scale.value * torch.as_tensor(tokens).detach().float()


class TokenWindow:
    """The tokens of one window of accumulation, over all its batches and replicas.

    Args:
        axis: the ranks that read different samples. Ranks of a pipeline, and those that share a sequence, all know the
            number of tokens of their replica, and count once.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self.restart()

    def restart(self) -> None:
        """The next batch begins a window."""
        self._is_empty = True
        self._total: Tensor | None = None

    def mean_of(self, output: Any) -> Any:
        """Count a batch.

        Args:
            output: of a ``training_step`` on one replica's whole batch.

        Returns:
            The same, with the mean loss of the batch over all replicas, and their number of tokens, in place of this
            replica's sums. The gradient of that loss is still the sum's. An output without a number of tokens is
            returned as it is.

        Raises:
            MisconfigurationException: if one batch of a window says how many tokens it has, and another does not.
        """
        if output is None:
            return None
        tokens = num_tokens_in(output)
        if not self._is_empty:
            check_all_alike(tokens, self._total)
        self._is_empty = False
        if tokens is None:
            return output
        loss = output["loss"]
        own = torch.stack([loss.detach().float().reshape(()), as_count(tokens, loss.device)])
        loss_sum, total = all_reduce(own, self._axis).unbind()
        self._total = total if self._total is None else self._total + total
        # The value of the mean and the graph of the sum.
        mean = loss_sum * _inverse(total) + (loss - loss.detach())
        return {**output, "loss": mean, NUM_TOKENS: total}

    def gradient_factor(self, batches: int) -> Tensor | None:
        """What makes the gradient of the mean loss of the gradient that the window's batches have left.

        Args:
            batches: what the loss of each batch has been divided by, which is Lightning's way to accumulate.

        Returns:
            A factor for gradients that have been averaged over replicas; 0 if there is no token. ``None`` if losses are
            means.
        """
        return None if self._total is None else _inverse(self._total) * (batches * self._axis.size)


def as_count(tokens: Any, device: torch.device) -> Tensor:
    """A number of tokens as an fp32 scalar: rounding beyond 2^24 is that of any gradient."""
    count = torch.as_tensor(tokens, device=device).detach().float()
    if count.numel() != 1:
        raise MisconfigurationException(f"'{NUM_TOKENS}' must be one number; got shape {tuple(count.shape)}")
    return count.reshape(())


def _inverse(total: Tensor) -> Tensor:
    return torch.where(total > 0, 1 / total, torch.zeros_like(total))
