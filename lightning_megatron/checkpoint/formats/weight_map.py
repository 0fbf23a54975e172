"""Between the tensors of another program's model and ours, one rule a tensor.

A rule names one of our full tensors, the tensors of theirs it is made of, and the two functions between them. So a
family is a list of rules, and whoever streams a large checkpoint can go through it tensor by tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError, Problem, nearest_names

_SHOWN_NAMES = 8


@dataclass(frozen=True)
class Rule:
    """One of our tensors and what it is made of.

    Attributes:
        ours: global name, as in ``GPTModel.state_dict()``.
        theirs: names in the other model.
        join: their tensors, in the order of ``theirs``, to ours.
        split: the inverse.
        repeats: further names under which their files may hold the same (tied) tensor.
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
        ours = {rule.ours: rule.join(*(tensors[found[name]] for name in rule.theirs)) for rule in self.rules}
        for rule in self.rules:
            for name in rule.repeats:
                if name in found:
                    check_tied(rule, ours[rule.ours], name, tensors[found[name]])
        return ours

    def located(self, names: Iterable[str]) -> dict[str, str]:
        """The name in their files of every tensor that the rules need, and of repeats that are there, by its full name.

        Raises:
            ConfigError: naming tensors that are missing, or that the model has no place for.
        """
        found = {full: name for name in names if (full := self.their_name(name)) is not None}
        needed = {name for rule in self.rules for name in rule.theirs}
        repeats = {name for rule in self.rules for name in rule.repeats}
        _same_names(self.theirs, found.keys() - repeats, needed)
        return {name: found[name] for name in needed | (repeats & found.keys())}

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


def check_tied(rule: Rule, joined: Tensor, name: str, repeat: Tensor) -> None:
    """Compare a tied tensor with the one that the files hold under its other name.

    Raises:
        ConfigError: if they differ, so that the model they are of does not tie them.
    """
    if not torch.equal(joined, rule.join(repeat).to(joined.dtype)):
        reason = f"the configuration ties it to {rule.theirs[0]}, and their values differ: say there that it does not"
        raise ConfigError([Problem("tensor", name, reason)])


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
