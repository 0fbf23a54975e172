"""Training by samples: its global batches, and where it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from lightning_megatron.config.layout import BatchShape, ParallelLayout
from lightning_megatron.data.batch_ramp import BatchRamp
from lightning_megatron.errors import Problem, multiples_around, problems_of

ENDLESS = (None, -1, 1000)
"""Values of ``max_epochs`` that set no limit: 1000 is Lightning's default if nothing limits training."""


@dataclass(frozen=True)
class SamplePlan:
    """Arguments of a data module about global batches, as ``MegatronDataModule`` explains them."""

    batch_size: int = 1
    train_samples: int | None = None
    global_batch_size: int | None = None
    rampup_batch_size: Sequence[int] | None = None

    @property
    def counts_samples(self) -> bool:
        """True if global batches are given, so that steps and samples are different counts."""
        return self.rampup_batch_size is not None or self.global_batch_size is not None

    def own_problems(self) -> list[Problem]:
        """Faults that exist under every layout."""
        found = []
        if self.global_batch_size is not None and self.batch_size != 1:
            reason = f"with batch_size={self.batch_size}: one follows from the other, so give one of them"
            found.append(Problem("global_batch_size", self.global_batch_size, reason, (None,)))
        if self.rampup_batch_size is not None and len(self.rampup_batch_size) != 3:
            reason = "needs three whole numbers: first global batch, increment, samples of the ramp"
            found.append(Problem("rampup_batch_size", tuple(self.rampup_batch_size), reason, ((16, 16, 5_000_000),)))
        elif self.rampup_batch_size is not None and self.global_batch_size is not None:
            found += problems_of(self._ramp_to, self.global_batch_size)
        return found

    def batch_of(self, dp: int) -> int:
        """Samples of one batch of one replica, after any ramp."""
        return self.batch_size if self.global_batch_size is None else self.global_batch_size // dp

    def global_batch(self, dp: int) -> int:
        """Samples of one batch of all replicas, after any ramp."""
        return self.batch_of(dp) * dp

    def ramp(self, dp: int) -> BatchRamp | None:
        """Ramp to the global batch of ``dp`` replicas."""
        return None if self.rampup_batch_size is None else self._ramp_to(self.global_batch(dp))

    def _ramp_to(self, final: int) -> BatchRamp:
        assert self.rampup_batch_size is not None
        start, increment, samples = self.rampup_batch_size
        return BatchRamp(start, increment, samples, final)

    def batches(self, dp: int) -> int:
        """Whole global batches in ``train_samples``."""
        ramp, samples = self.ramp(dp), self.train_samples or 0
        return samples // self.global_batch(dp) if ramp is None else ramp.batches(0, samples)

    def needed(self, batches: int, dp: int) -> int:
        """Samples of a number of global batches."""
        ramp = self.ramp(dp)
        return batches * self.global_batch(dp) if ramp is None else ramp.consumed_after(batches)

    def wanted(self, trainer: Trainer | None, max_steps: int, dp: int) -> int | None:
        """Samples for training to draw from the data; ``None`` for all of an epoch."""
        if self.train_samples is not None or trainer is None or max_steps < 1 or self.epochs(trainer) is not None:
            return self.train_samples
        return self.needed(max_steps * trainer.accumulate_grad_batches, dp)

    def layout_problems(self, layout: ParallelLayout, micro_batch_size: int | None, accumulated: int) -> list[Problem]:
        """Global batches that a layout cannot divide evenly."""
        dp, found = layout.data_parallel_size, []
        unit = dp * (micro_batch_size or 1)
        if accumulated != 1:
            name = "rampup_batch_size" if self.rampup_batch_size is not None else "global_batch_size"
            reason = f"with {name} a batch is a whole step: let micro_batch_size split it"
            found.append(Problem("accumulate_grad_batches", accumulated, reason, (1,)))
        if self.global_batch_size is not None and self.global_batch_size % unit:
            reason = f"is no multiple of dp x micro_batch_size = {unit}"
            near = multiples_around(self.global_batch_size, unit)
            found.append(Problem("global_batch_size", self.global_batch_size, reason, near))
        if self.rampup_batch_size is None or found:
            return found
        final = self.global_batch(dp)
        return problems_of(self._ramp_to, final) or self._stage_problems(self._ramp_to(final), unit)

    def _stage_problems(self, ramp: BatchRamp, unit: int) -> list[Problem]:
        """Global batches of a ramp that ranks and micro-batches cannot divide evenly."""
        odd = [size for size in ramp.sizes if size % unit]
        if not odd:
            return []
        reason = f"its global batch of {odd[0]} samples is no multiple of dp x micro_batch_size = {unit}"
        near = (max(unit, ramp.start // unit * unit), max(unit, ramp.increment // unit * unit), ramp.samples)
        fits = (ramp.final - near[0]) % near[1] == 0
        return [Problem("rampup_batch_size", (ramp.start, ramp.increment, ramp.samples), reason, (near,) * fits)]

    def ends(self, trainer: Trainer, counts_samples: bool) -> bool:
        """True if training ends after ``train_samples``, since the Trainer sets no other end.

        Args:
            trainer: the Trainer.
            counts_samples: True if the job counts samples: then ``max_epochs`` is not an end.
        """
        if self.train_samples is None or trainer.max_steps != -1:
            return False
        return counts_samples or trainer.max_epochs in ENDLESS

    def epochs(self, trainer: Trainer | None) -> int | None:
        """Number of epochs, each with its own samples, after which a run ends; ``None`` without such a limit."""
        if trainer is None or trainer.max_epochs in ENDLESS:
            return None
        return 1 if trainer.overfit_batches else trainer.max_epochs  # type: ignore[attr-defined]

    def order(self, trainer: Trainer | None, **consecutive: Any) -> dict[str, Any]:
        """Arguments of the sampler: each epoch in its own order, except under ``overfit_batches``."""
        return {} if trainer is not None and trainer.overfit_batches else consecutive  # type: ignore[attr-defined]

    def missing(self, samples: int) -> list[Problem]:
        """The fault of data with fewer samples than ``train_samples``."""
        if samples >= (self.train_samples or 0):
            return []
        reason = f"a data_path without weights is read once, and has {samples}: give [weight, prefix, ...]"
        return [Problem("train_samples", self.train_samples, reason, (samples,))]

    def saved(self, dp: int, accumulated: int) -> dict[str, Any]:
        """State of a checkpoint, which :meth:`resume_problems` compares."""
        rampup = None if self.rampup_batch_size is None else list(self.rampup_batch_size)
        sizes = {"global_batch_size": self.global_batch(dp), "accumulate_grad_batches": accumulated}
        return {**sizes, "rampup_batch_size": rampup}

    def resume_problems(self, saved: Mapping[str, Any], dp: int, accumulated: int) -> list[Problem]:
        """Differences to the global batches of a checkpoint, where the job counts samples."""
        if "accumulate_grad_batches" not in saved:  # of an earlier version
            return []
        found, today = [], self.saved(dp, accumulated)
        step = today["global_batch_size"] * accumulated
        before = saved["global_batch_size"] * saved["accumulate_grad_batches"]
        if step != before and self.global_batch_size is not None:
            reason = f"the checkpoint was trained with {before} samples a step"
            found.append(Problem("global_batch_size", self.global_batch_size, reason, (before,)))
        elif step != before:
            reason = f"makes steps of {step} samples over dp {dp}, and the checkpoint was trained with {before}"
            near = (before // (dp * accumulated),) if before % (dp * accumulated) == 0 else ()
            found.append(Problem("batch_size", self.batch_size, reason, near))
        ramp, ramp_before = today["rampup_batch_size"], saved["rampup_batch_size"]
        if ramp != ramp_before:
            found.append(Problem("rampup_batch_size", ramp, "is not that of the checkpoint", (ramp_before,)))
        return found

    def shape(self, dp: int | None, **known: Any) -> BatchShape:
        """Sizes of batches after any ramp; without a layout, only those that do not depend on it."""
        if self.global_batch_size is None:
            return BatchShape(self.batch_size, **known)
        size = None if dp is None else self.batch_of(dp)
        return BatchShape(size, global_batch_size=self.global_batch_size, **known)


def length_problems(plan: SamplePlan, trainer: Trainer) -> list[Problem]:
    """The fault of a job that counts samples and sets both ``train_samples`` and ``max_steps``."""
    if plan.train_samples is None or trainer.max_steps == -1 or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return []
    reason = f"train_samples={plan.train_samples} is a length of training, too: where samples are counted, give one"
    return [Problem("max_steps", trainer.max_steps, reason, (-1,))]
