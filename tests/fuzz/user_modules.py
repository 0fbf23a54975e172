"""Modules of the programs of ``user_programs.py``: steps around a core, and one mixin for each extra feature.

A hook is overridden only in programs with the feature that needs it: the strategy looks at what a module overrides.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from user_batches import CLASSES, FEATURES, Batch, read
from user_grammar import Program
from user_nets import OurCore, OwnCore
from user_notes import Notes
from user_training import LOG, LOOPS, OPTIMIZERS, RATE, SCHEDULES


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
        return self.stop_file is not None and self.global_step == int(self.program["stop_at"])

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

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate("val", batch, batch_idx)

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


# Extras


class Frozen:
    """The first parameters are not trained, and go through no optimizer."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        next(self.net.parameters()).requires_grad_(False)


class Unfreezes:
    """The first parameters are trained from the second epoch on; an optimizer has them from the beginning."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        next(self.net.parameters()).requires_grad_(False)

    def trained(self) -> list[list[nn.Parameter]]:
        params = list(self.net.parameters())
        return [params[: len(params) // 2], params[len(params) // 2 :]]

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.net.requires_grad_(True)


class Teacher:
    """A copy of the net that follows it, and whose scores the net should give for disturbed samples."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, out = super().objective(batch)
        with torch.no_grad():
            wanted = self.teacher(batch)
        wanted = wanted[1] if isinstance(wanted, tuple) else wanted
        return loss + (out - wanted).float().square().mean(), out

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        with torch.no_grad():
            for kept, param in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                kept.lerp_(param, 0.25)


class Counter:
    """A buffer counts samples, another one keeps the numbers of the last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = read(batch, self.program["batch"])
        self.count += len(parts.number)
        self.last.copy_(parts.number[:2].float())
        return super().training_step(batch, batch_idx)


class Running:
    """A running mean of the scores, which are centred with it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.register_buffer("centre", torch.zeros(FEATURES))

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.training:
            self.centre.lerp_(batch.x.detach().mean(0).float(), 0.5)
        moved = Batch(batch.x - self.centre, batch.tokens, batch.y, batch.number, batch.names, batch.lengths)
        return super().objective(moved)


class RandomBuffer:
    """A buffer drawn without a seed, as if each process had one of its own."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        random = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        self.register_buffer("noise", torch.randn(FEATURES, generator=random))

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        moved = Batch(batch.x * self.noise, batch.tokens, batch.y, batch.number, batch.names, batch.lengths)
        return super().objective(moved)


class TwoCalls:
    """Two calls of the model in a step."""

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, out = super().objective(batch)
        turned = Batch(batch.x.flip(1), batch.tokens.flip(1), batch.y, batch.number, batch.names, batch.lengths)
        return loss + 0.5 * super().objective(turned)[0], out


class RaggedLoss:
    """Samples have weights by their lengths."""

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, out = super().objective(batch)
        return loss + (batch.lengths[:, None] * out).float().square().mean() / 10, out


class Outputs:
    """A step returns more than its loss."""

    def returned(self, loss: Tensor, out: Tensor, batch: Batch) -> Any:
        right = (out.detach().argmax(1) == batch.y).float()
        return {"loss": super().returned(loss, out, batch), "right": right, "number": batch.number}


class NumTokens:
    """A step returns a number by a name that our own modules use."""

    def returned(self, loss: Tensor, out: Tensor, batch: Batch) -> Any:
        return {"loss": super().returned(loss, out, batch), "num_tokens": 100}


class ParamHook:
    """A hook of a parameter changes its gradient."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        [p for p in self.net.parameters() if p.requires_grad][-1].register_hook(lambda grad: grad * 0.25)


class GradHook:
    """Gradients are changed behind the backward."""

    def on_after_backward(self) -> None:
        super().on_after_backward()
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)


class OwnStep:
    """A warm-up by hand, as Lightning's documentation shows it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (self.global_step + 1) / 4)


class OwnZero:
    """Gradients are set to zero and kept."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class OwnClip:
    """Clipping by a function of the step."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1 * (1 + self.global_step), gradient_clip_algorithm="norm")


class OwnSchedule:
    """The schedule advances every second time."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.global_step % 2:
            scheduler.step()


class OwnState:
    """A number of the module's own in checkpoints."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.ended = 0

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.ended += 1
        self.notes.ends("ended", self.ended)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"ended": self.ended}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.ended = checkpoint["own"]["ended"]


class Collects:
    """Losses of an epoch in a list, the mean is logged at its end."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.collected: list[Tensor] = []

    def returned(self, loss: Tensor, out: Tensor, batch: Batch) -> Any:
        self.collected.append(loss.detach())
        return super().returned(loss, out, batch)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("collected", torch.stack(self.collected).mean())
        self.collected.clear()


class LateGroup:
    """The second half of the parameters is trained from the second epoch on."""

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.program["optimizer"]]([self.trained()[0]])

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": self.trained()[1], "lr": RATE / 2})


class LogsInHooks:
    """Values are logged in hooks around the step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.log("at_start", float(batch_idx))

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.log("at_end", float(self.global_step), on_step=True, on_epoch=True)


class Masks:
    """Features are masked at random, and the first rank draws once more, for a picture."""

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        kept = (torch.rand_like(batch.x) > 0.25).float()
        words = torch.where(torch.rand(batch.tokens.shape) > 0.25, batch.tokens, 0)
        return super().objective(Batch(batch.x * kept, words, batch.y, batch.number, batch.names, batch.lengths))

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        if self.trainer.is_global_zero:
            torch.randint(4, ())


class Hyper:
    """Hyper-parameters in checkpoints."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.save_hyperparameters({"net": self.program["net"], "sizes": [1, 2], "rate": RATE})


MIXINS: Mapping[str, type] = {
    **dict.fromkeys(("val", "test", "predict"), Evaluates),
    **{"frozen": Frozen, "unfreeze": Unfreezes, "teacher": Teacher, "counter": Counter, "running": Running},
    **{"random-buffer": RandomBuffer, "two-calls": TwoCalls, "batch=ragged": RaggedLoss, "outputs": Outputs},
    **{"num-tokens": NumTokens, "param-hook": ParamHook, "grad-hook": GradHook, "own-step": OwnStep},
    **{"own-zero": OwnZero, "clip=own": OwnClip, "schedule=own": OwnSchedule, "own-state": OwnState},
    **{"collect": Collects, "late-group": LateGroup, "log=hook": LogsInHooks, "rank0-draws": Masks},
    **{"hparams": Hyper, "stop=exception": Fails, "metric=plain": MeasuresPlainly},
}


def module_of(program: Program) -> Any:
    """The module of a program."""
    mixins = [MIXINS[feature] for feature in program.features if feature in MIXINS]
    if program["metric"] not in ("none", "callback"):
        mixins.append(Measures)
    core = OurCore if "ours" in program.words else OwnCore
    bases = dict.fromkeys([*mixins, Steps, core])
    return type("UserModule", tuple(bases), {"__module__": __name__})(str(program))
