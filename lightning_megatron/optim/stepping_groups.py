"""The user's parameters in an optimizer's groups, and flat main parameters in their place while it steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


class SteppingGroups:
    """Shows an optimizer main parameters exactly while it steps, or saves and loads its state.

    At all other times its groups hold the parameters that the user gave it. So ``zero_grad``, toggling, freezing and
    whatever else goes over ``param_groups`` acts on the model, as in plain torch. It stands on torch's public hooks of
    optimizers, and so works for whoever calls ``step``.

    Args:
        optimizer: the user's.
        mains: main parameters of each group, asked for at every step.
        before: done before a step.
        after: done after it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mains: Callable[[], Sequence[list[nn.Parameter]]],
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._optimizer, self._mains, self._before, self._after = optimizer, mains, before, after
        self._depth = 0  # a step that calls its class's parent's runs the hooks of both
        self._users: list[list[nn.Parameter]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._begin_step),
            optimizer.register_step_post_hook(self._end_step),
            optimizer.register_state_dict_pre_hook(self._enter),
            optimizer.register_state_dict_post_hook(self._leave),
            optimizer.register_load_state_dict_pre_hook(self._enter),
            optimizer.register_load_state_dict_post_hook(self._leave),
        ]

    def _begin_step(self, *_: Any) -> None:
        if self._depth == 0:
            self._before()
        self._enter()

    def _end_step(self, *_: Any) -> None:
        self._leave()
        if self._depth == 0:
            self._after()

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
        for group, held in zip(self._optimizer.param_groups, params, strict=True):
            group["params"] = held

    def recover(self) -> None:
        """Put the user's parameters back after a step that raised an exception."""
        if self._depth:
            self._depth = 0
            self._put(self._users)

    def close(self) -> None:
        """Remove the hooks."""
        self.recover()
        for handle in self._handles:
            handle.remove()
