"""Detection of callbacks and modules that read or write parameters between steps, or gradients within one."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer

_BETWEEN_STEPS = ("on_train_batch_end", "on_before_zero_grad", "on_train_batch_start")
_AROUND_STEPS = (*_BETWEEN_STEPS, "optimizer_step")
_OF_OTHERS = ("lightning", "lightning_megatron")
_AVERAGES = ("WeightAveraging", "StochasticWeightAveraging")  # names: Lightning 2.5 has no WeightAveraging


def watches_parameters(trainer: Trainer) -> bool:
    """True if a callback or the module may read or write parameters after a step and before the next forward.

    Of Lightning's own callbacks only weight averaging does. Any other callback with such a hook is assumed to, unless
    its class sets ``reads_parameters = False``: a stale parameter is worse than a lost overlap. The attribute covers
    the hooks of its class and of the bases, not those of a subclass.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization or _may_read(module, LightningModule, _AROUND_STEPS):
        return True
    return any(_may_read(callback, Callback, _BETWEEN_STEPS) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def averages_parameters(callback: object) -> bool:
    """True for Lightning's callbacks that average parameters."""
    return any(kind.__name__ in _AVERAGES for kind in type(callback).__mro__)


def watches_gradients(trainer: Trainer, *hooks: str) -> bool:
    """True if one of these hooks of the module or a callback may read or write gradients, by the same rule."""
    callbacks: Sequence[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    instances = ((trainer.lightning_module, LightningModule), *((callback, Callback) for callback in callbacks))
    return any(_hook_may_read(instance, hook, base) for instance, base in instances for hook in hooks)


def reads_outputs(trainer: Trainer) -> bool:
    """True if the user's module or a callback of the user has the hook that gets what a step returned."""
    hook = "on_train_batch_end"
    return any(
        _is_of_instance(each, hook) or getattr(type(each), hook).__module__.partition(".")[0] not in _OF_OTHERS
        for each in (trainer.lightning_module, *trainer.callbacks)  # type: ignore[attr-defined]
    )


def _may_read(instance: object, base: type, hooks: Sequence[str]) -> bool:
    if averages_parameters(instance) or getattr(instance, "reads_parameters", False):
        return True
    return any(_hook_may_read(instance, hook, base) for hook in hooks)


def _hook_may_read(instance: object, hook: str, base: type) -> bool:
    if _is_of_instance(instance, hook):
        return True
    for kind in type(instance).__mro__:
        if "reads_parameters" in vars(kind):
            return False  # False here: `_may_read` has returned for True
        if hook in vars(kind):
            return kind is not base and not kind.__module__.startswith("lightning.")
    return False


def _is_of_instance(instance: object, hook: str) -> bool:
    """True for a hook of one instance, such as the functions of a ``LambdaCallback``; not for one that is skipped."""
    return callable(vars(instance).get(hook))
