"""What a user logs inside a step that runs once per micro-batch.

Lightning expects one ``self.log`` of a name per batch. While micro-batches run, calls are collected; afterwards each
name is logged once, with the value that the whole batch would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric


@dataclass
class _Entry:
    """Everything logged under one name: values with the weights of their micro-batches, and how to log them."""

    options: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    batch_size: int = 0

    def combined(self) -> Any:
        """The value of the whole batch."""
        if isinstance(self.values[0], Metric):
            return self.values[-1]  # an object that has seen every micro-batch itself
        values = [v.detach().float() if isinstance(v, Tensor) else torch.tensor(float(v)) for v in self.values]
        stacked = torch.stack([v.reshape(()) for v in values])
        how = self.options.get("reduce_fx", "mean")
        name = how if isinstance(how, str) else getattr(how, "__name__", "mean")
        if name == "sum":
            return stacked.sum()
        if name in ("max", "amax"):
            return stacked.max()
        if name in ("min", "amin"):
            return stacked.min()
        weights = stacked.new_tensor(self.weights)
        return (stacked * weights).sum() / weights.sum()


class LogCapture:
    """Collects ``log`` calls of a module during one step, to replay them once.

    Args:
        module: whose ``log`` (and so ``log_dict``) is collected.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._entries: dict[str, _Entry] = {}
        self._weight = 1.0

    @contextmanager
    def micro_batch(self, weight: float) -> Iterator[None]:
        """Collect what is logged inside, as of a micro-batch that is ``weight`` of the batch."""
        self._weight = weight
        # An attribute of this one object hides the class's method for the time of the `with`; nothing is patched.
        previous: Callable[..., None] | None = self._module.__dict__.get("log")
        object.__setattr__(self._module, "log", self._collect)
        try:
            yield
        finally:
            if previous is None:
                object.__delattr__(self._module, "log")
            else:
                object.__setattr__(self._module, "log", previous)

    def _collect(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
        options |= dict(zip(names, args, strict=False))
        size = options.pop("batch_size", None)
        entry = self._entries.setdefault(name, _Entry(options))
        entry.values.append(value)
        entry.weights.append(self._weight)
        entry.batch_size += size or 0

    def replay(self) -> None:
        """Log every name once."""
        for name, entry in self._entries.items():
            size = {"batch_size": entry.batch_size} if entry.batch_size else {}
            self._module.log(name, entry.combined(), **entry.options, **size)
        self._entries.clear()
