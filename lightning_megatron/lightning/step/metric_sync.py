"""Synchronization of torchmetrics objects, where some ranks see the same samples.

Only ranks of the last pipeline stage run a step to its end, and those that differ only in tp or cp see the same
samples. So a metric is gathered over the data-parallel ranks of the last stage, and then broadcast to the other stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import MaxMetric, Metric, MinMetric, SumMetric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_megatron.comm.objects import broadcast_object
from lightning_megatron.lightning.compat._private import mark_updated, shown_value
from lightning_megatron.mesh import ParallelMesh


class MetricSync:
    """``distributed_available_fn`` and ``dist_sync_fn`` of torchmetrics objects."""

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self._replicas, self._pipeline, self._device = mesh.dp, mesh.pp, device
        self._metrics: list[Metric] = []

    def install(self, module: LightningModule) -> None:
        """Synchronize every metric of a module and of callbacks, also those in their dictionaries and lists.

        Metrics with a process group or a gather function of their own are left alone.
        """
        callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        self._metrics = list(_metrics_in([module, *callbacks], set()))
        for metric in self._metrics:
            is_ours = isinstance(getattr(metric.dist_sync_fn, "__self__", None), MetricSync)  # an earlier Trainer's
            if metric.process_group is None and (metric.dist_sync_fn is None or is_ours):
                metric.dist_sync_fn = self.gather
                metric.distributed_available_fn = self.is_needed
            if self._pipeline.size > 1:
                # A metric is updated on the last stage only. The other stages would return a cached value, and not
                # join the gathering.
                metric.compute_with_cache = False

    def step_is_over(self) -> None:
        """Mark metrics as updated on stages before the last, where ``compute`` would warn that they never were."""
        if self._pipeline.rank < self._pipeline.size - 1:
            for metric in self._metrics:
                mark_updated(metric)

    def is_needed(self) -> bool:
        """True with several replicas, or with several stages, of which only the last updates metrics."""
        return self._replicas.size > 1 or self._pipeline.size > 1

    def gather(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Gather one state of a metric from the replicas of the last stage."""
        parts = [state] if self._replicas.size == 1 else gather_all_tensors(state, self._replicas.group)
        if self._pipeline.size == 1:
            return parts
        return broadcast_object(parts, self._pipeline, self._pipeline.size - 1, self._device)


class MetricWatch(Callback):
    """Finds metrics that hooks and steps have made since the start of the run, before an epoch and at its end."""

    reads_parameters = False

    def __init__(self, sync: MetricSync) -> None:
        self._sync = sync

    def __deepcopy__(self, memo: dict[int, Any]) -> MetricWatch:
        return MetricWatch(self._sync)  # copies share the process groups

    def _look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sync.install(pl_module)

    on_train_epoch_start = on_validation_epoch_start = on_test_epoch_start = _look
    on_train_epoch_end = on_validation_epoch_end = on_test_epoch_end = _look


def _metrics_in(value: Any, seen: set[int]) -> Iterator[Metric]:
    """Metrics in modules, callbacks and plain containers, each once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Metric):
        yield value
    if isinstance(value, nn.Module | Callback):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _metrics_in(item, seen)


def last_value(metric: Metric) -> Tensor | None:
    """The step value that Lightning logs for a metric: the scalar that ``metric(...)`` returned, or ``None``."""
    value = shown_value(metric)
    return value.detach() if isinstance(value, Tensor) and value.numel() == 1 else None


def step_reduction(metric: Metric) -> str:
    """Reduction of a metric's micro-batch values: sum, max, min, else weighted mean."""
    kinds = {SumMetric: "sum", MaxMetric: "max", MinMetric: "min"}
    return next((name for kind, name in kinds.items() if isinstance(metric, kind)), "mean")
