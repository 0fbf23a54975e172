"""The world of a rehearsal: fake tensors, process groups that send nothing, and values where they are known."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.layers.init import weights_follow
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.recorder.recorder import Recorder
from lightning_megatron.tools.rehearsal.context import PlaceLog, RunningPlace, axes_by_number
from lightning_megatron.tools.rehearsal.errors import RehearsalError
from lightning_megatron.tools.rehearsal.known_calls import KnownCalls
from lightning_megatron.tools.rehearsal.routing import choices_on
from lightning_megatron.tools.rehearsal.torch_private import (
    FAKE_BACKEND,
    FakeStore,
    FakeTensorMode,
    without_fake_tensors,
)
from lightning_megatron.tools.rehearsal.tracker import StorageTracker
from lightning_megatron.tools.rehearsal.values import GroupPlace, KnownValues

TOPK = torch.ops.aten.topk.default
_SORT = torch.ops.aten.sort.stable


class RoutedValues(KnownValues):
    """Known values, and the experts that a router chooses.

    Args:
        place: place of the program.
        imbalance: choices of this rank's experts over the mean of all ranks.

    Attributes:
        mesh: mesh of the rank, once it is made.
    """

    def __init__(self, place: RunningPlace, log: PlaceLog, imbalance: float) -> None:
        super().__init__(self._in_group)
        self._running, self._log, self._imbalance = place, log, imbalance
        self.mesh: ParallelMesh | None = None

    def _in_group(self) -> GroupPlace | None:
        axis = None if self.mesh is None else axes_by_number(self.mesh).get(self._log.group)
        return None if axis is None else GroupPlace(axis.rank, axis.size, self._log.collective is Kind.ALL_GATHER)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Compute the values of an operator's results; those of a router's choice are made up."""
        if not self._running.routed_experts or self.mesh is None:
            super().follow(func, args, kwargs, out)
        elif func is TOPK and self._running.is_choosing(args[0]):
            with torch.no_grad(), without_fake_tensors():
                self._write(out[1], choices_on(self.mesh.ep, out[1].shape, args[0].shape[-1], self._imbalance))
        elif func is _SORT and args[0].ndim == 1 and self.of(args[0]) is None:
            # An expert's tokens sorted by weight: the order does not change how many are within its capacity.
            with without_fake_tensors():
                self._write(out[1], torch.arange(args[0].numel()))
        else:
            super().follow(func, args, kwargs, out)


class FakeWorld:
    """One rank of a job without the others and without memory.

    Args:
        rank: global rank.
        world_size: number of ranks.
        imbalance: choices of this rank's experts over the mean of all ranks.
        calls: cache of calls that have run; ``None`` for a new one.

    Attributes:
        recorder: recorder of the rank.
        log: its log.
        place: place of the program.
        values: known values.
        tracker: bytes of all tensors.
    """

    def __init__(self, rank: int, world_size: int, imbalance: float = 1.0, calls: KnownCalls | None = None) -> None:
        self.rank, self.world_size, self._calls = rank, world_size, KnownCalls() if calls is None else calls
        self.recorder = Recorder()
        self.log = self.recorder.main = PlaceLog(self.recorder)
        self.place = RunningPlace(self.log)
        self.values = RoutedValues(self.place, self.log, imbalance)
        self.tracker = StorageTracker(self.place, self.values)
        self.log.ends_forward = self._end_forward

    def join(self, mesh: ParallelMesh) -> None:
        """Use the groups of a rank's mesh, once it is made."""
        self.values.mesh = mesh

    def _end_forward(self) -> None:
        self.tracker.end_forward()
        self.place.leave_all()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context in which tensors are fake and process groups send nothing.

        Raises:
            RehearsalError: if there is a process group already.
        """
        if dist.is_initialized():
            raise RehearsalError("torch.distributed is initialized in this process: rehearse in another process")
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            if self.world_size > 1:
                dist.init_process_group(FAKE_BACKEND, store=FakeStore(), rank=self.rank, world_size=self.world_size)
                stack.callback(dist.destroy_process_group)
            stack.callback(self.place.close)
            stack.enter_context(weights_follow())
            stack.enter_context(FakeTensorMode())
            stack.enter_context(self.tracker)
            stack.enter_context(self._calls.of(self.tracker, self.values))
            yield

    def batch(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fake tensors whose values are known.

        Args:
            values: real tensors by name.
        """
        found = {}
        for name, value in values.items():
            found[name] = torch.empty(value.shape, dtype=value.dtype)
            with self.tracker.paused():  # the values themselves are no part of the run
                self.values.know(found[name], value)
            self.tracker.name("batch", [found[name]])
        return found
