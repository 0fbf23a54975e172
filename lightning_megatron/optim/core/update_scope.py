"""Update scope of an optimizer: the values that its update of one element reads, which one rank must hold."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch.optim import Optimizer

from lightning_megatron.errors import Problem
from lightning_megatron.ops.adamw import is_fused_adamw

OptimizerRef = str | type[Optimizer]
"""An optimizer class, its import path, or its bare name."""


class UpdateScope(Enum):
    """The values that the update of one element depends on."""

    ELEMENT = "element"
    PARAMETER = "parameter"
    MODEL = "model"


ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Optimizers of torch whose update of an element depends on that element alone."""


@dataclass(frozen=True)
class KnownOptimizer:
    """An optimizer whose source code has been reviewed.

    Attributes:
        path: module and name of the class.
        scope: its update scope.
        unless: group settings that widen the scope to the model when they are on.
    """

    path: str
    scope: UpdateScope = UpdateScope.ELEMENT
    unless: tuple[str, ...] = ()


_WIDE = ("use_gc", "adanorm", "cautious", "stable_adamw")  # means and norms over a tensor
KNOWN: tuple[KnownOptimizer, ...] = (
    KnownOptimizer("torch.optim.Muon", UpdateScope.PARAMETER),
    KnownOptimizer("torch.optim.Adafactor", UpdateScope.PARAMETER),
    KnownOptimizer("lion_pytorch.lion_pytorch.Lion"),
    KnownOptimizer("adan_pytorch.adan.Adan", unless=("restart_cond",)),
    KnownOptimizer("adabelief_pytorch.AdaBelief.AdaBelief"),
    KnownOptimizer("pytorch_optimizer.optimizer.lion.Lion", unless=_WIDE),
    KnownOptimizer("pytorch_optimizer.optimizer.adan.Adan", unless=(*_WIDE, "max_grad_norm")),
    KnownOptimizer("pytorch_optimizer.optimizer.ademamix.AdEMAMix", unless=_WIDE),
    KnownOptimizer("pytorch_optimizer.optimizer.adabelief.AdaBelief", unless=_WIDE),
)
"""Reviewed at lion-pytorch 0.2.5, adan-pytorch 0.1.0, adabelief-pytorch 0.2.1, pytorch_optimizer 4.1.0."""


def update_scope(optimizer: Optimizer, elementwise: Sequence[OptimizerRef] = ()) -> UpdateScope:
    """The update scope of ``optimizer``: the whole model if it is neither known nor named in ``elementwise``."""
    if is_fused_adamw(optimizer) or _computes_like(type(optimizer), ELEMENTWISE):
        return UpdateScope.ELEMENT
    if any(_is(type(optimizer), given) for given in elementwise):
        return UpdateScope.ELEMENT
    for known in KNOWN:
        if _path(type(optimizer)) == known.path:
            wide = any(group.get(name) for group in optimizer.param_groups for name in known.unless)
            return UpdateScope.MODEL if wide else known.scope
    return UpdateScope.MODEL


def has_train_eval_modes(optimizer: Optimizer) -> bool:
    """True if an optimizer swaps the parameters' values between training and evaluation (ScheduleFree)."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def elementwise_problems(elementwise: Sequence[OptimizerRef]) -> list[Problem]:
    """Entries of ``elementwise_optimizers`` that name no optimizer."""
    found = []
    for given in elementwise:
        if isinstance(given, str) and "." not in given:
            continue
        kind = _imported(given) if isinstance(given, str) else given
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            reason = "is no optimizer: give its class, its import path, or its bare name"
            found.append(Problem("elementwise_optimizers", given, reason))
    return found


def _is(kind: type[Optimizer], given: OptimizerRef) -> bool:
    if isinstance(given, type):
        return kind is given
    return kind.__name__ == given if "." not in given else kind is _imported(given)


def _imported(path: str) -> object:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _computes_like(kind: type[Optimizer], bases: Sequence[type[Optimizer]]) -> bool:
    """True for one of ``bases``, or a subclass that does not override ``step`` (LARS, a subclass of SGD, does)."""
    return any(issubclass(kind, base) and _step(kind) is _step(base) for base in bases)


def _step(kind: type[Optimizer]) -> object:
    return inspect.unwrap(kind.step)  # torch wraps the method of every class it instantiates
