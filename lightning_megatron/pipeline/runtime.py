"""Interpreter of schedules: executes any list of actions, with and without a pipeline.

It knows neither model nor trainer. A :class:`StageWork` computes a stage, scales the loss and provides the context of
the last backward. With one stage and several micro-batches this is plain gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_megatron.comm.collectives import Pending
from lightning_megatron.comm.p2p import start_receive, start_send
from lightning_megatron.device import collective_traits, mark_step
from lightning_megatron.mesh import Axis
from lightning_megatron.pipeline.action import Action, Message, message_in, rank_of
from lightning_megatron.pipeline.schedule import build_schedule, forward_only
from lightning_megatron.pipeline.send_recv import Step, Transfer, add_transfers
from lightning_megatron.recorder.call import PeerLostError
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.recorder.recorder import ActionLog
from lightning_megatron.weight_grad_store import PendingWeightGrads, WeightGradStore


class StageWork(Protocol):
    """Interface of the model for the interpreter."""

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Tensor | None:
        """Run one stage on one micro-batch.

        Args:
            stage: global number of the stage.
            microbatch: number of the micro-batch within the step.
            hidden: activation of the previous stage, ``[S, B, H]``; ``None`` on the first stage.

        Returns:
            The activation for the next stage; on the last stage the loss, already scaled, or ``None`` if there is
            nothing to differentiate.
        """
        ...

    def hidden_shape(self, microbatch: int) -> tuple[int, ...]:
        """Shape of the activations between stages, ``[S, B, H]`` or a shard of it."""
        ...


@lru_cache(maxsize=64)
def training_plan(name: str | None, pp: int, vpp: int, num_microbatches: int, rank: int) -> tuple[Step, ...]:
    """Actions and transfers of one training step on this rank."""
    return tuple(add_transfers(build_schedule(name, pp, vpp, num_microbatches))[rank])


@lru_cache(maxsize=64)
def evaluation_plan(pp: int, vpp: int, num_microbatches: int, rank: int) -> tuple[Step, ...]:
    """Actions and transfers of one evaluation step on this rank: forwards only."""
    return tuple(add_transfers(forward_only(pp, vpp, num_microbatches))[rank])


@dataclass(frozen=True, eq=False)
class PipelineRuntime:
    """Executes a plan on one rank.

    Attributes:
        axis: pipeline axis.
        num_stages: stages of the whole pipeline.
        device: device of the activations.
        dtype: dtype of activations that are sent.
        weight_grads: store of the weight gradients that layers defer, for schedules that split a backward.
    """

    axis: Axis
    num_stages: int
    device: torch.device
    dtype: torch.dtype
    weight_grads: WeightGradStore

    def run(
        self,
        plan: Sequence[Step],
        work: StageWork,
        last_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Execute a plan; returns when everything has been computed and sent.

        An exception of an action gets a note with the pipeline rank and the action.

        Args:
            plan: this rank's actions and transfers.
            work: the computation of the stages.
            last_backward: function that returns a context manager for the last backwards of each stage in the step,
                which complete the gradients that they reach.
        """
        actions = [step for step in plan if isinstance(step, Action)]
        trains = any(action.kind != "F" for action in actions)
        # Last action of each kind on each stage: weight gradients come from B, or partly from I and partly from W.
        final = {(action.stage, action.kind): action for action in actions}
        run = _Run(self, work)
        execute = {"B": run.backward, "I": run.input_backward, "W": run.weight_backward}
        for step in plan:
            try:
                if isinstance(step, Transfer):
                    run.post(step)
                    continue
                with _written_down(step, self.axis.action_log):
                    if step.kind == "F":
                        run.forward(step, keep=trains)
                    elif final[step.stage, step.kind] == step:
                        with last_backward():
                            execute[step.kind](step)
                    else:
                        execute[step.kind](step)
                    mark_step(self.device)
            except Exception as error:
                _note(error, f"on pipeline rank {self.axis.rank} of {self.axis.size}, at {step}")
                raise
        run.finish()


_KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_BACKWARD, "W": Kind.WEIGHT_BACKWARD}


@contextmanager
def _written_down(action: Action, action_log: ActionLog | None) -> Iterator[None]:
    if action_log is None:
        yield
        return
    action_log.stage, action_log.microbatch = action.stage, action.microbatch
    try:
        with action_log.during(_KINDS[action.kind]):
            yield
    finally:
        action_log.stage = action_log.microbatch = -1


@contextmanager
def _waiting_for(message: Message, axis: Axis, peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        said = f"waited for the {message}: pipeline rank {peer} (rank {axis.ranks[peer]} of the job) at the other end"
        if isinstance(error, PeerLostError):
            raise PeerLostError(f"{said} did not answer; {error}") from error.__cause__
        raise PeerLostError(f"{said} has failed, exited or fallen behind; see its output for the reason") from error


def _note(error: Exception, text: str) -> None:
    """Add a note to an error without changing its type (``add_note`` exists from Python 3.11 on)."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        error.args = (*error.args, text)


_MOST_SENDING = 4
"""Largest number of unfinished sends of a rank: two in each direction."""


class _Run:
    """State of one step: messages that have arrived or are being sent, and activations that wait for their backward."""

    def __init__(self, runtime: PipelineRuntime, work: StageWork) -> None:
        self._axis, self._num_stages = runtime.axis, runtime.num_stages
        self._device, self._dtype = runtime.device, runtime.dtype
        self._weight_grads, self._work = runtime.weight_grads, work
        self._arriving: dict[Message, Pending] = {}
        self._ready: dict[Message, Tensor] = {}
        self._sending: list[tuple[Transfer, Pending]] = []
        self._may_ask = not collective_traits(self._device).is_done_waits
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._weights: dict[tuple[int, int], PendingWeightGrads] = {}

    def post(self, transfer: Transfer) -> None:
        """Start a transfer."""
        message = transfer.message
        if transfer.sends:
            self._let_go(_MOST_SENDING - 1)
            with _waiting_for(message, self._axis, transfer.peer):
                self._sending.append((transfer, start_send(self._ready.pop(message), self._axis, transfer.peer)))
        else:
            shape = self._work.hidden_shape(message.microbatch)
            with _waiting_for(message, self._axis, transfer.peer):
                self._arriving[message] = start_receive(shape, self._dtype, self._device, self._axis, transfer.peer)

    def _let_go(self, keep: int) -> None:
        """Drop finished sends, and wait until no more than ``keep`` are unfinished.

        Some backends (gloo) report the end of a send only to a wait. Waiting for the oldest is safe, since a plan also
        runs if every send blocks, and costs nothing unless the receiver lags behind by as many messages.

        On Gaudi a query for completion waits: the next computation would start only once the peer has received. So
        sends are not queried there.
        """
        if self._may_ask:
            self._sending = [(transfer, sent) for transfer, sent in self._sending if not sent.is_done()]
        while len(self._sending) > keep:
            transfer, sent = self._sending.pop(0)
            with _waiting_for(transfer.message, self._axis, transfer.peer):
                sent.wait()

    def _take(self, action: Action) -> Tensor | None:
        message = message_in(action, self._num_stages)
        if message is None:
            return None
        with _waiting_for(message, self._axis, rank_of(message.source, self._axis.size)):
            return self._arriving.pop(message).wait()

    def forward(self, action: Action, keep: bool) -> None:
        """Run a stage; with ``keep``, store the tensors for its backward."""
        hidden = self._take(action)
        if hidden is not None and keep:
            hidden.requires_grad_()
        out = self._work.forward(action.stage, action.microbatch, hidden)
        if action.stage < self._num_stages - 1:
            assert out is not None
            out = out.to(self._dtype)  # operations of a user's stage may give fp32 under autocast
            self._ready[Message(action.stage, action.stage + 1, action.microbatch)] = out.detach()
        if keep:
            sent = action.stage < self._num_stages - 1
            self._kept[action.stage, action.microbatch] = _Kept.of(hidden, out, sent)

    def backward(self, action: Action) -> None:
        """Compute the gradients of input and weights together."""
        gradient = self._take(action)
        kept = self._kept.pop((action.stage, action.microbatch))
        with self._weight_grads.accumulating():
            kept.backward(gradient)
        if kept.hidden is not None:
            grad = kept.hidden.grad if kept.hidden.grad is not None else torch.zeros_like(kept.hidden)
            self._ready[Message(action.stage, action.stage - 1, action.microbatch)] = grad

    def input_backward(self, action: Action) -> None:
        """Compute the gradient of the input, and defer those of the weights."""
        with self._weight_grads.deferring() as weights:
            self.backward(action)
        self._weights[action.stage, action.microbatch] = weights

    def weight_backward(self, action: Action) -> None:
        """Compute the weight gradients that :meth:`input_backward` deferred."""
        with self._weight_grads.accumulating():
            self._weights.pop((action.stage, action.microbatch)).flush()

    def finish(self) -> None:
        """Wait until everything is sent; not on Gaudi, where HCCL itself keeps the tensors of the last sends alive."""
        if self._may_ask:
            self._let_go(0)


@dataclass
class _Kept:
    """Tensors of a micro-batch that a stage keeps for its backward.

    If torch can start a backward at an edge of the graph, only that edge of the output is kept: then the activation is
    freed as soon as it is sent.
    """

    hidden: Tensor | None
    end: Any

    @classmethod
    def of(cls, hidden: Tensor | None, out: Tensor | None, sent: bool) -> _Kept:
        if out is None or not out.requires_grad:
            return cls(hidden, None)
        return cls(hidden, get_gradient_edge(out) if sent and _starts_at_edges() else out)

    def backward(self, gradient: Tensor | None) -> None:
        if self.end is not None:
            torch.autograd.backward([self.end], None if gradient is None else [gradient])


@lru_cache(maxsize=1)
def _starts_at_edges() -> bool:
    """True if ``torch.autograd.backward`` takes an edge of the graph instead of a tensor (newer torch only).

    An edge that does not own its node (torch 2.6) dangles if a Function written in Python made it: torch crashes.
    """
    if "ownership_token" not in GradientEdge._fields:
        return False
    leaf = torch.ones((), requires_grad=True)
    try:
        torch.autograd.backward([get_gradient_edge(leaf * 2)], [torch.ones(())])
    except (TypeError, AttributeError, RuntimeError):
        return False
    return True
