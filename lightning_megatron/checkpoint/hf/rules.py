"""Between the tensors of a Hugging Face model and ours, one rule a tensor.

A rule names one of our full tensors, the tensors of theirs it is made of, and the two functions between them. So a
family is a list of rules, and whoever streams a large checkpoint can go through it tensor by tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron.config import ConfigError, Problem, nearest_names

_SHOWN_NAMES = 8


class HFShape(Protocol):
    """What the rules must know of a model; ``TransformerConfig`` is one."""

    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_query_groups(self) -> int: ...  # noqa: D102
    @property
    def add_bias_linear(self) -> bool: ...  # noqa: D102
    @property
    def tie_embeddings(self) -> bool: ...  # noqa: D102
    @property
    def num_experts(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Rule:
    """One of our tensors and what it is made of.

    Attributes:
        ours: global name, as in ``GPTModel.state_dict()``.
        theirs: names in the Hugging Face model.
        join: their tensors, in the order of ``theirs``, to ours.
        split: the inverse.
        repeats: further names under which a Hugging Face ``state_dict`` shows the same (tied) tensor.
    """

    ours: str
    theirs: tuple[str, ...]
    join: Callable[..., Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]
    repeats: tuple[str, ...] = ()


def same(ours: str, theirs: str, *repeats: str) -> Rule:
    """A tensor that both sides hold alike."""
    return Rule(ours, (theirs,), lambda x: x, lambda x: (x,), repeats)


def transposed(ours: str, theirs: str) -> Rule:
    """A matrix that they store as ``[in, out]``."""
    return Rule(ours, (theirs,), lambda x: x.t().contiguous(), lambda x: (x.t().contiguous(),))


def stacked(ours: str, *theirs: str) -> Rule:
    """Tensors of theirs along a new first dimension of ours (gate and up: ``[2, F, H]``)."""
    return Rule(ours, theirs, lambda *xs: torch.stack(xs), lambda x: tuple(part.contiguous() for part in x.unbind()))


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """``[N D, ...]``, ``[G D, ...]`` twice, to rows ``[q.., k, v]`` of each query group, end to end.

    Raises:
        ConfigError: if the rows do not split over the groups.
    """
    if q.shape[0] % groups or k.shape[0] % groups or k.shape != v.shape:
        reason = f"queries of {q.shape[0]} rows, keys of {k.shape[0]} and values of {v.shape[0]} do not form groups"
        raise ConfigError([Problem("num_query_groups", groups, reason)])
    return torch.cat([x.unflatten(0, (groups, -1)) for x in (q, k, v)], dim=1).flatten(0, 1)


def split_qkv(fused: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of :func:`fuse_qkv`."""
    queries = heads // groups
    head_dim = fused.shape[0] // (heads + 2 * groups)
    q, k, v = fused.unflatten(0, (groups, -1)).split([queries * head_dim, head_dim, head_dim], dim=1)
    return q.flatten(0, 1).contiguous(), k.flatten(0, 1).contiguous(), v.flatten(0, 1).contiguous()


@dataclass(frozen=True)
class WeightMap:
    """The rules of one model, both ways.

    Attributes:
        rules: one for each of our tensors.
        ignored: pattern of their names that hold no parameter (buffers of older versions).
        prefix: of their names; files of the model without its head leave it out.
        theirs: what to call their tensors in messages.
    """

    rules: tuple[Rule, ...]
    ignored: str
    prefix: str
    theirs: str = "Hugging Face tensors"

    def their_name(self, name: str) -> str | None:
        """The full name of a tensor in one of their files; ``None`` if it holds nothing of ours."""
        if re.search(self.ignored, name):
            return None
        known = name.startswith((self.prefix, "lm_head."))
        return name if known else self.prefix + name

    def to_ours(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors of our model from a Hugging Face ``state_dict``.

        Raises:
            ConfigError: naming tensors that are missing, or that the model has no place for.
        """
        found = self.located(tensors)
        return {rule.ours: rule.join(*(tensors[found[name]] for name in rule.theirs)) for rule in self.rules}

    def located(self, names: Iterable[str]) -> dict[str, str]:
        """The name in their files of every tensor that the rules need, by its full name.

        Raises:
            ConfigError: naming tensors that are missing, or that the model has no place for.
        """
        found = {full: name for name in names if (full := self.their_name(name)) is not None}
        needed = {name for rule in self.rules for name in rule.theirs}
        repeats = {name for rule in self.rules for name in rule.repeats}
        _same_names(self.theirs, found.keys() - repeats, needed)
        return {name: found[name] for name in needed}

    def check_ours(self, names: Iterable[str]) -> None:
        """Compare the names of our tensors with those of the rules.

        Raises:
            ConfigError: naming tensors that are missing, or that the family has no place for.
        """
        _same_names("tensors", names, {rule.ours for rule in self.rules})

    def to_hf(self, tensors: Mapping[str, Tensor], *, repeats: bool = False) -> dict[str, Tensor]:
        """A Hugging Face ``state_dict`` from full tensors of our model, vocabulary padding stripped.

        Args:
            tensors: by global name.
            repeats: show tied tensors under all their names, as ``state_dict()`` does and files do not.

        Raises:
            ConfigError: naming tensors that are missing, or that the family has no place for.
        """
        self.check_ours(tensors)
        out: dict[str, Tensor] = {}
        for rule in self.rules:
            out |= dict(zip(rule.theirs, rule.split(tensors[rule.ours]), strict=True))
            if repeats:
                out |= dict.fromkeys(rule.repeats, tensors[rule.ours])
        return out


def _same_names(what: str, given: Iterable[str], needed: Iterable[str]) -> None:
    given, needed = set(given), set(needed)
    found = []
    for verb, names, near in (("unknown", given - needed, needed - given), ("missing", needed - given, given - needed)):
        if names:
            some = sorted(names)
            more = f" and {len(some) - _SHOWN_NAMES} more" if len(some) > _SHOWN_NAMES else ""
            shown = ", ".join(some[:_SHOWN_NAMES]) + more
            found.append(Problem(what, shown, verb, nearest_names(some[0], sorted(near))[:3]))
    if found:
        raise ConfigError(found)


class Fields:
    """Reads another program's configuration, and collects what we have no counterpart for.

    Args:
        config: the contents of ``config.json``, or whatever else holds it.
        source: what to call it in messages.
    """

    def __init__(self, config: Mapping[str, Any], source: str = "Hugging Face configuration") -> None:
        self._config, self._source = config, source
        self._problems: list[Problem] = []

    def required(self, name: str) -> Any:
        """A field that must be there; 0 where it is not, and the fault noted."""
        if self._config.get(name) is None:
            self._problems.append(Problem(name, None, f"missing in the {self._source}"))
            return 0
        return self._config[name]

    def get(self, name: str, default: Any) -> Any:
        """A field, or what Hugging Face takes where it is left out or null."""
        value = self._config.get(name)
        return default if value is None else value

    def expect(self, name: str, default: Any, allowed: Sequence[Any], reason: str) -> Any:
        """A field of which we know only some values."""
        value = self.get(name, default)
        if value not in allowed:
            self.refuse(name, value, reason, tuple(allowed))
        return value

    def refuse(self, name: str, value: Any, reason: str, allowed: tuple[Any, ...] = ()) -> None:
        """Note a value that we cannot reproduce."""
        self._problems.append(Problem(name, value, reason, allowed))

    def finish(self) -> None:
        """Raise with everything noted.

        Raises:
            ConfigError: if there was anything.
        """
        if self._problems:
            raise ConfigError(self._problems)
