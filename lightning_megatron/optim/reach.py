"""Reach of an optimizer: how far it looks when it updates one element, and so how much must lie on one rank."""

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

Vouched = str | type[Optimizer]
"""An optimizer that a user calls element-wise: the class, its import path, or its bare name."""


class Reach(Enum):
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
"""torch's optimizers whose update of an element depends on that element alone."""


@dataclass(frozen=True)
class Known:
    """An optimizer of another package whose source has been read.

    Attributes:
        path: module and name of the class.
        reach: how far it looks.
        unless: settings of a group that make it look further when they are on.
    """

    path: str
    reach: Reach = Reach.ELEMENT
    unless: tuple[str, ...] = ()


_WIDE = ("use_gc", "adanorm", "cautious", "stable_adamw")  # means and norms over a tensor
KNOWN: tuple[Known, ...] = (
    Known("torch.optim.Muon", Reach.PARAMETER),
    Known("torch.optim.Adafactor", Reach.PARAMETER),
    Known("lion_pytorch.lion_pytorch.Lion"),
    Known("adan_pytorch.adan.Adan", unless=("restart_cond",)),
    Known("adabelief_pytorch.AdaBelief.AdaBelief"),
    Known("pytorch_optimizer.optimizer.lion.Lion", unless=_WIDE),
    Known("pytorch_optimizer.optimizer.adan.Adan", unless=(*_WIDE, "max_grad_norm")),
    Known("pytorch_optimizer.optimizer.ademamix.AdEMAMix", unless=_WIDE),
    Known("pytorch_optimizer.optimizer.adabelief.AdaBelief", unless=_WIDE),
)
"""Read at lion-pytorch 0.2.5, adan-pytorch 0.1.0, adabelief-pytorch 0.2.1, pytorch_optimizer 4.1.0."""


def reach_of(optimizer: Optimizer, vouched: Sequence[Vouched] = ()) -> Reach:
    """The reach of ``optimizer``: of one that nobody knows, the whole model.

    Args:
        optimizer: the user's.
        vouched: optimizers that the user calls element-wise.
    """
    if is_fused_adamw(optimizer) or _computes_like(type(optimizer), ELEMENTWISE):
        return Reach.ELEMENT
    if any(_is(type(optimizer), given) for given in vouched):
        return Reach.ELEMENT
    for known in KNOWN:
        if _path(type(optimizer)) == known.path:
            wide = any(group.get(name) for group in optimizer.param_groups for name in known.unless)
            return Reach.MODEL if wide else known.reach
    return Reach.MODEL


def has_modes(optimizer: Optimizer) -> bool:
    """True if an optimizer swaps the parameters' values between training and evaluation (ScheduleFree)."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def vouching_problems(vouched: Sequence[Vouched]) -> list[Problem]:
    """Paths that lead to no optimizer."""
    found = []
    for given in vouched:
        if isinstance(given, str) and "." not in given:
            continue
        kind = _imported(given) if isinstance(given, str) else given
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            reason = "is no optimizer: give its class, its import path, or its bare name"
            found.append(Problem("elementwise_optimizers", given, reason))
    return found


def _is(kind: type[Optimizer], given: Vouched) -> bool:
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
    """True if a class is one of ``bases``, or a subclass that leaves ``step`` alone (LARS is a subclass of SGD)."""
    return any(issubclass(kind, base) and _step(kind) is _step(base) for base in bases)


def _step(kind: type[Optimizer]) -> object:
    return inspect.unwrap(kind.step)  # torch wraps it, in each class that it makes an object of
