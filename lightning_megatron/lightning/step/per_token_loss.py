"""Losses that are sums over tokens, and their mean over all tokens of a step.

Micro-batches, replicas and accumulated batches hold different numbers of tokens, so that a mean of their means is not
the mean. The number of tokens of a step is known only after its last forward. So the sums are differentiated, and their
gradient is scaled once, before clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.config.layout import ModelShape
from lightning_megatron.mesh import Axis
from lightning_megatron.stage import BackwardScale

NUM_TOKENS = "num_tokens"
FURTHER_SUMS = "further_sums"
"""Key of a tensor ``[n, 2]``: the sum of each further loss, and its number of tokens. Their ratios are logged."""


@runtime_checkable
class CountsTokens(Protocol):
    """A module that can count the tokens of its summed loss before the model runs, on every pipeline stage."""

    def num_tokens(self, batch: Any) -> Tensor | None:
        """Number of tokens over which the loss of a batch is a sum; ``None`` for a mean."""
        ...


@runtime_checkable
class LogsTokenMean(Protocol):
    """A module with a log function for the mean over tokens: its steps see only micro-batches of one replica."""

    def log_mean_over_tokens(self, loss: Tensor, further: Sequence[Tensor] = ()) -> None:
        """Log the mean of a batch over the tokens of all replicas, and such means of further losses."""
        ...


def num_tokens_in(output: Any, module: object) -> Any:
    """The number of tokens over which a step's loss is a sum; ``None`` for a loss that is a mean.

    It is a sum if the module asks for it: its attribute ``sums_over_tokens`` is true, as in this package's modules. In
    another module's output the key is the user's own.
    """
    if isinstance(output, Tensor) or not isinstance(output, Mapping):
        return None
    return output.get(NUM_TOKENS) if getattr(module, "sums_over_tokens", False) else None


def _warn_of_means(output: Any, module: object) -> None:
    """Warn that a number of tokens changes nothing, where the module does not say what it means."""
    if isinstance(output, Mapping) and NUM_TOKENS in output and not hasattr(module, "sums_over_tokens"):
        rank_zero_warn(
            f"training_step of {type(module).__name__} returned '{NUM_TOKENS}', and its loss is taken for a mean. If it"
            f" is a sum over {NUM_TOKENS}, set sums_over_tokens = True in the class; False ends this warning"
        )


def check_all_alike(one: Any, other: Any) -> None:
    """Refuse a mix of sums, with a number of tokens, and means, with ``None``, in one optimizer step.

    Raises:
        MisconfigurationException: if just one of them is ``None``.
    """
    if (one is None) != (other is None):
        raise MisconfigurationException(
            f"training_step returned '{NUM_TOKENS}' for some of the batches or micro-batches of one optimizer step, and"
            " for others not: a sum over tokens and a mean cannot be added; return it always (0 where nothing counts)"
        )


def check_stages_can_count(module: object, num_stages: int, batch: Any) -> None:
    """Refuse experts before the last stage if their auxiliary losses need the number of tokens before it is known.

    Args:
        module: module; its ``training_step`` returned a number of tokens.
        num_stages: stages of the pipeline.
        batch: micro-batch of that step.

    Raises:
        MisconfigurationException: for a model with experts in more than one stage.
    """
    shape: ModelShape | None = getattr(module, "model_shape", None)
    if num_stages > 1 and shape is not None and shape.num_experts and tokens_before(module, batch) is None:
        raise MisconfigurationException(
            f"'{NUM_TOKENS}' does not go with experts in a pipeline: the losses that balance them would be divided by"
            " the number of tokens; let the module's num_tokens(batch) say it beforehand, as GPTModule's does with"
            " loss_reduction='token', return a mean, or use pp=1"
        )


def tokens_before(module: object, batch: Any) -> Tensor | None:
    """Number of tokens that a summed loss will cover; ``None`` for a mean, or if unknown before the model runs."""
    return module.num_tokens(batch) if isinstance(module, CountsTokens) else None


def scale_with_tokens(scale: BackwardScale, tokens: Any) -> None:
    """Multiply the scale of auxiliary losses by the tokens of a sum, so that they weigh the same as beside a mean."""
    if tokens is not None:
        scale.value = scale.value * torch.as_tensor(tokens).detach().float()


class TokenCounter:
    """Counter of the tokens of one optimizer step, over all its accumulated batches and replicas.

    Args:
        axis: ranks that read different samples. All ranks of one replica (pipeline stages, ranks that share a
            sequence) know its number of tokens, which counts once.
        module: module whose steps are counted; a :class:`LogsTokenMean` logs the mean of each batch.
    """

    def __init__(self, axis: Axis, module: object) -> None:
        self._axis, self._module, self._is_first = axis, module, True
        self._log: Callable[..., None] | None = None
        if isinstance(module, LogsTokenMean):
            self._log = module.log_mean_over_tokens
        self.restart()

    def restart(self) -> None:
        """Reset the count for the next optimizer step."""
        self._is_empty = True
        self._total: Tensor | None = None

    def normalize(self, output: Any) -> Any:
        """Count one replica's whole batch by the output of its ``training_step``, and turn its loss into a mean.

        Returns:
            The output, with the mean loss of the batch over all replicas, and their number of tokens, in place of this
            replica's sums. The gradient of that loss is still the sum's. An output without a number of tokens is
            returned as it is.

        Raises:
            MisconfigurationException: if only some batches of a step have a number of tokens.
        """
        if output is None:
            return None
        if self._is_first:
            self._is_first = False
            _warn_of_means(output, self._module)
        tokens = num_tokens_in(output, self._module)
        if not self._is_empty:
            check_all_alike(tokens, self._total)
        self._is_empty = False
        if tokens is None:
            return output
        loss, further = output["loss"], output.get(FURTHER_SUMS, ())
        own = torch.stack([loss.detach().float().reshape(()), as_count(tokens, loss.device)])[None]
        (loss_sum, total), *sums = all_reduce(torch.cat((own, further)) if len(further) else own, self._axis)
        self._total = total if self._total is None else self._total + total
        value = loss_sum * _inverse(total)
        if self._log is not None:
            self._log(value, *([[part * _inverse(count) for part, count in sums]] if sums else []))
        others = {key: entry for key, entry in output.items() if key != FURTHER_SUMS}
        # The value is the mean, the graph is the sum's.
        return {**others, "loss": value + (loss - loss.detach()), NUM_TOKENS: total}

    def gradient_factor(self, batches: int) -> Tensor | None:
        """Factor that turns the accumulated gradient (of the summed loss) into that of the mean loss.

        Args:
            batches: number of accumulated batches; Lightning divides each loss by it.

        Returns:
            A factor for gradients that have been averaged over replicas: 0 if there is no token, ``None`` if losses are
            means.
        """
        return None if self._total is None else _inverse(self._total) * (batches * self._axis.size)


def as_count(tokens: Any, device: torch.device) -> Tensor:
    """A number of tokens as an fp32 scalar, which is exact up to 2^24."""
    if isinstance(tokens, Tensor) and tokens.is_floating_point() and tokens.element_size() < 4:
        reason = f"{tokens.dtype} rounds large counts: sum the mask in fp32, mask.sum(dtype=torch.float32)"
        raise MisconfigurationException(f"'{NUM_TOKENS}': {reason}")
    count = torch.as_tensor(tokens, device=device).detach().float()
    if count.numel() != 1:
        raise MisconfigurationException(f"'{NUM_TOKENS}' must be one number; got shape {tuple(count.shape)}")
    return count.reshape(())


def _inverse(total: Tensor) -> Tensor:
    return torch.where(total > 0, 1 / total, torch.zeros_like(total))
