"""Work of the pipeline stages: a user's step methods, run once per micro-batch and stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_megatron.lightning.step.log_capture import LogCapture
from lightning_megatron.lightning.step.micro_batches import join_outputs
from lightning_megatron.lightning.step.per_token_loss import (
    FURTHER_SUMS,
    NUM_TOKENS,
    as_count,
    check_all_alike,
    check_stages_can_count,
    num_tokens_in,
    scale_with_tokens,
    tokens_before,
)
from lightning_megatron.lightning.streams.generators import seed_generators
from lightning_megatron.stage import BackwardScale, StageBoundary, StageReached

MicroBatches = Sequence[tuple[Any, float]]


class _Work:
    """A step method on every micro-batch; implements ``pipeline.runtime.StageWork``.

    Args:
        step: step method of the module.
        micro_batches: pieces of the batch with their weights.
        rest: arguments that Lightning passes after the batch.
        boundary: boundary of pipeline stages.

    Attributes:
        logs: logs of the last stage.
    """

    def __init__(
        self,
        module: LightningModule,
        step: Callable[..., Any],
        micro_batches: MicroBatches,
        rest: tuple[Any, ...],
        boundary: StageBoundary,
    ) -> None:
        self._module, self._step = module, step
        self._micro_batches, self._rest, self._boundary = micro_batches, rest, boundary
        self.logs = LogCapture(module)
        self._outputs: list[Any] = []  # of micro-batches, to be joined by their weights
        self._weights: list[float] = []
        self._seed = int(torch.randint(1 << 31, (), device="cpu")) if boundary.num_stages > 1 else None

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Tensor | None:
        """The activation for the next stage; on the last one, the result of :meth:`on_last_stage`."""
        batch, weight = self._micro_batches[microbatch]
        if self._seed is not None:  # stages run the micro-batches in different orders
            seed_generators(self._seed + microbatch)
        is_last = stage == self._boundary.num_stages - 1
        scale = self.loss_scale(weight) if is_last else self.early_scale(batch, weight)
        with (
            self._boundary.at(stage, hidden, scale) as backward_scale,
            self.logs.micro_batch(weight, keep=is_last),
        ):
            try:
                output = self._step(batch, *self._rest)
            except StageReached as reached:
                reached.__traceback__ = None  # a traceback keeps every frame of the step alive, and so its tensors
                return reached.hidden
        if not is_last:
            raise RuntimeError(
                f"{self._step.__name__} returned on pipeline stage {stage} without calling the model: with pp > 1 every"
                " stage must reach the model's call"
            )
        return self.on_last_stage(output, batch, weight, backward_scale)

    def on_last_stage(self, output: Any, batch: Any, weight: float, scale: BackwardScale) -> Tensor | None:
        """The tensor to differentiate, from a step's output on a micro-batch."""
        raise NotImplementedError

    def loss_scale(self, weight: float) -> float:
        """Factor of a micro-batch's loss in the backward."""
        return weight

    def early_scale(self, batch: Any, weight: float) -> float | Tensor:
        """Factor of the losses that a stage before the last adds for a micro-batch."""
        return self.loss_scale(weight)

    def hidden_shape(self, microbatch: int) -> tuple[int, ...]:
        """Shape of a micro-batch's activation between stages, from the module's ``hidden_shape``."""
        shape: tuple[int, ...] = self._module.hidden_shape(self._micro_batches[microbatch][0])  # type: ignore[operator]
        return shape


class TrainingWork(_Work):
    """``training_step`` on every micro-batch, in a ``context`` of its own.

    In the backward each loss has a factor ``scale`` on top of its weight.
    """

    def __init__(
        self,
        module: LightningModule,
        micro_batches: MicroBatches,
        rest: tuple[Any, ...],
        boundary: StageBoundary,
        scale: float,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(module, module.training_step, micro_batches, rest, boundary)
        self._scale, self._context = scale, context
        self._losses: list[Tensor] = []
        self._tokens: list[Tensor | None] = []
        self._further: list[Tensor] = []

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Tensor | None:
        """See the base class."""
        with self._context():
            return super().forward(stage, microbatch, hidden)

    def on_last_stage(self, output: Any, batch: Any, weight: float, scale: BackwardScale) -> Tensor | None:
        """The scaled loss of one micro-batch; ``None`` if the user returned none."""
        if output is None:
            return None
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise TypeError(f"training_step must return a tensor, a dict with 'loss', or None; got {type(output)}")
        tokens = num_tokens_in(output, self._module)
        own = ("loss",) if tokens is None else ("loss", NUM_TOKENS, FURTHER_SUMS)
        if isinstance(output, Mapping):
            self._outputs.append({key: value for key, value in output.items() if key not in own})
            self._weights.append(weight)
        if tokens is not None:
            check_stages_can_count(self._module, self._boundary.num_stages, batch)
        share = weight if tokens is None else 1.0  # sums are added up as they are
        self._tokens.append(None if tokens is None else as_count(tokens, loss.device))
        check_all_alike(self._tokens[0], self._tokens[-1])
        self._losses.append(loss.detach() * share)
        if tokens is not None and FURTHER_SUMS in output:
            self._further.append(output[FURTHER_SUMS])
        scale.value = self.loss_scale(share)
        scaled = loss * scale.value
        scale_with_tokens(scale, tokens)
        return scaled

    def loss_scale(self, weight: float) -> float:
        """Weight of the micro-batch, times the scale of the batch."""
        return weight * self._scale

    def early_scale(self, batch: Any, weight: float) -> float | Tensor:
        """The last stage's factor, which depends on the number of tokens if the loss is a sum over them."""
        tokens = tokens_before(self._module, batch)
        return self.loss_scale(weight) if tokens is None else self.loss_scale(1.0) * tokens

    @property
    def totals(self) -> list[Tensor]:
        """Loss of the batch, without its graph, its number of tokens if there was one, and sums of further losses.

        Empty if there was no loss, or on a stage that is not the last.
        """
        tokens = [count for count in self._tokens if count is not None]
        totals = [torch.stack(parts).sum() for parts in (self._losses, tokens) if parts]
        return totals + ([*torch.stack(self._further).sum(0).flatten()] if self._further else [])

    @property
    def extras(self) -> dict[str, Any] | None:
        """Entries of a dict besides the loss and the number of tokens; ``None`` if the step returned no dict here."""
        return join_outputs(self._outputs, self._weights) if self._outputs else None

    def output(self, totals: Sequence[Tensor], extras: dict[str, Any] | None) -> Any:
        """Output of one ``training_step`` on the whole batch, without its graph, from the last stage's parts."""
        if not totals:
            return None
        named = dict(zip(("loss", NUM_TOKENS), totals, strict=False))
        if len(totals) > len(named):
            named[FURTHER_SUMS] = torch.stack([*totals[len(named) :]]).view(-1, 2)
        return totals[0] if extras is None and len(totals) == 1 else {**named, **(extras or {})}


class EvaluationWork(_Work):
    """An evaluation step on every micro-batch."""

    def on_last_stage(self, output: Any, batch: Any, weight: float, scale: BackwardScale) -> None:
        """Append the output to those to join."""
        self._outputs.append(output)
        self._weights.append(weight)

    def output(self) -> Any:
        """Outputs of all micro-batches, joined; ``None`` on a stage that is not the last."""
        return join_outputs(self._outputs, self._weights) if self._outputs else None
