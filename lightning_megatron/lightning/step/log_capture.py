"""What a user logs inside a step that runs once per micro-batch, and on one pipeline stage only.

Lightning expects one ``self.log`` of a name per batch, on every rank. While micro-batches run, calls are collected;
afterwards the last stage tells the others what it collected, and each name is logged once, with the value that the
whole batch would have given. So callbacks and loggers that decide by a metric decide alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.lightning.step.metric_sync import last_value, show_step, step_reduction
from lightning_megatron.mesh import Axis
from lightning_megatron.recorder.file_format import Kind


@dataclass
class _Entry:
    """Everything logged under one name: values with the weights of their micro-batches, and how to log them."""

    options: dict[str, Any]
    metric: Metric | None
    values: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    batch_size: int = 0

    def combined(self, device: torch.device) -> Tensor | None:
        """The value of the whole batch; of a metric object, what it shows for this step, or ``None``."""
        if any(value is None for value in self.values):
            return None
        values = [v.detach() if isinstance(v, Tensor) else torch.tensor(float(v)) for v in self.values]
        stacked = torch.stack([v.to(device, torch.float32).reshape(()) for v in values])
        if self.metric is not None:
            name = step_reduction(self.metric)
        else:
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


@dataclass(frozen=True)
class _Line:
    """One name to log, without its value: the same on all ranks of a pipeline from one step to the next.

    Attributes:
        name: logged under.
        options: keyword arguments of ``log``.
        metric: path of a torchmetrics object in the module, which is logged in place of the value.
        has_value: whether there is a value: a metric that was only updated shows none for the step.
    """

    name: str
    options: dict[str, Any]
    metric: str | None
    has_value: bool


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
    def micro_batch(self, weight: float, *, keep: bool = True) -> Iterator[None]:
        """Collect what is logged inside, as of a micro-batch that is ``weight`` of the batch; or let it go unheard.

        An attribute of this one object hides its class's method for the time of the ``with``; nothing is patched.
        """
        self._weight = weight
        previous: Callable[..., None] | None = self._module.__dict__.get("log")
        object.__setattr__(self._module, "log", self._collect if keep else _ignore)
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
        metric = value if isinstance(value, Metric) else None
        entry = self._entries.setdefault(name, _Entry(options, metric))
        entry.values.append(value if metric is None else last_value(metric))
        entry.weights.append(self._weight)
        entry.batch_size += size or 0

    def lines(self) -> list[_Line]:
        """What was collected, without values."""
        logs_metrics = any(entry.metric is not None for entry in self._entries.values())
        modules = self._module.named_modules() if logs_metrics else ()
        paths = {id(module): path for path, module in modules if isinstance(module, Metric)}
        lines = []
        for name, entry in self._entries.items():
            path = None if entry.metric is None else paths.get(id(entry.metric))
            if entry.metric is not None and path is None:
                raise MisconfigurationException(
                    f"self.log({name!r}, ...) was given a {type(entry.metric).__name__} that is no attribute of the"
                    " module: assign it in __init__ or configure_model"
                )
            size = {"batch_size": entry.batch_size} if entry.batch_size else {}
            has_value = all(value is not None for value in entry.values)
            lines.append(_Line(name, entry.options | size, path, has_value))
        return lines

    def values(self, device: torch.device) -> list[Tensor | None]:
        """The values of :meth:`lines`, combined."""
        return [entry.combined(device) for entry in self._entries.values()]

    def replay(self, lines: Sequence[_Line], values: Sequence[Any]) -> None:
        """Log every line once."""
        for line, value in zip(lines, values, strict=True):
            shown: Any = value
            if line.metric is not None:
                shown = self._module.get_submodule(line.metric)
                show_step(shown, value if line.has_value else None)
            self._module.log(line.name, shown, **line.options)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """A ``log`` on a stage whose word does not count."""


class LogSharing:
    """Brings what the last stage collected to the other stages of a pipeline.

    What is logged is the same step after step, so that only values travel: one tensor of fixed length, with a number in
    front that says whether the names have changed since; only then the names follow.

    Args:
        axis: the ranks of the pipeline.
        device: of the tensor that travels.
    """

    _ROOM = 63

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._axis, self._device = axis, device
        self._known: dict[str, tuple[list[_Line], int]] = {}

    def finish(self, step: str, capture: LogCapture, totals: Sequence[Tensor]) -> Sequence[Tensor]:
        """Log, on every stage, what the last one collected, and give every stage its totals.

        Args:
            step: name of the step method, whose names are remembered.
            capture: what this rank collected.
            totals: scalars of the batch (its loss), on the last stage.
        """
        if self._axis.size == 1:
            capture.replay(capture.lines(), capture.values(self._device))
            return totals
        speaks = self._axis.rank == self._axis.size - 1
        lines, first = (capture.lines(), len(totals)) if speaks else ([], 0)
        values = [*totals, *capture.values(self._device)] if speaks else []
        plain = [0.0 if v is None else v for v in values]
        changed = speaks and ((lines, first) != self._known.get(step) or len(plain) > self._ROOM)
        packed = torch.zeros(self._ROOM + 1, device=self._device)
        if speaks:
            row = [torch.as_tensor(v).to(self._device, torch.float32) for v in [float(changed), *plain[: self._ROOM]]]
            packed[: len(row)] = torch.stack(row)
        source = self._axis.ranks[-1]
        self._axis.call(Kind.BROADCAST, packed).run(dist.broadcast, packed, source, group=self._axis.group)
        rest: list[float] = []
        if bool(packed[0]):
            box = [(lines, first, [float(v) for v in plain[self._ROOM :]])]
            own = {"group": self._axis.group, "device": self._device}
            self._axis.call(Kind.BROADCAST_OBJECT).run(dist.broadcast_object_list, box, source, **own)
            lines, first, rest = box[0]
            self._known[step] = lines, first
        lines, first = self._known[step]
        numbers = [*packed[1 : 1 + min(first + len(lines), self._ROOM)].clone(), *rest]
        capture.replay(lines, numbers[first:])
        return numbers[:first]
