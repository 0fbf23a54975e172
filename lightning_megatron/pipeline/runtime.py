"""The interpreter of schedules: one small engine that executes any list of actions, with and without a pipeline.

It knows no model and no trainer. What a stage computes, how a loss is scaled and what brackets the last backward come
in as a :class:`StageWork`; with one stage and several micro-batches it is plain gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import Pending
from lightning_megatron.comm.p2p import start_receive, start_send
from lightning_megatron.mesh import Axis
from lightning_megatron.pipeline.action import Action, Message, message_in
from lightning_megatron.pipeline.schedule import build_schedule, forward_only
from lightning_megatron.pipeline.transfer import Step, Transfer, add_transfers


class StageWork(Protocol):
    """What the engine asks of whoever owns the model."""

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Tensor | None:
        """Run one stage on one micro-batch.

        Args:
            stage: global number.
            microbatch: number within the step.
            hidden: the activation of the stage before; ``None`` on the first stage.

        Returns:
            The activation for the next stage; on the last stage the loss, already scaled, or ``None`` where nothing is
            to be differentiated.
        """
        ...

    def hidden_shape(self, microbatch: int) -> tuple[int, ...]:
        """Shape of the activations that stages hand on, ``[S, B, H]`` or a shard of it."""
        ...

    def last_backward(self) -> AbstractContextManager[None]:
        """Brackets the last backward of each stage in a step: gradients are complete when it ends."""
        ...


@lru_cache(maxsize=64)
def training_plan(
    name: str | None, pp: int, vpp: int, num_microbatches: int, rank: int
) -> tuple[Step, ...]:
    """This rank's actions and transfers of one training step."""
    return tuple(add_transfers(build_schedule(name, pp, vpp, num_microbatches))[rank])


@lru_cache(maxsize=64)
def evaluation_plan(pp: int, vpp: int, num_microbatches: int, rank: int) -> tuple[Step, ...]:
    """This rank's actions and transfers of one evaluation step: forwards alone."""
    return tuple(add_transfers(forward_only(pp, vpp, num_microbatches))[rank])


class PipelineRuntime:
    """Executes a plan on one rank.

    Args:
        axis: the ranks of the pipeline.
        num_stages: stages of the whole pipeline.
        device: where activations live.
        dtype: of activations on the wire.
    """

    def __init__(self, axis: Axis, num_stages: int, device: torch.device, dtype: torch.dtype) -> None:
        self._axis, self._num_stages = axis, num_stages
        self._device, self._dtype = device, dtype

    def run(self, plan: Sequence[Step], work: StageWork) -> None:
        """Execute a plan; returns when everything has been computed and sent."""
        run = _Run(self._axis, self._num_stages, self._device, self._dtype, work)
        final = {step.stage: i for i, step in enumerate(plan) if isinstance(step, Action) and step.kind == "B"}
        for i, step in enumerate(plan):
            if isinstance(step, Transfer):
                run.post(step)
            elif step.kind == "F":
                run.forward(step, keep=bool(final))
            elif final[step.stage] == i:
                with work.last_backward():
                    run.backward(step)
            else:
                run.backward(step)
        run.finish()


class _Run:
    """State of one step: what has arrived, what waits for its backward, what is still being sent."""

    def __init__(
        self, axis: Axis, num_stages: int, device: torch.device, dtype: torch.dtype, work: StageWork
    ) -> None:
        self._axis, self._num_stages, self._device, self._dtype = axis, num_stages, device, dtype
        self._work = work
        self._arriving: dict[Message, Pending] = {}
        self._ready: dict[Message, Tensor] = {}
        self._sending: list[Pending] = []
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor | None]] = {}

    def post(self, transfer: Transfer) -> None:
        message = transfer.message
        if transfer.sends:
            self._sending.append(start_send(self._ready.pop(message), self._axis, transfer.peer))
        else:
            shape = self._work.hidden_shape(message.microbatch)
            self._arriving[message] = start_receive(shape, self._dtype, self._device, self._axis, transfer.peer)

    def _take(self, action: Action) -> Tensor | None:
        message = message_in(action, self._num_stages)
        if message is None:
            return None
        if message in self._ready:  # a neighbouring stage on this very rank made it
            return self._ready.pop(message)
        return self._arriving.pop(message).wait()

    def forward(self, action: Action, keep: bool) -> None:
        hidden = self._take(action)
        if hidden is not None and keep:
            hidden.requires_grad_()
        out = self._work.forward(action.stage, action.microbatch, hidden)
        if action.stage < self._num_stages - 1:
            assert out is not None
            self._ready[Message(action.stage, action.stage + 1, action.microbatch)] = out.detach()
        if keep:
            self._kept[action.stage, action.microbatch] = hidden, out

    def backward(self, action: Action) -> None:
        gradient = self._take(action)
        hidden, out = self._kept.pop((action.stage, action.microbatch))
        if out is not None and out.requires_grad:
            torch.autograd.backward([out], None if gradient is None else [gradient])
        if hidden is not None:
            grad = hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)
            self._ready[Message(action.stage, action.stage - 1, action.microbatch)] = grad

    def finish(self) -> None:
        for sent in self._sending:
            sent.wait()
