"""Warning of what a step keeps behind the model's call, which only the last stage of a pipeline runs."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_OF_OTHERS = {"lightning", "pytorch_lightning", "torch", "lightning_megatron"}
_KEEPS = {"logger", "loggers", "append", "extend", "print"}
"""Names by which a step logs or collects, and whose effect stays on its rank."""


def warn_of_last_stage(module: LightningModule, stages: int) -> None:
    """Warn of a user's steps, and methods that they call, which log or collect without ``self.log``, in a pipeline."""
    if stages == 1:
        return
    kept = {name: sorted(_KEEPS.intersection(_names_in(module, name, set()))) for name in _STEPS}
    found = [f"{name} ({', '.join(names)})" for name, names in kept.items() if names]
    if found:
        rank_zero_warn(
            f"pp={stages}: {type(module).__name__}.{', '.join(found)}: behind the model's call a step runs on the ranks"
            " of the last pipeline stage alone. What it gives to self.logger is not written; lists that it appends to"
            " stay empty on other ranks, rank 0 among them. self.log reaches all ranks, and so does what training_step"
            " returns, in on_train_batch_end; predictions do with broadcast_predictions=True"
        )


def _names_in(module: LightningModule, name: str, seen: set[str]) -> Iterator[str]:
    """Names in a method and in those that it calls, as far as they are not Lightning's or this package's."""
    function = getattr(type(module), name, None)
    if not isinstance(function, FunctionType) or name in seen:
        return
    seen.add(name)
    if (function.__module__ or "").partition(".")[0] in _OF_OTHERS:
        return
    for called in _names(function.__code__):
        yield called
        yield from _names_in(module, called, seen)


def _names(code: CodeType) -> Iterator[str]:
    """Attributes and globals that code names, and the functions and comprehensions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
