"""Hooks of a step that Lightning skips.

Lightning calls every hook of every callback, overridden or not, which costs about fourteen Python calls each time. It
skips a hook that is not callable, so a hook that is ``None`` costs next to nothing.
"""

from __future__ import annotations

from lightning.pytorch import Callback

STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
"""Hooks that Lightning calls in every step of training."""


def skip(callback: Callback, *hooks: str) -> None:
    """Let Lightning skip hooks of a callback that have nothing to do in this run."""
    vars(callback).update(dict.fromkeys(hooks))


def skip_missing(callback: Callback) -> None:
    """Let Lightning skip the hooks of a step that the callback's class does not define."""
    skip(callback, *(hook for hook in STEP_HOOKS if getattr(type(callback), hook) is getattr(Callback, hook)))
