"""Telemetry of a run's first steps on a Gaudi: graphs, fallbacks, memory, communicators and cards."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron import device as devices
from lightning_megatron.arguments import at_least, checked
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.lightning.compat._private import CompilerCounts, compiler_counts
from lightning_megatron.lightning.monitoring.first_steps import FirstSteps, summary
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.mesh import ParallelMesh

MEMORY_STEPS = (1, 2, 10)
WINDOW = 10
"""Steps whose time is measured together."""


class GaudiTelemetry(Callback):
    """Numbers of the first steps on a Gaudi that reveal problems, for loggers and in one line that rank 0 prints.

    The line, at the end of the observed steps or of training, covers all ranks: graphs that the device's software
    compiled, and the last step with a compilation; ops that fell back to the host, by name; graphs and graph breaks of
    ``torch.compile``; memory in use and at its peak after steps 1, 2 and 10; seconds of the first collective of each
    group; card numbers; and the time of a step, with a note if it is still falling.

    Loggers get rank 0's numbers under ``telemetry/``: compilations, their seconds, fallbacks, graphs and breaks of each
    step in which there were any, memory, and ``step_time_ms``, a mean over 10 steps without validation and checkpoints.
    The host waits for the device after steps 1, 2 and every tenth step.

    On other devices than Gaudi, compilations and fallbacks are not counted; the rest is the same.

    Args:
        steps: number of optimizer steps to observe, from the start of this run.

    Attributes:
        ranks: numbers of every rank, once the line has been printed.
    """

    reads_parameters = False

    @checked(steps=at_least(1))
    def __init__(self, steps: int = 50) -> None:
        self._steps = steps
        self.ranks: list[FirstSteps] = []
        self._own: FirstSteps | None = None
        self._counted = devices.SoftwareCounters()
        self._traced = CompilerCounts()
        self._start = self._seen = self._timed = 0
        self._seconds = 0.0
        self._mark: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the counts."""
        device = trainer.strategy.root_device
        counted = devices.software_counters(device)
        if counted is None:
            note = f"{type(self).__name__}: the software of {device.type} counts no compiled graphs and no fallbacks"
            rank_zero_info(f"{note}; memory, groups and step times are reported")
        self.ranks, self._own = [], FirstSteps(card=devices.card_number(device), counts=counted is not None)
        self._own.first_collectives = dict(_mesh(trainer).connect_seconds)
        self._counted, self._traced = counted or self._counted, _traced(trainer)
        self._start = self._seen = trainer.global_step
        self._timed, self._seconds, self._mark = 0, 0.0, None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock if it is stopped."""
        if self._own is not None and self._mark is None:
            self._mark = perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step, read the counters; at the end of the observed steps, report."""
        if self._own is None or trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        step = self._seen - self._start
        metrics = self._counts(trainer, step) | self._measures(trainer, step)
        if metrics:
            named = {f"telemetry/{name}": value for name, value in metrics.items()}
            for logger in trainer.loggers:
                logger.log_metrics(named, step=trainer.global_step)
        if step >= self._steps:
            self._report(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._pause(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stop the clock."""
        self._pause(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a run that is shorter than the steps to observe."""
        if self._own is not None and self._own.steps:
            self._report(trainer)

    def _counts(self, trainer: Trainer, step: int) -> dict[str, float]:
        """Add the counts of a step, and return those above 0 for the loggers."""
        assert self._own is not None
        self._own.steps = step
        found: dict[str, float] = {}
        counted = devices.software_counters(trainer.strategy.root_device)
        if counted is not None:
            new, self._counted = counted - self._counted, counted
            self._own.add_counters(new, step)
            if new.compilations:
                found |= {"graph_compilations": new.compilations, "compile_seconds": new.compile_seconds}
            if new.fallbacks:
                found["cpu_fallbacks"] = sum(new.fallbacks.values())
        traced = _traced(trainer)
        more, self._traced = traced.since(self._traced), traced
        breaks = sum(more.breaks.values())
        self._own.graphs += more.graphs
        self._own.graph_breaks += breaks
        if more.graphs or breaks:
            found |= {"graphs": more.graphs, "graph_breaks": breaks}
        return found

    def _measures(self, trainer: Trainer, step: int) -> dict[str, float]:
        """Measure memory and time in the steps for which they are reported."""
        assert self._own is not None
        self._timed += 1
        device, found = trainer.strategy.root_device, dict[str, float]()
        if step in MEMORY_STEPS:
            devices.synchronize(device)
            memory = devices.memory_in_use_bytes(device), devices.peak_memory_bytes(device)
            self._own.memory[step] = memory
            found |= dict(zip(("memory_in_use_bytes", "memory_peak_bytes"), map(float, memory), strict=True))
        if step % WINDOW == 0:
            devices.synchronize(device)
            self._add_time()
            mean = self._seconds / self._timed
            self._own.step_seconds.append(mean)
            found["step_time_ms"] = 1e3 * mean
            self._timed, self._seconds = 0, 0.0
        self._add_time()
        return found

    def _pause(self, trainer: Trainer) -> None:
        if self._own is not None and self._mark is not None:
            devices.synchronize(trainer.strategy.root_device)  # what is still running belongs to training
            self._add_time()
            self._mark = None

    def _add_time(self) -> None:
        now = perf_counter()
        self._seconds += now - (now if self._mark is None else self._mark)
        self._mark = now

    def _report(self, trainer: Trainer) -> None:
        """Gather the numbers of all ranks, and print the line; nothing is observed after it."""
        own, self._own = self._own, None
        assert own is not None
        self.ranks = all_gather_object(_mesh(trainer), own)
        rank_zero_info(f"{type(self).__name__}: {summary(self.ranks, WINDOW)}")


def _mesh(trainer: Trainer) -> ParallelMesh:
    """Mesh of ``MegatronStrategy``; with another strategy, a mesh of this rank alone."""
    strategy = trainer.strategy
    return strategy.mesh if isinstance(strategy, MegatronStrategy) else ParallelMesh.single(strategy.root_device)


def _traced(trainer: Trainer) -> CompilerCounts:
    """Counts of ``torch.compile``; the compiler is not imported where nothing is compiled."""
    strategy = trainer.strategy
    compiles = isinstance(strategy, MegatronStrategy) and strategy.compile_backend is not None
    return compiler_counts() if compiles else CompilerCounts()
