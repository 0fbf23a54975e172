"""Callback that names the rank which makes all others wait, and what it is slow at."""

from __future__ import annotations

import socket
from dataclasses import astuple
from statistics import median
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_megatron.arguments import above, at_least, checked
from lightning_megatron.comm.collectives import Pending, start_all_gather
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.lightning.monitoring.slow_ranks import SlowRanks, StepTimes, Straggler, excess
from lightning_megatron.lightning.monitoring.step_clock import FetchClock, StepClock, step_clock
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.mesh import ParallelMesh, coordinate, dense_grid


class StragglerMonitor(Callback):
    """Warns of a rank whose computing, or waiting for data, makes every step of the job longer.

    In a parallel job all ranks' steps take equally long, since they wait for each other; the slow rank is the one that
    does not wait. So each rank measures its computing time, without waits in collectives and messages, and its waits
    for data. Every few steps four numbers of each rank are gathered on the host, during the next step. On an
    accelerator the times come from events in its stream, and the host waits for them once per window.

    A rank is compared with those that do the same work: the other ranks of its pipeline stage. A stage of one rank is
    compared with its own past, so a rank that was slow from the start is not found there.

    A warning names rank, host and device, what is slow, by how much, and what it costs; another line says when it is
    over. A slow rank is named after at most ``every * windows + every`` steps. Loggers get, at their own interval,
    ``straggler/compute_excess`` and ``straggler/data_excess``, the fraction of a step by which the slowest rank exceeds
    the median of the others, ``straggler/waiting``, the fraction of a step that the median rank waits for others, and
    ``straggler/slowest_rank``, the number of the rank that computed longest.

    Args:
        every: number of steps of a window, after which numbers are gathered.
        windows: number of consecutive windows in which a rank must be slow in every step.
        share: fraction of the step time by which a rank must make steps longer to be slow, such as 0.2. Twice the
            standard deviation of earlier windows is added, for machines on which times vary.

    Attributes:
        found: every straggler so far, the same on all ranks.
        slowest: name of the rank that computed longest in the last window, straggler or not, the same on all ranks.

    Raises:
        ConfigError: with another strategy than ``MegatronStrategy``.
    """

    reads_parameters = False

    @checked(every=at_least(1), windows=at_least(1), share=above(0.0, 0.2))
    def __init__(self, every: int = 5, windows: int = 3, share: float = 0.2) -> None:
        self._every, self._windows, self._share = every, windows, share
        self.found: list[Straggler] = []
        self.slowest = ""
        self._clock: StepClock | None = None
        self._profiler: FetchClock | None = None
        self._slow: SlowRanks | None = None
        self._names: list[str] = []
        self._under_way: Pending | None = None
        self._seen = self._batches = self._logged = 0
        self._ended: float | None = None
        self._counts: list[int] = []  # batches of each step of the window
        self._data: list[float] = []
        self._steps: list[float] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse other strategies."""
        if not isinstance(trainer.strategy, MegatronStrategy):
            reason = "compares ranks of MegatronStrategy: use that strategy, or leave it out"
            raise ConfigError([Problem("callbacks", type(self).__name__, reason)])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring, unless the job has one rank."""
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        mesh = strategy.mesh
        if not mesh.is_distributed:
            return
        self._names = all_gather_object(mesh, _name_of(mesh, strategy.root_device))
        self._slow = SlowRanks(_peers(mesh), self._share, self._windows)
        self._clock = step_clock(strategy.root_device)
        self._profiler = FetchClock(trainer.profiler)  # type: ignore[attr-defined]  # set outside of the class
        self._under_way, self._ended, self._seen, self._batches = None, None, trainer.global_step, 0
        self._counts, self._data, self._steps = [], [], []
        mesh.recorder.main.clock = self._clock
        trainer.profiler = self._profiler  # type: ignore[attr-defined]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop measuring."""
        self._stop(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop measuring."""
        self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        if self._profiler is not None:
            trainer.profiler = self._profiler.inner  # type: ignore[attr-defined]
        if self._clock is not None and isinstance(trainer.strategy, MegatronStrategy):
            trainer.strategy.mesh.recorder.main.clock = None
        if self._under_way is not None and not trainer.interrupted:
            self._under_way.wait()
        self._clock = self._profiler = self._under_way = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start timing a batch; after a full window, start to gather its numbers during this batch."""
        if self._clock is None or self._profiler is None:
            return
        if len(self._counts) >= self._every:
            assert isinstance(trainer.strategy, MegatronStrategy)
            own = torch.tensor([astuple(self._window())], dtype=torch.float64)
            self._under_way = start_all_gather(own, trainer.strategy.mesh.host)
        if not self._batches:
            self._data.append(0.0)
        self._data[-1] += self._profiler.take()
        self._clock.begin_batch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop timing a batch; evaluate a window that was gathered during it."""
        if self._clock is None:
            return
        self._clock.end_batch()
        self._batches += 1
        if trainer.global_step != self._seen:
            self._seen = trainer.global_step
            self._counts.append(self._batches)
            now = perf_counter()
            if self._ended is not None:
                self._steps.append(now - self._ended)
            self._batches, self._ended = 0, now
        if self._under_way is not None:
            pending, self._under_way = self._under_way, None
            self._look(trainer, pending.wait())

    def _window(self) -> StepTimes:
        """This rank's times in the window's steps, each over all of its batches."""
        assert self._clock is not None
        times = iter(self._clock.read())
        steps = [[next(times) for _ in range(count)] for count in self._counts]
        compute = [sum(batch.compute for batch in step) for step in steps]
        waiting = [sum(batch.waiting for batch in step) for step in steps]
        window = StepTimes.of(compute, self._data, waiting, median(self._steps or [0.0]))
        self._counts, self._data, self._steps = [], [], []
        return window

    def _look(self, trainer: Trainer, numbers: Tensor) -> None:
        assert self._slow is not None
        windows = [StepTimes(*row) for row in numbers.tolist()]
        self.slowest = self._names[_slowest(windows)]
        found, over = self._slow.look(windows)
        self.found += found
        for straggler in found:
            rank_zero_warn(f"step {trainer.global_step}: {self._sentence(straggler)}")
        for rank, kind in over:
            rank_zero_info(f"step {trainer.global_step}: {self._names[rank]} is not slow any more ({kind})")
        step = median(window.step for window in windows)
        if step and trainer.global_step // self._log_every(trainer) != self._logged:
            self._logged = trainer.global_step // self._log_every(trainer)
            metrics = _metrics(windows, step)
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    @staticmethod
    def _log_every(trainer: Trainer) -> int:
        return int(getattr(trainer, "log_every_n_steps", 0)) or 1

    def _sentence(self, found: Straggler) -> str:
        took, usual = f"at least {1e3 * found.seconds:.1f} ms", f"{1e3 * found.usual:.1f} ms"
        span = f"the last {self._every * self._windows} steps"
        cost = f"every step takes about {found.share:.0%} longer than it could"
        if found.kind == "data":
            return f"{self._names[found.rank]} waits for its data: {took} a step in {span}, others {usual}; {cost}"
        than = "before" if found.against_past else "others of its pipeline stage"
        factor = f"{found.factor:.2f} times"
        return f"{self._names[found.rank]} computes slowly: {took} a step in {span}, {than} {usual} ({factor}); {cost}"


def _metrics(windows: list[StepTimes], step: float) -> dict[str, float]:
    return {
        "straggler/compute_excess": excess([window.compute for window in windows]) / step,
        "straggler/data_excess": excess([window.data for window in windows]) / step,
        "straggler/waiting": median(window.waiting for window in windows) / step,
        "straggler/slowest_rank": float(_slowest(windows)),
    }


def _slowest(windows: list[StepTimes]) -> int:
    return max(range(len(windows)), key=lambda rank: windows[rank].compute)


def _name_of(mesh: ParallelMesh, device: torch.device) -> str:
    axes = (mesh.tp, mesh.cp, mesh.dp, mesh.pp)
    place = "".join(f", {axis.name} {axis.rank}" for axis in axes if axis.size > 1)
    return f"rank {mesh.rank} ({socket.gethostname()}, {device}{place})"


def _peers(mesh: ParallelMesh) -> list[list[int]]:
    """For each rank, the others of its pipeline stage."""
    grid = dense_grid(mesh.layout)
    stages = [coordinate(grid, rank)["pp"] for rank in range(mesh.world.size)]
    return [[o for o, stage in enumerate(stages) if stage == own and o != r] for r, own in enumerate(stages)]
