"""Warning of what a step keeps behind the model's call, which only the last stage of a pipeline runs."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType

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
    called = {name: {n for function in _own_code(module, name, set()) for n in _names(function)} for name in _STEPS}
    kept = {name: sorted(names & _KEEPS) for name, names in called.items()}
    found = [f"{name} ({', '.join(names)})" for name, names in kept.items() if names]
    if found:
        rank_zero_warn(
            f"pp={stages}: {type(module).__name__}.{', '.join(found)}: behind the model's call a step runs on the ranks"
            " of the last pipeline stage alone. What it gives to self.logger is not written; lists that it appends to"
            " stay empty on other ranks, rank 0 among them. self.log reaches all ranks, and so does what training_step"
            " returns, in on_train_batch_end; predictions do with broadcast_predictions=True"
        )


def _own_code(module: LightningModule, name: str, seen: set[str]) -> Iterator[FunctionType]:
    """A method and those that it calls, as far as they are not Lightning's or this package's; none twice."""
    function = getattr(type(module), name, None)
    if not isinstance(function, FunctionType) or name in seen:
        return
    seen.add(name)
    if (function.__module__ or "").partition(".")[0] in (
        "lightning",
        "pytorch_lightning",
        "torch",
        "lightning_megatron",
    ):
        return
    yield function
    for called in _names(function):
        yield from _own_code(module, called, seen)


def _names(function: FunctionType) -> tuple[str, ...]:
    return function.__code__.co_names
