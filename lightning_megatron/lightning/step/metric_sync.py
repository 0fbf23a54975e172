"""torchmetrics objects over ranks that partly see the same samples.

Of the ranks of a job only those on the last pipeline stage run a step to its end, and of these, ranks that differ in tp
or cp have seen the same samples. So a metric is gathered over the data-parallel ranks of the last stage alone, and the
stages before it are told.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MaxMetric, Metric, MinMetric, SumMetric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_megatron.comm.objects import broadcast_object
from lightning_megatron.mesh import ParallelMesh


class MetricSharing:
    """What a metric asks when it is computed: whether there is something to gather, and what was gathered.

    Args:
        mesh: this rank's.
        device: where metrics are.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self._replicas, self._pipeline, self._device = mesh.dp, mesh.pp, device
        self._metrics: list[Metric] = []

    def install(self, module: nn.Module) -> None:
        """Let every metric in a module that does not already say with whom it shares, share as above."""
        self._metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
        for metric in self._metrics:
            if metric.process_group is None and metric.dist_sync_fn is None:
                metric.dist_sync_fn = self.gather
                metric.distributed_available_fn = self.is_needed
            if self._pipeline.size > 1:
                # A metric answers from its cache until it is updated, which happens on the last stage only: the others
                # would stay away from the gathering.
                metric.compute_with_cache = False

    def step_is_over(self) -> None:
        """On a stage that ran no whole step, let metrics look as if it had: else they warn that they are empty."""
        if self._pipeline.rank < self._pipeline.size - 1:
            for metric in self._metrics:
                metric._update_count += 1

    def is_needed(self) -> bool:
        """True if another rank has seen other samples, or has seen them when this one has not."""
        return self._replicas.size > 1 or self._pipeline.size > 1

    def gather(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """One state of a metric, of every replica that has its samples from a whole step."""
        parts = [state] if self._replicas.size == 1 else gather_all_tensors(state, self._replicas.group)
        if self._pipeline.size == 1:
            return parts
        return broadcast_object(parts, self._pipeline, self._pipeline.size - 1, self._device)


def last_value(metric: Metric) -> Tensor | None:
    """What ``metric(...)`` last returned, which Lightning shows as the value of a step; only scalars are shown."""
    value = metric._forward_cache
    return value.detach() if isinstance(value, Tensor) and value.numel() == 1 else None


def step_reduction(metric: Metric) -> str:
    """How the value of a batch comes of those of its micro-batches; for what is neither below, by their mean."""
    kinds = {SumMetric: "sum", MaxMetric: "max", MinMetric: "min"}
    return next((name for kind, name in kinds.items() if isinstance(metric, kind)), "mean")


def show_step(metric: Metric, value: Tensor | None) -> None:
    """Let a metric show a value for the step just run, which came of several micro-batches or on another stage."""
    metric._forward_cache = value  # type: ignore[assignment]  # torchmetrics declares None
