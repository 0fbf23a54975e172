"""The grammar of checkpoint keys, which only this module builds and parses.

========================================  =========================================================================
``model.<name>``                          parameter or buffer, by its name in ``state_dict()``
``<version>.<name>``                      the same tensor in another version of the weights (weight averaging)
``optimizer_<i>.state.<name>.master``     main values of the parameter, in its shape
``optimizer_<i>.state.<name>.<state>``    state of the optimizer, in the parameter's shape or a scalar (``step``)
``optimizer_<i>.state.<name>.whole``      state of an optimizer that is not element-wise, in a form of its own
``optimizer_<i>.param_groups``            settings of the groups, and the names of their parameters
``per_rank.pp<p>-dp<d>-cp<c>-tp<t>``      values that only the rank at these coordinates can use
========================================  =========================================================================

These names are on disk: they change with a new version of the format only. The keys of ``meta.pt`` are Lightning's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

MODEL = "model"
MAIN = "master"
"""State of an optimizer under which the main values of a parameter are saved."""

_CALIBRATION = re.compile(r"(.+\.)?((qkv|out|fc1|fc2)\.products|experts\.products\.fc[12])\.(amax_history|scale)")
"""Names of the calibration of fp8 products, of linear layers and of experts; earlier versions saved scales too."""

_PER_RANK = "per_rank"
_PARAM_GROUPS = "param_groups"
_WHOLE = "whole"
_STATE = "state."
_OPTIMIZER = re.compile(r"optimizer_([0-9]+)")


@dataclass(frozen=True)
class Key:
    """A key in its parts. ``str(Key.parse(text)) == text`` for every text.

    Attributes:
        family: first word: ``model``, ``optimizer_0``, ``per_rank`` or the name of a version of the weights.
        name: global name of a parameter or buffer; in other keys all that follows the family.
        state: name of a parameter's optimizer state; empty in other keys.
    """

    family: str
    name: str = ""
    state: str = ""

    @classmethod
    def parse(cls, text: str) -> Key:
        """Parse a key. A text outside the grammar becomes a key with a family of its own."""
        family, _, rest = text.partition(".")
        if not rest:
            return cls(text)
        if _OPTIMIZER.fullmatch(family) and rest.startswith(_STATE):
            name, dot, state = rest.removeprefix(_STATE).rpartition(".")
            if dot and state:
                return cls(family, name, state)
        return cls(family, rest)

    def __str__(self) -> str:
        return ".".join(self.path)

    @property
    def path(self) -> tuple[str, ...]:
        """Place in the nested dictionary that tools like Lightning's ``consolidate_checkpoint`` rebuild."""
        if self.state:
            return self.family, "state", self.name, self.state
        return (self.family, self.name) if self.name else (self.family,)

    @property
    def is_model(self) -> bool:
        """True for a tensor of the model."""
        return self.family == MODEL and bool(self.name)

    @property
    def is_calibration(self) -> bool:
        """True for fp8 calibration of a layer, in any version of the weights.

        It is no part of the model: a checkpoint loads even if it lacks this state, or has it for a layer without fp8.
        """
        return _CALIBRATION.fullmatch(self.name) is not None

    @property
    def is_main(self) -> bool:
        """True for main values of a parameter."""
        return self.state == MAIN

    @property
    def is_whole(self) -> bool:
        """True for all state that an optimizer which is not element-wise keeps of a parameter."""
        return self.state == _WHOLE

    @property
    def is_of_rank(self) -> bool:
        """True for values that only the rank at some coordinates can use."""
        return self.family == _PER_RANK

    @property
    def is_optimizer(self) -> bool:
        """True for the state of an optimizer, its groups included."""
        return _OPTIMIZER.fullmatch(self.family) is not None


def model_key(name: str) -> str:
    """Key of a parameter or buffer of the model."""
    return str(Key(MODEL, name))


def version_key(version: str, name: str) -> str:
    """Key of a parameter or buffer in another version of the weights."""
    return str(Key(version, name))


def optimizer_family(index: int) -> str:
    """First word of all keys of one optimizer."""
    return f"optimizer_{index}"


def state_key(index: int, name: str, state: str) -> str:
    """Key of one kind of optimizer state of a parameter."""
    return str(Key(optimizer_family(index), name, state))


def whole_state_key(index: int, name: str) -> str:
    """Key of all state that an optimizer which is not element-wise keeps of a parameter."""
    return state_key(index, name, _WHOLE)


def groups_key(index: int) -> str:
    """Key of one optimizer's groups."""
    return groups_of(optimizer_family(index))


def groups_of(family: str) -> str:
    """Key of the groups of an optimizer's family."""
    return str(Key(family, _PARAM_GROUPS))


def is_groups(key: str) -> bool:
    """True for the key of an optimizer's groups."""
    parsed = Key.parse(key)
    return parsed.is_optimizer and parsed.name == _PARAM_GROUPS and not parsed.state


def rank_key(pp: int, dp: int, cp: int, tp: int) -> str:
    """Key of values that only the rank at these coordinates of the same layout can use."""
    return str(Key(_PER_RANK, f"pp{pp}-dp{dp}-cp{cp}-tp{tp}"))


def not_begun(asked: Iterable[str], saved: Iterable[str], alike: Collection[str]) -> set[str]:
    """Those of the keys asked for that are state of parameters whose saved optimizer has none: no gradient so far.

    The optimizer has state of others, or its family is among those ``alike``; else it is of another kind.
    """
    parsed = [key for key in map(Key.parse, saved) if key.state]
    begun = {(key.family, key.name) for key in parsed if not key.is_main}
    families = {family for family, _ in begun}.union(alike)
    others = {(key.family, key.name) for key in parsed if key.family in families} - begun
    wanted = {text: Key.parse(text) for text in asked}
    return {text for text, key in wanted.items() if (key.family, key.name) in others and not key.is_main}


def model_name(key: str) -> str | None:
    """Name of the parameter or buffer that a key belongs to; ``None`` for a key that is not the model's."""
    parsed = Key.parse(key)
    return parsed.name if parsed.is_model else None
