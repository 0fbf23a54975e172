"""Logs of a step, which runs once per micro-batch, and to its end on the last pipeline stage only.

Lightning expects one ``self.log`` of a name per batch, on every rank. While micro-batches run, calls are collected;
afterwards the last stage tells the others what it collected, and each name is logged once, with the value that the
whole batch would have given. So callbacks and loggers that depend on a metric make the same decision on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.comm.collectives import Pending, broadcast_in_place
from lightning_megatron.comm.objects import broadcast_pickled
from lightning_megatron.comm.p2p import receive, start_send
from lightning_megatron.device import CPU, copy_to_device
from lightning_megatron.lightning.compat._private import set_shown_value
from lightning_megatron.lightning.step.metric_sync import last_value, step_reduction
from lightning_megatron.mesh import ParallelMesh


@dataclass
class _Entry:
    """Everything logged under one name: values, how to log them, and their weights: micro-batches' or given."""

    options: dict[str, Any]
    metric: Metric | None
    values: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)

    def combined(self, device: torch.device) -> Tensor | None:
        """Value of the whole batch; ``None`` if a torchmetrics object has no value for the step."""
        if any(value is None for value in self.values):
            return None
        stacked = torch.stack([_scalar(value, device) for value in self.values])
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
        are_given = len(self.batch_sizes) == len(self.values) and sum(self.batch_sizes) > 0
        shares = torch.tensor(self.batch_sizes if are_given else self.weights, dtype=torch.float32)
        weights = copy_to_device(shares, device)
        return (stacked * weights).sum() / weights.sum()


@dataclass(frozen=True)
class _Line:
    """A name to log, without its value; rarely changes from one step to the next.

    Attributes:
        name: name in the log.
        options: keyword arguments of ``log``.
        metric: path in the module of the torchmetrics object to log; ``None`` for a plain value.
        has_value: False for a metric that was only updated, and so has no value for the step.
    """

    name: str
    options: dict[str, Any]
    metric: str | None
    has_value: bool


class LogCapture:
    """Collects the calls of ``log``, and so of ``log_dict``, of a module during one step, to replay them once."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._entries: dict[str, _Entry] = {}
        self._weight = 1.0

    @contextmanager
    def micro_batch(self, weight: float, *, keep: bool = True) -> Iterator[None]:
        """Collect ``log`` calls inside the context, for a micro-batch that is ``weight`` of the batch; or drop them.

        An instance attribute shadows the method ``log`` inside the ``with``; the class is not changed.
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
        if isinstance(value, Tensor):
            value = value.detach()  # the graph would keep the stage's input, and the gradient of it, for the whole step
        entry.values.append(value if metric is None else last_value(metric))
        entry.weights.append(self._weight)
        entry.batch_sizes += [] if size is None else [size]

    def lines(self) -> list[_Line]:
        """Collected names, without values."""
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
            size = {"batch_size": sum(entry.batch_sizes)} if entry.batch_sizes else {}
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
                set_shown_value(shown, value if line.has_value else None)
            self._module.log(line.name, shown, **line.options)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Drop a ``log`` call, on a stage that is not the last."""


@dataclass(frozen=True)
class _Header:
    """Names and options that a step logs, without the values; rarely changes from one step to the next.

    Attributes:
        lines: names that the step logs.
        num_totals: number of totals, which come before the values of the lines.
    """

    lines: list[_Line]
    num_totals: int


_UNTOLD = _Header([], 1)
"""Header that every stage assumes until it receives another one: a loss, and no logs."""


class LogSync:
    """Sends what the last stage collected to the other stages of a pipeline.

    The last stage's host tells the others whether the header has changed since the last step of this name; then the
    header follows. The totals and values are one tensor, which is broadcast between devices: no host waits for it.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self._mesh, self._axis, self._device = mesh, mesh.pp, device
        self._headers: dict[str, _Header] = {}
        self._told: list[Pending] = []

    def finish(self, step: str, capture: LogCapture, totals: Sequence[Tensor]) -> Sequence[Tensor]:
        """Log, on every stage, what the last one collected, and give every stage its totals.

        Args:
            step: name of the step method; the header of each step is remembered.
            capture: logs that this rank collected.
            totals: scalars of the batch (its loss), on the last stage.
        """
        if self._axis.size == 1:
            capture.replay(capture.lines(), capture.values(self._device))
            return totals
        is_last, header = self._axis.rank == self._axis.size - 1, self._headers.get(step, _UNTOLD)
        own = _Header(capture.lines(), len(totals)) if is_last else None
        if self._has_changed(is_last and own != header):
            header = self._headers[step] = broadcast_pickled(own, self._axis, self._axis.ranks[-1], self._device)
        numbers = torch.zeros(header.num_totals + len(header.lines), device=self._device)
        if is_last and len(numbers):
            known = [*totals, *capture.values(self._device)]
            numbers = torch.stack([_scalar(0.0 if value is None else value, self._device) for value in known])
        received = broadcast_in_place(numbers, self._axis, -1).unbind() if len(numbers) else ()
        capture.replay(header.lines, received[header.num_totals :])
        return received[: header.num_totals]

    def _has_changed(self, changed: bool) -> bool:
        """The last stage's ``changed``, on all stages."""
        hosts, (*others, last) = self._mesh.host, self._axis.ranks
        if hosts.size == 1:
            return changed
        flag = torch.tensor([changed], dtype=torch.uint8)
        if self._mesh.rank != last:
            receive(flag, hosts, last)
            return bool(flag)
        for told in self._told:
            told.wait()  # in the step before; a send may wait for its receiver
        self._told = [start_send(flag, hosts, rank) for rank in others]
        return changed


def _scalar(value: Any, device: torch.device) -> Tensor:
    """A number or a tensor of one, in fp32 on a device; the host does not wait for the device."""
    x = value.reshape(()) if isinstance(value, Tensor) else torch.tensor(float(value))
    return (copy_to_device(x, device) if x.device.type == CPU.type else x).to(device, torch.float32)
