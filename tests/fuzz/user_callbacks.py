"""Callbacks of the programs of ``user_programs.py``: Lightning's own, and some as users write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import Tensor
from user_batches import CLASSES, read
from user_grammar import Program

from lightning_megatron import KillSwitch


class Watches(Callback):
    """A callback with notes.

    Attributes:
        seen: what it saw, by step.
    """

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def note(self, trainer: Trainer, value: Any) -> None:
        """Note what a step showed."""
        self.seen[f"step {trainer.global_step}.{trainer.fit_loop.batch_idx}"] = value


def _sums(tensors: Any) -> list[float]:
    return [float(tensor.detach().double().sum()) for tensor in tensors]


class ReadsWeights(Watches):
    """Reads weights behind each step."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.note(trainer, _sums(pl_module.parameters()))


class EditsWeights(Watches):
    """Clips weights behind each step."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for param in pl_module.parameters():
                param.clamp_(-0.25, 0.25)


class EditsState(Watches):
    """Forgets what an optimizer has gathered when the second epoch begins."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            groups = [(optimizer, group) for optimizer in trainer.optimizers for group in optimizer.param_groups]
            for optimizer, param in ((optimizer, param) for optimizer, group in groups for param in group["params"]):
                for value in optimizer.state[param].values():
                    if isinstance(value, Tensor) and value.ndim:
                        value.zero_()


class ReadsOutputs(Watches):
    """Reads what a step returned."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        found = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
        values = {name: value.tolist() for name, value in found.items() if isinstance(value, Tensor)}
        self.note(trainer, values)


class SetsRates(Watches):
    """Sets the rate by hand in front of each step."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 / (2 + trainer.global_step)


class StopsEarly(Watches):
    """Ends training in the second epoch."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.current_epoch == 1


class KeepsState(Watches):
    """A counter in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def on_fit_end(self, *_: Any) -> None:
        self.seen = {"count": self.count}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Averages(Watches):
    """A moving average of the weights by hand."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.kept = {name: param.detach().clone().float() for name, param in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for name, param in pl_module.named_parameters():
            self.kept[name].lerp_(param.detach().float(), 0.25)
        self.note(trainer, _sums(self.kept.values()))


class ReadsGradients(Watches):
    """Reads gradients in front of each step."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.note(trainer, _sums(param.grad for param in pl_module.parameters() if param.grad is not None))


class Measures(Watches):
    """A metric in a callback, over what steps of validation and training get."""

    def __init__(self, form: str) -> None:
        from torchmetrics.classification import MulticlassAccuracy

        super().__init__()
        self.form, self.metric = form, MulticlassAccuracy(CLASSES)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        parts = read(batch, self.form)
        self.metric.update(parts.x[:, :CLASSES], parts.y)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("of_callback", self.metric.compute())
        self.metric.reset()


class Unfreezes(BaseFinetuning):
    """Lightning's way to unfreeze."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(self._first(pl_module))

    @staticmethod
    def _first(pl_module: LightningModule) -> torch.nn.Module:
        net: torch.nn.Module = pl_module.net  # type: ignore[assignment]
        return next(module for module in net.modules() if list(module.parameters(recurse=False)))

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(self._first(pl_module), optimizer, lr=0.01)


def _average() -> Callback:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return EMAWeightAveraging(decay=0.75)


CALLBACKS: Mapping[str, Callable[[Program, Path], Callback]] = {
    "cb-read": lambda program, folder: ReadsWeights(),
    "cb-edit": lambda program, folder: EditsWeights(),
    "cb-optimizer": lambda program, folder: EditsState(),
    "cb-outputs": lambda program, folder: ReadsOutputs(),
    "cb-sets-rates": lambda program, folder: SetsRates(),
    "cb-stops": lambda program, folder: StopsEarly(),
    "cb-state": lambda program, folder: KeepsState(),
    "cb-ema": lambda program, folder: Averages(),
    "cb-grads": lambda program, folder: ReadsGradients(),
    "cb-best": lambda program, folder: ModelCheckpoint(folder / "best", "{epoch}", "watched", save_top_k=1),
    "cb-rates": lambda program, folder: LearningRateMonitor(),
    "cb-early": lambda program, folder: EarlyStopping("watched", patience=1),
    "cb-average": lambda program, folder: _average(),
    "cb-unfreeze": lambda program, folder: Unfreezes(),
    "metric=callback": lambda program, folder: Measures(program["batch"]),
    "stop=file": lambda program, folder: KillSwitch(folder / "stop", check_every=0.0),
}


def callbacks_of(program: Program, folder: Path) -> list[Callback]:
    """The callbacks of a program.

    Args:
        program: the program.
        folder: folder of its run.
    """
    return [CALLBACKS[feature](program, folder) for feature in program.features if feature in CALLBACKS]


def seen_by(callbacks: list[Callback]) -> dict[str, Any]:
    """What callbacks saw, by class."""
    seen: dict[str, Any] = {type(each).__name__: each.seen for each in callbacks if isinstance(each, Watches)}
    for each in callbacks:
        if isinstance(each, ModelCheckpoint) and each.monitor:
            score = each.best_model_score
            seen["best"] = [None if score is None else float(score), Path(each.best_model_path).name]
        if isinstance(each, EarlyStopping):
            seen["early"] = [each.stopped_epoch, float(each.best_score), each.wait_count]
    return seen
