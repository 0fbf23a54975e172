"""Settings of an adapter; torch is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

from lightning_megatron.arguments import above, at_least, field_problems, within
from lightning_megatron.errors import Problem, raise_if_any

ALL_LINEAR = "all-linear"
"""Target that stands for every linear layer but the output layer and the routers of experts."""


@dataclass(frozen=True)
class LoRA:
    """An adapter: to a frozen weight ``W`` it adds ``alpha / rank x B A`` (https://arxiv.org/abs/2106.09685).

    ``A`` is drawn as PEFT draws it, and ``B`` is zero, so that training begins with the model as it is.

    Attributes:
        rank: rows of ``A``, and columns of ``B``.
        alpha: factor of the product, before its division by ``rank``.
        targets: names of linear layers in Hugging Face's model (``q_proj``, ``mlp.down_proj``, ``embed_tokens``,
            ``lm_head``): each stands for all modules whose name ends with it. ``"all-linear"`` for all of them but the
            output layer.
        dropout: probability of zeroing an element of an adapter's input in training.
        dora: True to learn the norm of each row of ``W + B A`` too (DoRA, https://arxiv.org/abs/2402.09353).
        rslora: True to divide ``alpha`` by the square root of ``rank`` instead (https://arxiv.org/abs/2312.03732).

    Raises:
        ConfigError: naming every value out of range.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: Sequence[str] | str = ALL_LINEAR
    dropout: float = 0.0
    dora: bool = False
    rslora: bool = False

    def __post_init__(self) -> None:
        rules = {"rank": at_least(1), "alpha": above(0.0), "dropout": within(0.0, 1.0)}
        found = field_problems(self, rules)
        if not self.names:
            found.append(Problem("targets", self.targets, "names no layer to adapt", (ALL_LINEAR,)))
        if self.dora and self.dropout:
            reason = "DoRA with dropout would need a second product with the frozen weight"
            found.append(Problem("dropout", self.dropout, reason, (0.0,)))
        raise_if_any(found)

    @property
    def names(self) -> tuple[str, ...]:
        """The targets."""
        return (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)

    @property
    def scale(self) -> float:
        """Factor of ``B A``."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)

    @property
    def plain(self) -> dict[str, Any]:
        """The fields as numbers, strings and lists."""
        return asdict(self) | {"targets": self.targets if isinstance(self.targets, str) else list(self.targets)}
