"""Main parameters in an optimizer's groups during a step, the user's parameters at all other times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_megatron.ops.adamw import leaves_kernel_open


class MainParamGroups:
    """Puts main parameters into an optimizer's groups while it steps, or saves and loads its state.

    At all other times its groups hold the parameters that the user gave it. So ``zero_grad``, toggling, freezing and
    all other code that iterates over ``param_groups`` acts on the model, as in plain torch. It uses torch's public
    hooks of optimizers, and so works for every caller of ``step``. If the user has left the kernel to torch, a step on
    a CPU may use torch's fused kernel.

    Args:
        mains: function that returns the main parameters of each group, called at every step.
        before: function called before a step.
        after: function called after a step.
        may_round: function that returns True if values need not equal those of plain torch bit for bit.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mains: Callable[[], Sequence[list[nn.Parameter]]],
        before: Callable[[], None],
        after: Callable[[], None],
        may_round: Callable[[], bool],
    ) -> None:
        self._may_round = may_round
        self._optimizer, self._mains, self._before, self._after = optimizer, mains, before, after
        self._depth = 0  # a step that calls super().step() runs the hooks twice
        self._users: list[list[nn.Parameter]] = []
        self._fused: list[dict[str, Any]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._begin_step),
            optimizer.register_step_post_hook(self._end_step),
            optimizer.register_state_dict_pre_hook(self._enter),
            optimizer.register_state_dict_post_hook(self._leave),
            optimizer.register_load_state_dict_pre_hook(self._enter),
            optimizer.register_load_state_dict_post_hook(self._leave),
        ]

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

    def _enter(self, *_: Any) -> None:
        if self._depth == 0:
            self._users = [group["params"] for group in self._optimizer.param_groups]
            self._put(self._mains())
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._put(self._users)

    def _put(self, params: Sequence[list[nn.Parameter]]) -> None:
        for group, own in zip(self._optimizer.param_groups, params, strict=True):
            group["params"] = own

    def recover(self) -> None:
        """Put the user's parameters back after a step that raised an exception."""
        self._forget_kernels()
        if self._depth:
            self._depth = 0
            self._put(self._users)

    def close(self) -> None:
        """Remove the hooks."""
        self.recover()
        for handle in self._handles:
            handle.remove()
