"""Callback that skips optimizer steps with a spike in loss or gradient norm, on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_megatron.arguments import above, at_least, checked
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.select.newest import locate
from lightning_megatron.checkpoint.select.verify import size_faults
from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.data.loading.resumable_loader import ResumableDataLoader
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.lightning.callbacks.recent import Recent
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy

LOSS_FLOOR, NORM_FLOOR = 0.02, 0.2
"""Lower bounds of the deviation, as fractions of the median; gradient norms of healthy steps have a long tail."""

MANY = 16
"""Largest number of samples that a message names one by one."""

KEPT = 32
"""Number of the newest checkpoints that the saved state lists."""

NOTHING_YET: Mapping[str, Any] = {"losses": (), "norms": (), "row": 0, "skipped": (), "returns": (), "checkpoints": {}}
"""State at the beginning of a run."""


class SpikeError(RuntimeError):
    """Training does not recover: too many spikes in a row, or too many returns to a checkpoint."""


@dataclass(frozen=True)
class SkippedStep:
    """A step that was not taken.

    Attributes:
        step: ``trainer.global_step`` before the step.
        epoch: epoch of the step.
        batches: first and last ``batch_idx``.
        places: first and last position of its samples in the epoch's order, over all ranks; ``None`` if the loader is
            not a ``ResumableDataLoader``, which ``MegatronDataModule`` makes.
        samples: indices of the samples in the data set, over all ranks; ``None`` if ``places`` is.
        loss: mean loss over all replicas.
        grad_norm: gradient norm before clipping.
        reason: sentence for the log.
    """

    step: int
    epoch: int
    batches: tuple[int, int]
    places: tuple[int, int] | None
    samples: list[int] | None
    loss: float
    grad_norm: float
    reason: str


@dataclass(frozen=True)
class Return:
    """A return to a checkpoint.

    Attributes:
        step: ``trainer.global_step`` before the return.
        to: ``trainer.global_step`` at which the restored checkpoint was saved.
        path: path of the checkpoint.
    """

    step: int
    to: int
    path: str


class SpikeGuard(Callback):
    """Skips steps whose loss or gradient norm is not finite, or far above its recent values.

    All ranks judge a step together once its gradients are complete: by the mean loss over all replicas and accumulated
    batches, and by the gradient norm before clipping. A skipped step changes no parameter, no optimizer state and no
    loss scale. Lightning still counts it, and learning-rate schedules advance, as after an overflow in half precision.
    (Overflows are no spikes; the loss scale handles them.) A warning names the step, the reason and the samples;
    loggers get ``skipped_steps`` and ``returns``.

    After ``in_a_row`` spikes the weights themselves are suspect. Then parameters and optimizer state are restored from
    the run's newest good checkpoint that is at least ``margin`` steps older than the first spike, and training
    continues with the next samples. Those between the checkpoint and the last spike are not read again: from the same
    state they would lead to the same weights. Step numbers, schedules and logged curves continue without a jump.

    Decisions are deterministic, also in a resumed run: every checkpoint holds the values that they depend on.

    Args:
        window: number of recent steps, skipped ones not counted, to compare with; 128 as in OLMo-core.
        threshold: number of robust standard deviations above the median beyond which a value is a spike; 6 as in
            OLMo-core, which uses plain ones. One is 1.4826 x the median absolute deviation, and at least 2 % of the
            median of losses or 20 % of that of norms: with 6, a norm up to 2.2 times the median is never a spike.
        warmup: number of steps, skipped ones not counted, before finite values are judged; ``None`` for half a window.
            Values that are not finite are judged from the first step on.
        in_a_row: number of consecutive spikes after which a checkpoint is restored; ``None`` for never.
        margin: least number of steps between the restored checkpoint and the first spike. PaLM went back by about 100.
        stop_after: number of consecutive spikes after which the run ends. PaLM skipped 200 to 500 batches.
        max_returns: number of returns to a checkpoint that are allowed; the next one ends the run.

    Attributes:
        skipped: every step that was skipped.
        returns: every return to a checkpoint.

    Raises:
        ConfigError: with another strategy than ``MegatronStrategy``, under manual optimization, and with a callback
            that averages weights, unless ``in_a_row=None``: the averages cannot go back.
        SpikeError: when the run ends.
    """

    reads_parameters = False

    @checked(
        window=at_least(4),
        threshold=above(0.0, 6.0),
        warmup=at_least(2),
        in_a_row=at_least(1),
        margin=at_least(1),
        stop_after=at_least(1),
        max_returns=at_least(0),
    )
    def __init__(
        self,
        window: int = 128,
        threshold: float = 6.0,
        warmup: int | None = None,
        in_a_row: int | None = 5,
        margin: int = 20,
        stop_after: int = 200,
        max_returns: int = 10,
    ) -> None:
        self._threshold, self._in_a_row, self._margin = threshold, in_a_row, margin
        self._warmup = max(2, window // 2) if warmup is None else warmup
        self._stop_after, self._max_returns = stop_after, max_returns
        self._losses, self._norms = Recent(window, LOSS_FLOOR), Recent(window, NORM_FLOOR)
        self._row: int
        self._checkpoints: dict[str, int]
        self.skipped: list[SkippedStep]
        self.returns: list[Return]
        self.load_state_dict(NOTHING_YET)
        self._trainer: Trainer | None = None
        self._loss: Tensor | None = None
        self._begin: tuple[int, int] | None = None  # index of the step's first batch, position of its first sample

    def job_problems(self, callbacks: Sequence[Callback], modules: Sequence[LightningModule]) -> list[Problem]:
        """Callbacks and modules that cannot be combined with this callback."""
        name, found = type(self).__name__, []
        if any(not module.automatic_optimization for module in modules):
            reason = f"{name} skips steps of automatic optimization; under manual optimization they are yours to skip"
            found.append(Problem("callbacks", name, reason))
        averaging = ("WeightAveraging", "StochasticWeightAveraging")
        for callback in callbacks if self._in_a_row is not None else ():
            if any(base.__name__ in averaging for base in type(callback).__mro__):
                reason = f"weights that {type(callback).__name__} has averaged cannot go back: use in_a_row=None"
                found.append(Problem("callbacks", name, reason))
        return found

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register this callback as the gate of optimizer steps."""
        strategy = trainer.strategy
        if not isinstance(strategy, MegatronStrategy):
            reason = "skips steps of MegatronStrategy: use that strategy, or Lightning's SpikeDetection"
            raise ConfigError([Problem("callbacks", type(self).__name__, reason)])
        if stage == "fit":
            if not trainer.global_step:  # a new run, or a resumed one, which loads its state later
                self.load_state_dict(NOTHING_YET)
            self._trainer, self._loss, self._begin = trainer, None, None
            strategy.precision_plugin.step_gate = self

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Unregister this callback as the gate of optimizer steps."""
        self._trainer = self._loss = None
        if isinstance(trainer.strategy, MegatronStrategy) and trainer.strategy.precision_plugin.step_gate is self:
            trainer.strategy.precision_plugin.step_gate = None

    # Judging a step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the first batch of a step, and the position of its first sample."""
        if batch_idx % trainer.accumulate_grad_batches == 0 or self._begin is None:
            loader = trainer.train_dataloader
            place = loader.position.last_batch.start if isinstance(loader, ResumableDataLoader) else 0
            self._begin, self._loss = (batch_idx, place), None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Add up the losses of a step; each is divided by the number of accumulated batches."""
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def admits(self, overflow: bool) -> bool:
        """True if the step may be taken; see :class:`~lightning_megatron.lightning.step.step_gate.StepGate`.

        Raises:
            SpikeError: on all ranks, if the run must end.
        """
        loss, norm = self._numbers()
        if overflow and math.isfinite(loss):
            return True
        reason = self._fault("loss", loss, self._losses) or self._fault("gradient norm", norm, self._norms)
        if reason is None:
            self._losses.add(loss)
            self._norms.add(norm)
            self._row = 0
            return True
        self._skip(loss, norm, reason)
        return False

    def _numbers(self) -> tuple[float, float]:
        """Loss and gradient norm, equal on all ranks; one synchronization of host and device."""
        strategy = self._strategy
        norm = strategy.grad_norm()
        loss = norm.new_zeros(()) if self._loss is None else self._loss.to(norm).reshape(())
        mean = all_reduce(loss, strategy.mesh.world) / strategy.mesh.world.size
        found: list[float] = torch.stack((mean, norm)).tolist()
        return found[0], found[1]

    def _fault(self, name: str, value: float, recent: Recent) -> str | None:
        if not math.isfinite(value):
            return f"the {name} is {value}"
        if len(recent) < self._warmup or recent.is_near(value, self._threshold):
            return None
        far = recent.deviations_above(value)
        if far <= self._threshold:
            return None
        return f"the {name} is {value:.4g}, {far:.3g} deviations above the median {recent.median:.4g} of recent steps"

    @property
    def _strategy(self) -> MegatronStrategy:
        assert self._trainer is not None
        assert isinstance(self._trainer.strategy, MegatronStrategy)
        return self._trainer.strategy

    # Skipping a step

    def _skip(self, loss: float, norm: float, reason: str) -> None:
        trainer = self._trainer
        assert trainer is not None
        self._row += 1
        step = self._described(trainer, loss, norm, reason)
        self.skipped.append(step)
        rank_zero_warn(f"step {step.step} is skipped: {reason}; {self._row} in a row, {_samples(step)}")
        if self._row == self._in_a_row:
            self._go_back(trainer)
        counts: dict[str, float] = {"skipped_steps": len(self.skipped), "returns": len(self.returns)}
        for logger in trainer.loggers:
            logger.log_metrics(counts, step=step.step)
        if self._row >= self._stop_after:
            raise SpikeError(
                f"{self._row} steps in a row were skipped, the last at step {step.step} because {reason}. If the data"
                " has changed for good, raise SpikeGuard's threshold; if not, lower the learning rate or go on from an"
                " earlier checkpoint"
            )

    def _described(self, trainer: Trainer, loss: float, norm: float, reason: str) -> SkippedStep:
        batch_idx = trainer.fit_loop.batch_idx
        first, place = self._begin or (batch_idx, 0)
        places = samples = None
        loader = trainer.train_dataloader
        if isinstance(loader, ResumableDataLoader):
            order = range(place, loader.position.last_batch.stop)
            places, samples = (order.start, order.stop - 1), loader.position.samples_at(order)
        where = trainer.global_step, trainer.current_epoch, (first, batch_idx), places, samples
        return SkippedStep(*where, loss, norm, reason)

    def _go_back(self, trainer: Trainer) -> None:
        strategy = self._strategy
        strategy.finish_save()
        path, to = strategy.broadcast(self._newest_good(trainer) if trainer.is_global_zero else None)
        if path is None:
            rank_zero_warn(
                f"{self._row} steps in a row were skipped, and no checkpoint of this run with optimizer state is at"
                f" least {self._margin} steps older than the first of them: training goes on from the present weights"
            )
            return
        if len(self.returns) == self._max_returns:
            raise SpikeError(
                f"training has gone back to a checkpoint {self._max_returns} times (max_returns), and step"
                f" {trainer.global_step} would be the next time: lower the learning rate"
            )
        strategy.rewind(path)
        self.returns.append(Return(trainer.global_step, to, path))
        rank_zero_warn(
            f"{self._row} steps in a row were skipped: weights and optimizer state are those of step {to} again"
            f" ({path}), and training goes on with the next samples"
        )

    def _newest_good(self, trainer: Trainer) -> tuple[str | None, int]:
        """Checkpoint to restore, and its step; never one from the steps that an earlier return has undone."""
        newest = trainer.global_step - self._row + 1 - self._margin
        left = [range(back.to + 1, back.step + 1) for back in self.returns]
        for path, step in sorted(self._known_checkpoints().items(), key=lambda item: (-item[1], item[0])):
            if step <= newest and not any(step in steps for steps in left) and is_usable(path):
                return path, step
        return None, 0

    def _known_checkpoints(self) -> dict[str, int]:
        """Paths and steps of the checkpoints that this run has saved, also before it was resumed."""
        return self._checkpoints if self._trainer is None else {**self._checkpoints, **self._strategy.saved_in_run}

    # State in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Windows of recent values, skipped steps, returns and checkpoints; equal on all ranks."""
        return {
            "losses": self._losses.state(),
            "norms": self._norms.state(),
            "row": self._row,
            "skipped": [asdict(step) for step in self.skipped],
            "returns": [asdict(back) for back in self.returns],
            "checkpoints": dict(sorted(self._known_checkpoints().items(), key=lambda item: item[1])[-KEPT:]),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""
        self._losses.load(state_dict["losses"])
        self._norms.load(state_dict["norms"])
        self._row = state_dict["row"]
        self.skipped = [SkippedStep(**step) for step in state_dict["skipped"]]
        self.returns = [Return(**back) for back in state_dict["returns"]]
        self._checkpoints = dict(state_dict["checkpoints"])


def _samples(step: SkippedStep) -> str:
    first, last = step.batches
    if step.places is None or step.samples is None:
        return f"batches {first} to {last} of epoch {step.epoch}"
    shown = ", ".join(str(sample) for sample in step.samples[:MANY])
    more = f" and {len(step.samples) - MANY} more" if len(step.samples) > MANY else ""
    return f"samples {shown}{more} (places {step.places[0]} to {step.places[1]} of epoch {step.epoch})"


def is_usable(path: str) -> bool:
    """True if a checkpoint exists and all its files have the sizes in its manifest; called on one rank."""
    try:
        return not size_faults(Path(path), locate(Path(path)))
    except CheckpointError:
        return False
