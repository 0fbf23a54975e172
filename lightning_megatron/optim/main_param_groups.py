"""Main parameters in an optimizer's groups during a step, the user's parameters at all other times."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_megatron.ops.adamw import leaves_kernel_open
from lightning_megatron.optim.state_by_param import OptimizerState


class MainParamGroups:
    """Puts main parameters into an optimizer's groups and state while it steps.

    At all other times they hold the parameters that the user gave it. So ``zero_grad``, toggling, freezing, and all
    other code that iterates over ``param_groups`` or reads ``state``, acts on the model, as in plain torch; so do
    ``state_dict`` and ``load_state_dict``, unless ranks share the state of a parameter. It uses torch's public
    hooks of optimizers, and so works for every caller of ``step``. If the user has left the kernel to torch, a step on
    a CPU may use torch's fused kernel.

    Args:
        states: the optimizer's state.
        mains: function that returns the main parameters of each group, called at every step.
        before: function called before a step.
        after: function called after a step.
        may_round: function that returns True if values need not equal those of plain torch bit for bit.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        states: OptimizerState,
        mains: Callable[[], Sequence[list[nn.Parameter]]],
        before: Callable[[], None],
        after: Callable[[], None],
        may_round: Callable[[], bool],
    ) -> None:
        self._states, self._may_round = states, may_round
        self._optimizer, self._mains, self._before, self._after = optimizer, mains, before, after
        self._depth = 0  # a step that calls super().step() runs the hooks twice
        self._users: list[list[nn.Parameter]] = []
        self._given: dict[str, Any] = {}
        self._fused: list[dict[str, Any]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._begin_step),
            optimizer.register_step_post_hook(self._end_step),
            optimizer.register_state_dict_pre_hook(self._begin_state_dict),
            optimizer.register_state_dict_post_hook(self._end_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._begin_load),
            optimizer.register_load_state_dict_post_hook(self._end_load),
        ]
        states.show()

    def _begin_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is not self._optimizer:  # Lightning's wrapper, once copied, runs the hooks around the closure too
            return
        if self._depth == 0:
            self._before()
        self._enter()
        if self._depth == 1 and self._may_round():
            self._fused = [g for g in self._optimizer.param_groups if leaves_kernel_open(self._optimizer, g)]
            for group in self._fused:
                group["fused"] = True

    def _end_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is not self._optimizer:
            return
        self._leave()
        if self._depth == 0:
            self._forget_kernels()
            self._after()

    def _forget_kernels(self) -> None:
        for group in self._fused:
            group["fused"] = None
        self._fused = []

    @contextmanager
    def of_main_params(self) -> Generator[None, None, None]:
        """Context in which groups and state hold the main parameters."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        if self._depth == 0:
            self._users = [group["params"] for group in self._optimizer.param_groups]
            self._states.hide()
            self._put(self._mains())
        self._depth += 1

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._put(self._users)
            self._states.show()

    def _begin_state_dict(self, *_: Any) -> None:
        if self._depth == 0:
            self._states.begin_state_dict()

    def _end_state_dict(self, _: Any, state_dict: dict[str, Any]) -> None:
        if self._depth == 0:
            self._states.end_state_dict(state_dict)

    def _begin_load(self, _: Any, state_dict: dict[str, Any]) -> None:
        if self._depth == 0:
            self._states.refuse_divided()
            self._given = state_dict

    def _end_load(self, optimizer: Optimizer) -> None:
        given, self._given = self._given, {}
        if self._depth == 0 and optimizer is self._optimizer:
            self._states.load(given)

    def _put(self, params: Sequence[list[nn.Parameter]]) -> None:
        for group, own in zip(self._optimizer.param_groups, params, strict=True):
            group["params"] = own

    def recover(self) -> None:
        """Put the user's parameters back after a step that raised an exception."""
        self._forget_kernels()
        if self._depth:
            self._depth = 1
            self._leave()

    def close(self) -> None:
        """Remove the hooks."""
        self.recover()
        self._states.hide()
        for handle in self._handles:
            handle.remove()
