"""Schedules of a module: learning rate and weight decay, by optimizer steps or by samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer

from lightning_megatron.data.loading.resumable_loader import ResumableDataLoader
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.optim.lr_schedule import LRSchedule, LRStyle, MegatronLR, TailStyle, WDSchedule, WDStyle

_LENGTHS = ("warmup", "decay", "tail")
_NAMES = {"max_lr": "lr", "style": "lr_schedule"}
_WD_NAMES = {"start": "start_weight_decay", "end": "weight_decay", "style": "weight_decay_schedule"}


@dataclass(frozen=True)
class ModuleSchedules:
    """Arguments of a module about its schedules, with defaults filled in; ``TransformerModule`` explains them.

    Attributes:
        max_lr: its ``lr``.
        style: its ``lr_schedule``.
        lengths: its ``warmup_steps`` to ``tail_samples``, by name; only those that are given.
        weight_decay_style: its ``weight_decay_schedule``.
    """

    max_lr: float
    min_lr: float
    init_lr: float = 0.0
    style: LRStyle = "constant"
    tail_style: TailStyle = "exponential"
    lengths: Mapping[str, int] = field(default_factory=dict)
    weight_decay: float = 0.0
    start_weight_decay: float = 0.0
    weight_decay_style: WDStyle = "constant"

    @property
    def counts_samples(self) -> bool:
        """True if lengths are numbers of samples."""
        return any(name.endswith("_samples") for name in self.lengths)

    @property
    def unit(self) -> str:
        """Unit of the lengths."""
        return "samples" if self.counts_samples else "steps"

    @property
    def changes_nothing(self) -> bool:
        """True if neither learning rate nor weight decay ever changes."""
        constant = self.style == "constant" and not self._length("warmup")
        return constant and self.weight_decay_style == "constant"

    def _length(self, name: str) -> int:
        return self.lengths.get(f"{name}_{self.unit}", 0)

    def problems(self) -> list[Problem]:
        """Faults that do not depend on the length of training, under the module's names of arguments."""
        found = []
        if self.counts_samples:
            for name in (f"{length}_steps" for length in _LENGTHS):
                if value := self.lengths.get(name, 0):
                    reason = "other lengths of the schedule are numbers of samples: give this one in samples too"
                    found.append(Problem(name, value, reason, (0,)))
        if not self.changes_nothing:
            shortest = self._length("warmup") + max(1, self._length("tail"))
            names = _NAMES | {length: f"{length}_{self.unit}" for length in _LENGTHS}
            found += _renamed(names, self.learning_rate, self._length("decay") or shortest)
        return found + _renamed(_WD_NAMES, self.decay_of_weights, 1)

    def learning_rate(self, length: int) -> LRSchedule:
        """Schedule of the learning rate, whose decay ends after ``length`` unless its own length was given."""
        constant = self.style == "constant"
        return LRSchedule(
            self.max_lr,
            self.min_lr,
            self.init_lr,
            self._length("warmup"),
            0 if constant else self._length("decay") or length,
            self.style,
            self._length("tail"),
            self.tail_style,
        )

    def decay_of_weights(self, length: int) -> WDSchedule:
        """Schedule of the weight decay over the whole training."""
        return WDSchedule(self.start_weight_decay, self.weight_decay, length, self.weight_decay_style)

    def scheduler(self, optimizer: Optimizer, trainer: Trainer) -> MegatronLR:
        """Scheduler of an optimizer.

        Raises:
            ConfigError: if samples cannot be counted, or lengths do not fit into the training.
        """
        length = self._training_length(trainer)
        decay = None if self.weight_decay_style == "constant" else self.decay_of_weights(length)
        return MegatronLR(optimizer, self.learning_rate(length), decay)

    def _training_length(self, trainer: Trainer) -> int:
        """Length of the whole training; 0 if no schedule needs it, since finding it may require reading the data."""
        ends_itself = self.style == "constant" or self._length("decay")
        if ends_itself and self.weight_decay_style == "constant":
            return 0
        steps = int(trainer.estimated_stepping_batches)
        return samples_of_steps(trainer, steps) if self.counts_samples else steps


def _renamed(names: Mapping[str, str], make: Any, length: int) -> list[Problem]:
    """Faults of a schedule, under other names of its arguments."""
    try:
        make(length)
    except ConfigError as error:
        return [replace(found, argument=names.get(found.argument, found.argument)) for found in error.problems]
    return []


def samples_of_steps(trainer: Trainer, steps: int) -> int:
    """Samples of a number of optimizer steps from the first one on, over all replicas.

    Raises:
        ConfigError: if the loader does not say its batch size.
    """
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()
    loader = trainer.train_dataloader
    if isinstance(loader, ResumableDataLoader):
        return loader.position.consumed_after(steps * trainer.accumulate_grad_batches)
    return steps * _fixed_step(trainer)


def samples_of_last_step(trainer: Trainer) -> int:
    """Samples of the last optimizer step, over all replicas; 0 if gradients overflowed.

    As in Megatron-LM, a step that is skipped for an overflow does not move a schedule that counts samples.

    Raises:
        ConfigError: if the loader does not say its batch size.
    """
    strategy, loader = trainer.strategy, trainer.train_dataloader
    if isinstance(strategy, MegatronStrategy) and strategy.precision_plugin.step_has_overflowed:
        return 0
    if isinstance(loader, ResumableDataLoader):
        accumulated = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches + 1
        return len(loader.position.last_batch) * accumulated
    return _fixed_step(trainer)


def _fixed_step(trainer: Trainer) -> int:
    loader, strategy = trainer.train_dataloader, trainer.strategy
    size = getattr(loader, "batch_size", None)
    if not isinstance(size, int):
        reason = "has no batch_size by which to count samples: take MegatronDataModule, or schedules by steps"
        raise ConfigError([Problem("train_dataloaders", type(loader).__name__, reason)])
    dp = strategy.data_parallel_size if isinstance(strategy, MegatronStrategy) else trainer.world_size
    return size * dp * trainer.accumulate_grad_batches
