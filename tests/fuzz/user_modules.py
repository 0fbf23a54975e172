"""Modules of the programs of ``user_programs.py``: steps around a core, metrics and extras."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import user_mixins as extras
from torch import Tensor, nn
from user_batches import CLASSES, Batch, read
from user_grammar import Program
from user_nets import OurCore, OwnCore
from user_notes import Notes
from user_training import LOG, LOOPS, OPTIMIZERS, SCHEDULES


class FailedError(RuntimeError):
    """The error of a program that fails at a step."""


class Steps:
    """Steps of training and evaluation, with notes of what they see.

    Attributes:
        notes: what they saw and found.
        stop_file: file that a stop by a file makes; ``None`` in a run that is not to stop.
    """

    program: Program
    objective: Callable[[Batch], tuple[Tensor, Tensor]]
    trained: Callable[[], list[list[nn.Parameter]]]

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.notes, self.stop_file = Notes(), None
        self.automatic_optimization = self.program["loop"] == "automatic"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = read(batch, self.program["batch"])
        where = f"train {self.current_epoch}.{batch_idx}"
        self.notes.sees(where, parts, [group["lr"] for opt in self.trainer.optimizers for group in opt.param_groups])
        self._stop_if_asked()
        loss, out = LOOPS[self.program["loop"]](self, parts, batch_idx)
        self.notes.finds(where, loss, len(parts.number))
        self.report("train", loss, out, parts)
        return self.returned(loss, out, parts)

    def _stop_if_asked(self) -> None:
        if not self.stops_now() or self.program["stop"] == "exception":
            return
        if self.program["stop"] == "signal" and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.global_rank == 0:
            Path(self.stop_file).touch()
        self.stop_file = None

    def stops_now(self) -> bool:
        """True in the step at whose beginning, or in which, the program is to stop."""
        return self.stop_file is not None and self.global_step >= int(self.program["stop_at"])

    def report(self, where: str, loss: Tensor, out: Tensor, batch: Batch) -> None:
        LOG[self.program["log"]](self, where, loss, batch)
        if self.program.has_any(("cb-best", "cb-early", "schedule=plateau")) and (
            where == "val" or "val" not in self.program
        ):
            self.log("watched", loss, on_step=False, on_epoch=True, sync_dist=True)

    def returned(self, loss: Tensor, out: Tensor, batch: Batch) -> Any:
        return loss

    def configure_optimizers(self) -> Any:
        make, halves = OPTIMIZERS[self.program["optimizer"]], self.trained()
        if self.program["loop"] == "manual-two":
            return [make([half]) for half in halves]
        optimizer = make(halves)
        if self.program["schedule"] == "none":
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULES[self.program["schedule"]](optimizer)}


class Evaluates:
    """Steps of validation, test and prediction."""

    def evaluate(self, where: str, batch: Any, batch_idx: int) -> None:
        parts = read(batch, self.program["batch"])
        name = f"{where} {self.global_step}.{batch_idx}"
        self.notes.sees(name, parts, [])
        loss, out = self.objective(parts)
        self.notes.finds(name, loss, len(parts.number))
        self.report(where, loss, out, parts)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate("val", batch, batch_idx + 100 * dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate("test", batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        parts = read(batch, self.program["batch"])
        _, out = self.objective(parts)
        return {"number": parts.number, "scores": out.float(), "names": list(parts.names)}


class Fails:
    """Training ends with an error between two steps, on all ranks."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.stops_now():
            raise FailedError


# Metrics


class Measures:
    """Metrics of torchmetrics, in each of the places where users keep them."""

    def __init__(self, text: str) -> None:
        from torchmetrics import MeanMetric, MetricCollection
        from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

        super().__init__(text)
        kind, accuracy = self.program["metric"], MulticlassAccuracy(CLASSES)
        self.stages = ("val",) if kind == "held-out" else ("train", "val") if "val" in self.program else ("train",)
        if kind == "collection":
            self.metric: Any = MetricCollection({"accuracy": accuracy, "f1": MulticlassF1Score(CLASSES)}, prefix="all_")
        elif kind == "by-name":
            self.metric = nn.ModuleDict({f"{stage}_metric": copy.deepcopy(accuracy) for stage in self.stages})
        elif kind == "mean":
            self.metric = MeanMetric()
        elif kind == "plain":
            self.plain = {"metric": accuracy}
        else:
            self.metric = accuracy

    def report(self, where: str, loss: Tensor, out: Tensor, batch: Batch) -> None:
        super().report(where, loss, out, batch)
        kind, scores = self.program["metric"], out.detach()[:, :CLASSES]
        if where not in self.stages or (
            where == "train" and "val" in self.program and kind in ("module", "collection")
        ):
            return
        if kind == "plain":
            self.plain["metric"].update(scores, batch.y)
        elif kind == "forward":
            self.log(f"{where}_now", self.metric(scores, batch.y), on_step=False, on_epoch=True)
        elif kind == "mean":
            self.metric.update(batch.x.mean(), len(batch.x))
            self.log(f"{where}_mean", self.metric, on_step=False, on_epoch=True)
        elif kind == "collection":
            self.metric.update(scores, batch.y)
            self.log_dict(self.metric, on_step=False, on_epoch=True)
        elif kind == "by-name":
            self.metric[f"{where}_metric"](scores, batch.y)
            self.log(f"{where}_accuracy", self.metric[f"{where}_metric"], on_step=False, on_epoch=True)
        else:
            self.metric(scores, batch.y)
            self.log(f"{where}_accuracy", self.metric, on_step=False, on_epoch=True)


class MeasuresPlainly:
    """A metric that is no submodule is computed when the epoch ends."""

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("plain_accuracy", self.plain["metric"].compute())
        self.plain["metric"].reset()


MIXINS: Mapping[str, type] = {
    **dict.fromkeys(("val", "test", "predict"), Evaluates),
    "frozen": extras.Frozen,
    "unfreeze": extras.Unfreezes,
    "teacher": extras.Teacher,
    "counter": extras.Counter,
    "running": extras.Running,
    "random-buffer": extras.RandomBuffer,
    "two-calls": extras.TwoCalls,
    "batch=ragged": extras.RaggedLoss,
    "outputs": extras.Outputs,
    "num-tokens": extras.NumTokens,
    "param-hook": extras.ParamHook,
    "grad-hook": extras.GradHook,
    "own-step": extras.OwnStep,
    "own-zero": extras.OwnZero,
    "clip=own": extras.OwnClip,
    "schedule=own": extras.OwnSchedule,
    "own-state": extras.OwnState,
    "collect": extras.Collects,
    "late-group": extras.LateGroup,
    "log=hook": extras.LogsInHooks,
    "rank0-draws": extras.Masks,
    "hparams": extras.Hyper,
    "temperature": extras.Temperature,
    "weight-norm": extras.Parametrized,
    "spectral-norm": extras.Spectral,
    "recomputes": extras.Recomputes,
    "penalty": extras.Penalty,
    "weight-penalty": extras.WeightPenalty,
    "skips": extras.Skips,
    "builds-late": extras.BuildsLate,
    "gathers": extras.Gathers,
    "catches": extras.OtherHooks,
    "stop=exception": Fails,
    "metric=plain": MeasuresPlainly,
}


def module_of(program: Program, *, halves: bool = False) -> Any:
    """The module of a program.

    Args:
        program: the program.
        halves: true for a backward of each part of a batch; see ``Halves``.
    """
    mixins = [extras.Halves] if halves else []
    mixins += [MIXINS[feature] for feature in program.features if feature in MIXINS]
    if program["metric"] not in ("none", "callback"):
        mixins.append(Measures)
    core = OurCore if "ours" in program.words else OwnCore
    bases = dict.fromkeys([*mixins, Steps, core])
    return type("UserModule", tuple(bases), {"__module__": __name__})(str(program))
