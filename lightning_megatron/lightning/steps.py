"""What the schedule runs for Lightning: a user's own step methods, once per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_megatron.lightning.logs import LogCapture
from lightning_megatron.lightning.micro_batches import join_outputs
from lightning_megatron.optim.zero import ShardedOptimizer

MicroBatches = Sequence[tuple[Any, float]]


class TrainingWork:
    """``training_step`` on every micro-batch; implements ``pipeline.runtime.StageWork``.

    Args:
        module: the user's.
        micro_batches: pieces of the batch with their weights.
        rest: what Lightning passes after the batch.
        scale: what a loss is multiplied with, besides its weight, before backward.
        optimizers: told when gradients are complete; empty while batches are accumulated.
    """

    def __init__(
        self,
        module: LightningModule,
        micro_batches: MicroBatches,
        rest: tuple[Any, ...],
        scale: float,
        optimizers: Sequence[ShardedOptimizer],
    ) -> None:
        self._module, self._micro_batches, self._rest = module, micro_batches, rest
        self._scale, self._optimizers = scale, optimizers
        self._logs = LogCapture(module)
        self._losses: list[Tensor] = []
        self._extras: list[Mapping[str, Any]] = []

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Tensor | None:
        """The scaled loss of one micro-batch; ``None`` if the user returned none."""
        batch, weight = self._micro_batches[microbatch]
        with self._logs.micro_batch(weight):
            output = self._module.training_step(batch, *self._rest)
        if output is None:
            return None
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise TypeError(f"training_step must return a tensor, a dict with 'loss', or None; got {type(output)}")
        if isinstance(output, Mapping):
            self._extras.append({key: value for key, value in output.items() if key != "loss"})
        self._losses.append(loss.detach() * weight)
        return loss * (weight * self._scale)

    def hidden_shape(self, microbatch: int) -> tuple[int, ...]:
        """Nothing is handed on where there is one stage."""
        raise NotImplementedError("one stage hands on no activation")

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Gradients of this backward may be sent as they become ready."""
        for optimizer in self._optimizers:
            optimizer.sync = True
        try:
            yield
        finally:
            for optimizer in self._optimizers:
                optimizer.sync = False

    def output(self) -> Any:
        """What one ``training_step`` on the whole batch would have returned, without its graph; logs are replayed."""
        self._logs.replay()
        if not self._losses:
            return None
        loss = torch.stack(self._losses).sum()
        return {"loss": loss, **join_outputs(self._extras)} if self._extras else loss


def evaluate(
    module: LightningModule, step: Callable[..., Any], micro_batches: MicroBatches, rest: tuple[Any, ...]
) -> Any:
    """Run an evaluation step on every micro-batch, log each name once, and join the outputs.

    Args:
        module: the user's.
        step: its ``validation_step``, ``test_step`` or ``predict_step``.
        micro_batches: pieces of the batch with their weights.
        rest: what Lightning passes after the batch.
    """
    logs = LogCapture(module)
    outputs = []
    for batch, weight in micro_batches:
        with logs.micro_batch(weight):
            outputs.append(step(batch, *rest))
    logs.replay()
    return join_outputs(outputs)
