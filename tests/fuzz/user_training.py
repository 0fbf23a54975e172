"""Ways to write a training of ``user_programs.py``: logging, optimizers, schedules, loops by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from user_batches import Batch

RATE, EPSILON = 0.05, 1e-2
"""Optimizers that divide by a second moment add so much, else an update would be the sign of a rounding error."""


# Logging: functions of the module, where it is ("train", "val"), loss and batch


def _by_step(module: Any, where: str, loss: Tensor, batch: Batch) -> None:
    module.log(f"{where}/loss", loss, prog_bar=True)


def _by_both(module: Any, where: str, loss: Tensor, batch: Batch) -> None:
    module.log(f"{where}_loss", loss.detach(), on_step=True, on_epoch=True)


def _by_logger(module: Any, where: str, loss: Tensor, batch: Batch) -> None:
    if module.logger is not None:
        module.logger.log_metrics({f"{where}_own": float(loss.detach())}, step=module.global_step)


def _by_size(module: Any, where: str, loss: Tensor, batch: Batch) -> None:
    """A mean over units other than samples; in even numbers, since stock Lightning halves sums of ranks in integers."""
    counts = 2 + 2 * batch.y
    mean = (batch.x.mean(1) * counts).sum() / counts.sum()
    options = {"on_step": False, "on_epoch": True, "sync_dist": True}
    module.log(f"{where}_sized", mean, batch_size=int(counts.sum()), **options)


LOG: Mapping[str, Callable[[Any, str, Tensor, Batch], None]] = {
    "none": lambda module, where, loss, batch: None,
    "step": _by_step,
    "epoch": lambda module, where, loss, batch: module.log(f"{where}_loss", loss, on_step=False, on_epoch=True),
    "both": _by_both,
    "dict": lambda module, where, loss, batch: module.log_dict({f"{where}_loss": loss, f"{where}_half": loss / 2}),
    "sync": lambda module, where, loss, batch: module.log(f"{where}_loss", loss, on_epoch=True, sync_dist=True),
    "max": lambda module, where, loss, batch: module.log(
        f"{where}_max", batch.x.max(), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True
    ),
    "sum": lambda module, where, loss, batch: module.log(
        f"{where}_sum", batch.x.sum(), on_step=False, on_epoch=True, reduce_fx=torch.sum, sync_dist=True
    ),
    "size": _by_size,
    "float": lambda module, where, loss, batch: module.log(f"{where}_float", float(loss.detach()), on_epoch=True),
    "rank0": lambda module, where, loss, batch: module.log(f"{where}_rank0", loss, rank_zero_only=True),
    "logger": _by_logger,
    "hook": lambda module, where, loss, batch: None,  # see Hook in user_modules.py
}


# Optimizers: functions of halves of the parameters


def _groups(halves: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
    first, second = halves
    groups = [{"params": first, "lr": RATE / 5}, {"params": second, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, RATE, eps=EPSILON, weight_decay=0.1)


def _all(halves: list[list[nn.Parameter]]) -> list[nn.Parameter]:
    return [param for half in halves for param in half]


OPTIMIZERS: Mapping[str, Callable[[list[list[nn.Parameter]]], torch.optim.Optimizer]] = {
    "sgd": lambda halves: torch.optim.SGD(_all(halves), RATE),
    "momentum": lambda halves: torch.optim.SGD(_all(halves), RATE, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda halves: torch.optim.Adam(_all(halves), RATE, eps=EPSILON),
    "adamw": lambda halves: torch.optim.AdamW(_all(halves), RATE, eps=EPSILON, weight_decay=0.1, amsgrad=True),
    "groups": _groups,
    "rmsprop": lambda halves: torch.optim.RMSprop(_all(halves), RATE / 10, eps=EPSILON, momentum=0.5),
    "adagrad": lambda halves: torch.optim.Adagrad(_all(halves), RATE, eps=EPSILON),
}


# Schedules: functions of an optimizer; what they return stands in configure_optimizers


def _by_group(optimizer: torch.optim.Optimizer) -> Any:
    return {"scheduler": schedules.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)), "interval": "step"}


def _plateau(optimizer: torch.optim.Optimizer) -> Any:
    plateau = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return {"scheduler": plateau, "monitor": "watched", "interval": "epoch"}


def _sequence(optimizer: torch.optim.Optimizer) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=2), schedules.CosineAnnealingLR(optimizer, 5)]
    return {"scheduler": schedules.SequentialLR(optimizer, parts, [2]), "interval": "step"}


SCHEDULES: Mapping[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: {"scheduler": schedules.StepLR(optimizer, 1, 0.8), "interval": "step"},
    "epoch": lambda optimizer: schedules.ExponentialLR(optimizer, 0.5),
    "lambda": _by_group,
    "one-cycle": lambda optimizer: {
        "scheduler": schedules.OneCycleLR(optimizer, RATE, total_steps=40),
        "interval": "step",
    },
    "restarts": lambda optimizer: {
        "scheduler": schedules.CosineAnnealingWarmRestarts(optimizer, 3),
        "interval": "step",
        "name": "restarts",
    },
    "plateau": _plateau,
    "sequence": _sequence,
    "second": lambda optimizer: {
        "scheduler": schedules.StepLR(optimizer, 1, 0.5),
        "interval": "step",
        "frequency": 2,
    },
    "own": lambda optimizer: {"scheduler": schedules.StepLR(optimizer, 1, 0.9), "interval": "step"},
}


# Loops by hand: functions of the module, its batch and the number of the batch; they return the loss


def _one(module: Any, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    loss, out = module.objective(batch)
    module.manual_backward(loss)
    optimizer.step()
    return loss, out


def _two(module: Any, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
    for optimizer in module.optimizers():
        module.toggle_optimizer(optimizer)
        loss, out = module.objective(batch)
        optimizer.zero_grad()
        module.manual_backward(loss)
        module.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        module.untoggle_optimizer(optimizer)
    return loss, out


def _sum(module: Any, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
    loss, out = module.objective(batch)
    module.manual_backward(loss / 2)
    if number % 2:
        module.optimizers().step()
        module.optimizers().zero_grad()
    return loss, out


def _closure(module: Any, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
    optimizer, found = module.optimizers(), []

    def closure() -> Tensor:
        loss, out = module.objective(batch)
        optimizer.zero_grad()
        module.manual_backward(loss)
        found.append((loss, out))
        return loss

    optimizer.step(closure=closure)
    return found[0]


LOOPS: Mapping[str, Callable[[Any, Batch, int], tuple[Tensor, Tensor]]] = {
    "automatic": lambda module, batch, number: module.objective(batch),
    "manual": _one,
    "manual-two": _two,
    "manual-sum": _sum,
    "manual-closure": _closure,
}
