"""Throughput of training: tokens, samples and FLOPs a second, and their share of the device's peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_megatron.arguments import at_least, checked
from lightning_megatron.device import peak_flops, synchronize
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy


@runtime_checkable
class CountsFlops(Protocol):
    """A model configuration that knows its FLOPs; ``TransformerConfig`` is one."""

    def flops_per_token(self, seq_length: int) -> float:
        """FLOPs of forward and backward for one token."""
        ...


@runtime_checkable
class CountsBatchFlops(Protocol):
    """A module whose batches have more than one length, as those of an encoder and a decoder."""

    def batch_flops(self, batch: Any) -> float:
        """FLOPs of forward and backward for a batch."""
        ...


@dataclass
class WorkDone:
    """Samples, tokens and FLOPs of all data-parallel ranks together, and the time that they took."""

    seconds: float = 0.0
    samples: int = 0
    tokens: int = 0
    flops: float = 0.0

    def __iadd__(self, other: WorkDone) -> WorkDone:
        self.seconds += other.seconds
        self.samples += other.samples
        self.tokens += other.tokens
        self.flops += other.flops
        return self


class Throughput(Callback):
    """Logs the speed of training once per window of optimizer steps.

    Logged: ``tokens_per_second`` and ``samples_per_second`` of the whole job, ``tflops_per_device`` of the model (what
    recompute repeats is not counted) if the module has a ``config`` with ``flops_per_token``, ``mfu`` (its fraction of
    the vendor's bf16 peak) if the device's peak is known, ``step_time_ms`` (median of the window),
    ``step_time_ms_p95`` (95 of 100 steps take no longer) and ``step_time_ms_slowest``. Tokens a second, or samples
    where there are none, show in the progress bar as ``tok/s`` or ``sam/s``. ``StragglerMonitor`` measures which rank
    is slow.

    A step is timed from the end of the one before, so waiting for data counts. Validation and checkpoints do not: the
    next step is timed from the start of its batch. The host waits for the device before them and at a window's end.

    Args:
        window: optimizer steps of a window; ``None`` means ``Trainer(log_every_n_steps=...)``, as loggers use.

    Attributes:
        total: work since training began.
    """

    reads_parameters = False

    @checked(window=at_least(1))
    def __init__(self, window: int | None = None) -> None:
        self._every = window
        self._begin()

    def _begin(self) -> None:
        self.total = WorkDone()
        self._step = WorkDone()
        self._window: list[WorkDone] = []
        self._mark: float | None = None
        self._steps_seen = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the measurements."""
        self._begin()
        self._steps_seen = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock if it is stopped."""
        if self._mark is None:
            self._mark = perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add a batch; at the end of a window, log."""
        stepped = trainer.global_step != self._steps_seen
        every = self._every or getattr(trainer, "log_every_n_steps", 0) or 1
        closes = stepped and trainer.global_step % every == 0
        if closes:
            synchronize(trainer.strategy.root_device)
        self._step += work_of(batch, trainer, pl_module)
        self._add_time()
        if stepped:
            self._steps_seen = trainer.global_step
            self._window.append(self._step)
            self.total += self._step
            self._step = WorkDone()
        if closes:
            metrics = self._metrics(trainer)
            shown = "tokens_per_second" if "tokens_per_second" in metrics else "samples_per_second"
            pl_module.log(f"{shown[:3]}/s", metrics[shown], prog_bar=True, logger=False, on_step=True, on_epoch=False)
            pl_module.log_dict(metrics, on_step=True, on_epoch=False)
            self._window.clear()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._pause(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stop the clock."""
        self._pause(trainer)

    def _pause(self, trainer: Trainer) -> None:
        if self._mark is not None:
            synchronize(trainer.strategy.root_device)  # what is still running belongs to training
            self._add_time()
            self._mark = None

    def _add_time(self) -> None:
        now = perf_counter()
        self._step.seconds += now - (now if self._mark is None else self._mark)
        self._mark = now

    def _metrics(self, trainer: Trainer) -> dict[str, float]:
        work = WorkDone()
        for step in self._window:
            work += step
        times = [step.seconds for step in self._window]
        metrics = {
            "step_time_ms": 1e3 * median(times),
            "step_time_ms_p95": 1e3 * percentile(times, 0.95),
            "step_time_ms_slowest": 1e3 * max(times),
            "samples_per_second": work.samples / work.seconds,
        }
        if work.tokens:
            metrics["tokens_per_second"] = work.tokens / work.seconds
        if work.flops:
            achieved = work.flops / work.seconds / trainer.world_size
            metrics["tflops_per_device"] = achieved / 1e12
            peak = peak_flops(trainer.strategy.root_device)
            if peak is not None:
                metrics["mfu"] = achieved / peak
        return metrics


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed."""
    return sorted(values)[ceil(share * len(values)) - 1]


def work_of(batch: Any, trainer: Trainer, module: LightningModule) -> WorkDone:
    """Size of one batch over all data-parallel ranks, which have batches of the same shape."""
    strategy = trainer.strategy
    replicas = strategy.data_parallel_size if isinstance(strategy, MegatronStrategy) else trainer.world_size
    samples, length = _shape(batch)
    config = getattr(module, "config", None)
    tokens = samples * length * replicas
    if isinstance(module, CountsBatchFlops):
        flops = replicas * module.batch_flops(batch)
    else:
        flops = tokens * config.flops_per_token(length) if length and isinstance(config, CountsFlops) else 0.0
    return WorkDone(samples=samples * replicas, tokens=tokens, flops=flops)


def _shape(batch: Any) -> tuple[int, int]:
    """Samples of a batch, and tokens of a sample (0 where the batch holds something else)."""
    if isinstance(batch, Mapping):
        batch = batch.get("tokens", next(iter(batch.values()), None))
    elif isinstance(batch, list | tuple) and batch:
        batch = batch[0]
    if not isinstance(batch, Tensor) or batch.dim() == 0:
        return 0, 0
    return batch.shape[0], batch.shape[1] if batch.dim() == 2 and not batch.is_floating_point() else 0
