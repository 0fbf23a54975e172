"""Rules by which the frequencies of rotary positions are slowed for contexts longer than those of the pretraining."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal, get_args

from lightning_megatron.arguments import Rules, above, at_least, field_problems
from lightning_megatron.errors import Problem, nearest_names

_RULES: Rules = {
    "factor": above(0, 8.0),
    "low_freq_factor": above(0, 1.0),
    "high_freq_factor": above(0, 4.0),
    "original_max_position_embeddings": above(0, 8192),
    "beta_fast": above(0, 32.0),
    "beta_slow": above(0, 1.0),
    "attention_factor": at_least(0.0),
    "mscale": at_least(0.0),
    "mscale_all_dim": at_least(0.0),
}


@dataclass(frozen=True)
class _Scaling:
    """Base class of all rules."""

    def problems(self) -> list[Problem]:
        """Every fault of the fields."""
        known = [field.name for field in fields(self)]
        found = field_problems(self, {name: rule for name, rule in _RULES.items() if name in known})
        return [replace(each, argument=f"rope_scaling.{each.argument}") for each in found or self._misfits()]

    def _misfits(self) -> list[Problem]:
        """Faults of fields that must fit together."""
        return []

    @property
    def table_factor(self) -> float:
        """Factor of cosines and sines."""
        return 1.0


@dataclass(frozen=True)
class Llama3Scaling(_Scaling):
    """LLaMA 3.1's rule: frequencies of long wavelength are slowed, short ones kept, and those between interpolated.

    Source: the published LLaMA 3.1 configuration (``rope_type: llama3``).

    Attributes:
        factor: factor by which low frequencies are slowed.
        low_freq_factor: wavelengths above ``original_max_position_embeddings / low_freq_factor`` are slowed fully.
        high_freq_factor: wavelengths below ``original_max_position_embeddings / high_freq_factor`` are kept.
        original_max_position_embeddings: context length of the model's pretraining.
        kind: name of the rule.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    kind: Literal["llama3"] = "llama3"

    def _misfits(self) -> list[Problem]:
        if self.high_freq_factor > self.low_freq_factor:
            return []
        reason = f"must be above low_freq_factor={self.low_freq_factor}"
        return [Problem("high_freq_factor", self.high_freq_factor, reason, (4 * self.low_freq_factor,))]


@dataclass(frozen=True)
class LinearScaling(_Scaling):
    """All frequencies are slowed alike (https://arxiv.org/abs/2306.15595).

    Attributes:
        factor: factor by which they are slowed.
        kind: name of the rule.
    """

    factor: float
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True)
class DynamicScaling(_Scaling):
    """The base grows with the sequence, as soon as that is longer than ``original_max_position_embeddings``.

    The growth of the base slows low frequencies more than high ones. As in transformers every sequence has the
    frequencies of its own length; in generation a token keeps those of the length at which it was generated.

    Attributes:
        factor: ratio to the pretraining length at which the lowest frequency is slowed by about this factor.
        original_max_position_embeddings: context length of the model's pretraining.
        kind: name of the rule.
    """

    factor: float
    original_max_position_embeddings: int
    kind: Literal["dynamic"] = "dynamic"


@dataclass(frozen=True)
class YarnScaling(_Scaling):
    """YaRN (https://arxiv.org/abs/2309.00071): low frequencies are slowed, high ones kept, with a ramp between.

    Attributes:
        factor: factor by which low frequencies are slowed.
        original_max_position_embeddings: context length of the model's pretraining.
        beta_fast: rotations within that length from which on a frequency is kept.
        beta_slow: rotations within that length up to which a frequency is slowed fully.
        attention_factor: factor of cosines and sines; 0 derives it from ``factor`` and the next two.
        mscale: weight of ``log(factor)`` in the numerator of that factor; 0 for 1, and no denominator.
        mscale_all_dim: its weight in the denominator; 0 for no denominator.
        truncate: True if both ends of the ramp are rounded outwards to whole features.
        kind: name of the rule.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    kind: Literal["yarn"] = "yarn"

    @property
    def table_factor(self) -> float:
        """Factor of cosines and sines, which makes softmax sharper: both queries and keys are multiplied by it."""
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.sharpness(self.mscale) / self.sharpness(self.mscale_all_dim)
        return self.sharpness(1.0)

    def sharpness(self, weight: float) -> float:
        """``0.1 weight log(factor) + 1``, of factors above 1."""
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


RopeScaling = Llama3Scaling | LinearScaling | DynamicScaling | YarnScaling
_BY_KIND: Mapping[str, Any] = {each.kind: each for each in get_args(RopeScaling)}


def rope_scaling_of(given: object) -> tuple[Any, list[Problem]]:
    """A rule from its fields, among them ``kind``, and the faults; without ``kind`` it is LLaMA 3's.

    Args:
        given: a rule, a mapping of its fields, or ``None``.
    """
    if given is None or isinstance(given, RopeScaling):
        return given, [] if given is None else given.problems()
    if not isinstance(given, Mapping):
        reason = "must be a rule of scaling, a mapping of its fields, or None"
        return given, [Problem("rope_scaling", given, reason, (None,))]
    kind = given.get("kind", "llama3")
    if kind not in _BY_KIND:
        return given, [Problem("rope_scaling.kind", kind, "unknown", nearest_names(str(kind), list(_BY_KIND)))]
    rule = _BY_KIND[kind]
    known = [field.name for field in fields(rule)]
    found = [
        Problem(f"rope_scaling[{name!r}]", value, "no such field", nearest_names(str(name), known))
        for name, value in given.items()
        if name not in known
    ]
    needed = [field.name for field in fields(rule) if field.default is MISSING and field.name not in given]
    found += [Problem(f"rope_scaling.{name}", None, f"the rule {kind} needs it") for name in needed]
    if found:
        return given, found
    made = rule(**given)
    return made, made.problems()
