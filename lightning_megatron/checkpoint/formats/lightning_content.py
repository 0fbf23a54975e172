"""Lightning's checkpoint dictionary for a single file, assembled from the parts of all ranks in any layout."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from typing import Any, NamedTuple

import torch

from lightning_megatron.checkpoint.formats.lightning_file import MODEL_STATE, OPTIMIZERS
from lightning_megatron.checkpoint.formats.meta import NOTE
from lightning_megatron.checkpoint.formats.torch_file import TensorSlot
from lightning_megatron.checkpoint.tensors.fragment import Fragment
from lightning_megatron.checkpoint.tensors.keys import Key, groups_key, optimizer_family
from lightning_megatron.checkpoint.tensors.state_dict import State
from lightning_megatron.params import NO_PARAMETER, Box


class SavedName(NamedTuple):
    """A name of a ``state_dict``.

    Attributes:
        name: the name.
        key: key of its value in the state.
        shape: its shape in a model on one rank, padding included.
    """

    name: str
    key: str
    shape: tuple[int, ...]


class RankPart(NamedTuple):
    """One rank's part of a state, without the values of tensors.

    Attributes:
        names: names of the model and of its other versions on this rank.
        kinds: dtype and shape of each tensor.
        boxes: boxes of each tensor that this rank saves.
        plain: all other values.
    """

    names: Mapping[str, Sequence[SavedName]]
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    boxes: Mapping[str, Sequence[Box]]
    plain: Mapping[str, Any]

    @classmethod
    def of(cls, names: Mapping[str, Sequence[SavedName]], state: State) -> RankPart:
        """The part of this rank."""
        tensors = {key: value for key, value in state.items() if isinstance(value, Fragment)}
        kinds = {key: (value.dtype, value.shape) for key, value in tensors.items()}
        boxes = {key: [chunk.box for chunk in value.chunks if chunk.write] for key, value in tensors.items()}
        return cls(names, kinds, boxes, {key: value for key, value in state.items() if key not in tensors})


def content_of_file(meta: Mapping[str, Any], parts: Sequence[RankPart], *, has_stages: bool) -> dict[str, Any]:
    """Lightning's dictionary, with slots in the place of tensors, from the parts of all ranks.

    ``meta`` has everything but the model and the state of optimizers.
    """
    values: dict[str, Any] = {key: value for part in parts for key, value in part.plain.items()}
    own = {key: value for key, value in values.items() if Key.parse(key).is_of_rank}
    values |= _slots(parts)
    content = dict(meta)
    for version in parts[0].names:
        content[version] = _version([part.names[version] for part in parts], values)
    if OPTIMIZERS in content:
        order = list(content[MODEL_STATE]) if has_stages else None
        indices = takewhile(lambda index: groups_key(index) in values, count())
        content[OPTIMIZERS] = [_optimizer(index, values, order) for index in indices]
    return content | {NOTE: content.get(NOTE, {}) | {"per_rank": own}}


def _version(held: Sequence[Sequence[SavedName]], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    keys = {each.name: each.key for names in held for each in names}
    order = in_order_of_definition([[each.name for each in names] for names in held])
    return OrderedDict((name, values[keys[name]]) for name in order)


def _optimizer(index: int, values: Mapping[str, Any], order: list[str] | None) -> dict[str, Any]:
    """One entry of ``optimizer_states``; ``order`` is the model's order of names if groups list them stage by stage."""
    groups = values[groups_key(index)]
    if order is not None:
        place = {name: number for number, name in enumerate(order)}
        groups = [{**group, "params": sorted(group["params"], key=place.__getitem__)} for group in groups]
    return _numbered(groups, _state_of(index, values))


def _slots(parts: Sequence[RankPart]) -> dict[str, TensorSlot]:
    padded = {Key.parse(each.key).name: each.shape for part in parts for names in part.names.values() for each in names}
    kinds = {key: kind for part in parts for key, kind in part.kinds.items()}
    shapes = {key: padded.get(Key.parse(key).name, shape) if shape else shape for key, (_, shape) in kinds.items()}
    return {key: TensorSlot(key, dtype, shapes[key]) for key, (dtype, _) in kinds.items()}


def in_order_of_definition(stages: Sequence[Sequence[str]]) -> list[str]:
    """Merge the names of all pipeline stages into the order that a model in one process has.

    Each stage's order is kept. Of two names that are equal up to their first number, such as those of layers, the one
    with the smaller number comes first; otherwise that of the earlier stage.
    """
    found: dict[str, None] = {}
    rest = [deque(names) for names in dict.fromkeys(map(tuple, stages))]
    while rest := [names for names in rest if names]:
        first = rest[0]
        for names in rest[1:]:
            if _is_before(names[0], first[0]):
                first = names
        found[first.popleft()] = None
        for names in rest:
            while names and names[0] in found:  # copies of the first stage's embedding, and stages on several ranks
                names.popleft()
    return list(found)


def _is_before(name: str, other: str) -> bool:
    (prefix, number), (others, others_number) = map(_first_number, (name, other))
    return prefix == others and number < others_number


def _first_number(name: str) -> tuple[str, int]:
    match = re.match(r"(\D*)(\d+)", name)
    return (match[1], int(match[2])) if match is not None else (name, 0)


def _state_of(index: int, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """State of an optimizer by name of the parameter, without main values, which the file holds as the model's."""
    found: dict[str, dict[str, Any]] = {}
    for text, value in values.items():
        key = Key.parse(text)
        if key.family == optimizer_family(index) and key.state and not key.is_main:
            found.setdefault(key.name, {}).update(value if key.is_whole else {key.state: value})
    return found


def _numbered(groups: Sequence[Mapping[str, Any]], state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The format of ``Optimizer.state_dict()``, which numbers the parameters group by group."""
    names = [name for group in groups for name in group["params"]]
    numbers = iter(range(len(names)))
    told = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]
    kept = {number: dict(state[name]) for number, name in enumerate(names) if state.get(name)}
    beside = state.get(NO_PARAMETER, {})
    return {**beside, "state": kept | beside.get("state", {}), "param_groups": told}
