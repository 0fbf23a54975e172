"""Detection of callbacks and modules that read or write parameters between steps, while a gather may be running."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer

_BETWEEN_STEPS = ("on_train_batch_end", "on_before_zero_grad", "on_train_batch_start")
_AROUND_STEPS = (*_BETWEEN_STEPS, "optimizer_step")


def watches_parameters(trainer: Trainer) -> bool:
    """True if a callback or the module may read or write parameters after a step and before the next forward.

    Of Lightning's own callbacks only weight averaging does. Any other callback with such a hook is assumed to: a stale
    parameter is worse than a lost overlap.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization or _overrides(module, LightningModule, _AROUND_STEPS):
        return True
    return any(_hooks_in(callback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _hooks_in(callback: Callback) -> bool:
    if any(
        base.__name__ in ("WeightAveraging", "StochasticWeightAveraging") for base in type(callback).__mro__
    ):  # by name: Lightning 2.5 has no WeightAveraging
        return True
    if type(callback).__module__.startswith(("lightning.", "lightning_megatron.")):
        return False
    return _overrides(callback, Callback, _BETWEEN_STEPS)


def _overrides(instance: object, base: type, hooks: Sequence[str]) -> bool:
    for name in hooks:
        defined = getattr(type(instance), name, None)
        if defined is not getattr(base, name, None) and not getattr(defined, "__module__", "").startswith(
            "lightning_megatron."
        ):
            return True
    return False
