"""Megatron-LM's log: its lines on the console, and its scalars in any logger."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_megatron.arguments import at_least, checked
from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.config.counts import padded_vocab_size
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.data.loading.resumable_loader import ResumableDataLoader
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.lightning.callbacks.throughput import WorkDone, work_of
from lightning_megatron.lightning.monitoring import megatron_lines as lines
from lightning_megatron.lightning.monitoring.run_arguments import run_arguments
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.lightning.validation.samples import PlansSamples


class MegatronLog(Callback):
    """Prints the lines of Megatron-LM's log, so that its tools can read them, and logs its scalars.

    At the start rank 0 prints dtypes, arguments of strategy, module, data, optimizers and Trainer, micro-batches,
    padded vocabulary, ranks, seed, parameters of each (tensor, pipeline) rank, and numbers of samples. Every
    ``every_n_steps`` steps the last rank prints iteration, consumed samples, time, learning rate, global batch, loss,
    loss scale, gradient norm, and numbers of skipped steps and of losses that are not finite. Means and counts cover
    the steps since the last line. As in Megatron-LM, a line of skipped steps alone has no loss, and one whose last step
    was skipped has no gradient norm.

    All loggers get ``lm loss``, ``learning-rate``, ``batch-size``, ``loss-scale``, ``grad-norm``, ``iteration-time``
    and ``throughput``, with ``consumed-samples`` and ``consumed-tokens``. TensorBoard also gets each of them over
    samples and over tokens in place of steps, as ``lm loss vs samples`` and ``lm loss vs tokens``.

    Args:
        every_n_steps: optimizer steps of a line; ``None`` means ``Trainer(log_every_n_steps=...)``.
        loss_name: name of the loss in the line.
        throughput: True to print TFLOP/s of each device, if the module knows its FLOPs.

    Attributes:
        consumed: samples and tokens that all replicas have trained on, earlier runs included.

    Raises:
        ConfigError: with another strategy than ``MegatronStrategy``.
    """

    reads_parameters = False

    @checked(every_n_steps=at_least(1))
    def __init__(self, every_n_steps: int | None = None, loss_name: str = "lm loss", throughput: bool = False) -> None:
        self._every, self._loss_name, self._throughput = every_n_steps, loss_name, throughput
        self.consumed = WorkDone()
        self._resumed = False
        self._made = time.time()
        self._seen = self._last = 0
        self._step = WorkDone()
        self._loss: Tensor | None = None
        self._mark: float | None = None
        self._begin()

    def _begin(self) -> None:
        """Begin a window of steps."""
        self._window = WorkDone()
        self._taken = self._skipped = self._nans = 0
        self._losses: Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse other strategies; reset the counts for a new run."""
        if not isinstance(trainer.strategy, MegatronStrategy):
            reason = "reads numbers of MegatronStrategy: use that strategy, or leave it out"
            raise ConfigError([Problem("callbacks", type(self).__name__, reason)])
        if stage == "fit" and not trainer.global_step:
            self.consumed, self._resumed = WorkDone(), False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the first lines; if the checkpoint has no counts of this callback, take samples from the loader."""
        strategy = _strategy_of(trainer)
        counts = all_gather_object(strategy.mesh, _parameters_here(pl_module, strategy))
        if trainer.is_global_zero:
            for line in self._start_lines(trainer, pl_module, strategy, sorted({c for c in counts if c is not None})):
                _print(line)
        loader = trainer.train_dataloader
        if not self._resumed and isinstance(loader, ResumableDataLoader):
            place = loader.position
            self.consumed = replace(WorkDone(), samples=place.epoch * place.num_samples_total + place.consumed_samples)
        self._seen, self._step, self._loss, self._mark = trainer.global_step, WorkDone(), None, None
        self._begin()

    def _start_lines(
        self, trainer: Trainer, module: LightningModule, strategy: MegatronStrategy, counts: list[tuple[int, int, int]]
    ) -> list[str]:
        mesh, config = strategy.mesh, getattr(module, "config", None)
        dtype = strategy.precision_plugin.mode.params
        found = [] if dtype == torch.float32 else [f"using {dtype} for parameters ..."]
        found += lines.argument_lines(run_arguments(trainer, module, strategy.settings))
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, PlansSamples):
            plan, dp = data.sample_plan, strategy.data_parallel_size
            micro = strategy.micro_batch_size or plan.batch_of(dp)
            number = -(-plan.batch_of(dp) // micro) * trainer.accumulate_grad_batches
            found.append(lines.batch_line(number, plan.global_batch(dp), plan.rampup_batch_size))
        if (tokenizer := getattr(data, "tokenizer", None)) is not None:
            found.append(f"> building {type(tokenizer).__name__} tokenizer ...")
        if isinstance(config, TransformerConfig):
            padded = padded_vocab_size(config.vocab_size, mesh.tp.size, config.vocab_multiple)
            found.append(lines.vocabulary_line(config.vocab_size, padded))
        seed = os.environ.get("PL_GLOBAL_SEED")
        sizes = {"tensor": mesh.tp.size, "pipeline": mesh.pp.size}
        others = {"context": mesh.cp.size, "expert": mesh.layout.ep}
        sizes |= {name: size for name, size in others.items() if size > 1}
        found += lines.parallel_lines(sizes, None if seed is None else int(seed))
        found += lines.started_lines(time.time() - self._made, datetime.now())
        found += [lines.parameter_line(tp, pp, count) for pp, tp, count in counts]
        return found + _target_lines(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock if it is stopped."""
        if self._mark is None:
            self._mark = time.perf_counter()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Add up the losses of a step; each is divided by the number of accumulated batches."""
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch, and a step where it ends one; at the end of a window, print and log."""
        self._step += work_of(batch, trainer, pl_module)
        if trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        self._count_step(_strategy_of(trainer))
        if self._seen % (self._every or getattr(trainer, "log_every_n_steps", 0) or 1) == 0:
            self._close(trainer)

    def _count_step(self, strategy: MegatronStrategy) -> None:
        precision, loss = strategy.precision_plugin, self._loss
        if precision.step_is_skipped:
            self._skipped += 1
            self._nans += int(loss is not None and not bool(torch.isfinite(loss).all()))
        elif loss is not None:
            self._taken += 1
            loss = loss.float().reshape(())
            self._losses = loss if self._losses is None else self._losses + loss
        self._window += self._step
        self.consumed += self._step
        self._step, self._loss, self._last = WorkDone(), None, self._step.samples

    def _close(self, trainer: Trainer) -> None:
        """End a window; all ranks call this."""
        strategy = _strategy_of(trainer)
        sums = torch.zeros((), device=strategy.root_device) if self._losses is None else self._losses
        mean = all_reduce(sums.clone(), strategy.mesh.world) / strategy.mesh.world.size
        values = {self._loss_name: float(mean) / self._taken} if self._taken else {}
        self._stop_clock()
        precision, steps = strategy.precision_plugin, self._taken + self._skipped
        norm = (
            None if precision.step_is_skipped or precision.last_grad_norm is None else float(precision.last_grad_norm)
        )
        seconds = self._window.seconds
        known = self._throughput and self._window.flops and seconds
        at = lines.Iteration(
            trainer.global_step,
            _iterations(trainer),
            self.consumed.samples,
            1e3 * seconds / max(1, steps),
            float(trainer.optimizers[0].param_groups[0]["lr"]),
            self._last,
            values,
            precision.scale_of_loss(),
            norm,
            self._skipped,
            self._nans,
            self._window.flops / seconds / trainer.world_size / 1e12 if known else None,
        )
        if trainer.global_rank == trainer.world_size - 1:
            _print(lines.iteration_line(at))
        self._log(trainer, lines.scalars(at))
        self._begin()

    def _log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        samples, tokens = self.consumed.samples, self.consumed.tokens
        counted = {"consumed-samples": float(samples), "consumed-tokens": float(tokens)}
        for logger in trainer.loggers:
            logger.log_metrics({**values, **counted}, step=trainer.global_step)
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                for name, value in values.items():
                    logger.experiment.add_scalar(f"{name} vs samples", value, samples)
                    logger.experiment.add_scalar(f"{name} vs tokens", value, tokens)

    # Validation and checkpoints do not count as time of iterations

    def _stop_clock(self) -> None:
        now = time.perf_counter()
        self._window.seconds += now - (now if self._mark is None else self._mark)
        self._mark = now

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        if trainer.training or trainer.validating:
            self._pause()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stop the clock."""
        self._pause()

    def _pause(self) -> None:
        if self._mark is not None:
            self._stop_clock()
            self._mark = None

    def state_dict(self) -> dict[str, Any]:
        """Samples and tokens that were consumed."""
        return {"samples": self.consumed.samples, "tokens": self.consumed.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the saved counts."""
        self._resumed = True
        self.consumed = WorkDone(samples=state_dict["samples"], tokens=state_dict["tokens"])


def _print(line: str) -> None:
    """Print a line; on a terminal it replaces the progress bar (of any rank), which is then drawn again below."""
    print(f"\r\033[K{line}" if sys.stdout.isatty() else line, flush=True)


def _strategy_of(trainer: Trainer) -> MegatronStrategy:
    assert isinstance(trainer.strategy, MegatronStrategy)
    return trainer.strategy


def _parameters_here(module: LightningModule, strategy: MegatronStrategy) -> tuple[int, int, int] | None:
    """Pipeline rank, tensor rank and number of parameters; ``None`` on ranks that hold a copy of another's."""
    mesh = strategy.mesh
    if mesh.dp.rank or mesh.cp.rank:
        return None
    return mesh.pp.rank, mesh.tp.rank, sum(p.numel() for p in module.parameters())


def _iterations(trainer: Trainer) -> int:
    if trainer.max_steps != -1:
        return trainer.max_steps
    return int(min(trainer.estimated_stepping_batches, 10**8 - 1))


def _target_lines(trainer: Trainer) -> list[str]:
    """Lines about numbers of samples; none if the data module does not plan samples."""
    data, strategy = getattr(trainer, "datamodule", None), _strategy_of(trainer)
    if not isinstance(data, PlansSamples):
        return []
    plan, dp, iterations = data.sample_plan, strategy.data_parallel_size, _iterations(trainer)
    train = plan.train_samples
    if train is None:
        train = plan.needed(iterations * trainer.accumulate_grad_batches, dp)
    batches, interval = trainer.limit_val_batches, trainer.val_check_batch
    if not isinstance(batches, int) or not isinstance(interval, int) or not batches:
        return lines.target_lines(train, 0, 0)
    held_out = lines.evaluated_samples(iterations, interval, batches, plan.global_batch(dp))
    return lines.target_lines(train, *held_out)
