"""Whole models through the rules of a family, tensor by tensor: nothing is read before it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lightning_megatron.checkpoint.formats.weight_map import Rule, WeightMap, check_tied
from lightning_megatron.checkpoint.lazy_tensor import LazyTensor
from lightning_megatron.errors import CheckpointError
from lightning_megatron.finite import amount, not_finite

_SHOWN = 10


@dataclass(frozen=True)
class Split:
    """Tensors of theirs that one of ours gives, made together.

    Attributes:
        tensors: shape and dtype by name; tensors on the meta device.
        make: their values, in the same order.
    """

    tensors: Mapping[str, Tensor]
    make: Callable[[], Sequence[Tensor]]


def to_ours(
    theirs: Mapping[str, LazyTensor], rules: WeightMap, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, LazyTensor]:
    """Our tensors, each joined when it is made, and then compared with what the files call by another name.

    Args:
        theirs: tensors of a Hugging Face directory.
        rules: of the whole model.
        shapes: what this rank wants, by global name, with the shapes they must have.

    Raises:
        ConfigError: naming tensors of theirs that are missing, or that the model has no place for.
        CheckpointError: naming tensors of another shape.
    """
    places = rules.located(theirs)
    faults, found = [], {}
    for rule in rules.rules:
        if rule.ours not in shapes:
            continue
        parts = [theirs[places[name]] for name in rule.theirs]
        try:
            joined = rule.join(*(part.on_meta() for part in parts))
        except (RuntimeError, ValueError, AssertionError) as error:  # the last: torch 2.6, of a stack
            faults.append(f"{_shown(rule, parts)}: cannot be joined to {rule.ours}: {error}")
            continue
        if tuple(joined.shape) != shapes[rule.ours]:
            wanted = list(shapes[rule.ours])
            faults.append(f"{_shown(rule, parts)}: makes {rule.ours} {list(joined.shape)}, and the model's is {wanted}")
        repeats = {name: theirs[places[name]] for name in rule.repeats if name in places}
        found[rule.ours] = LazyTensor(tuple(joined.shape), joined.dtype, partial(_joined, rule, parts, repeats))
    if faults:
        more = [f"... and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise CheckpointError("\n  - ".join(["the tensors do not fit the model:", *faults[:_SHOWN], *more]))
    return found


def to_theirs(ours: Mapping[str, LazyTensor], rules: WeightMap) -> Iterator[Split]:
    """Their tensors, in the order of the rules.

    Raises:
        ConfigError: naming tensors of ours that are missing, or that the family has no place for.
    """
    rules.check_ours(ours)
    for rule in rules.rules:
        whole = ours[rule.ours]
        on_meta = dict(zip(rule.theirs, rule.split(whole.on_meta()), strict=True))
        yield Split(on_meta, partial(_split, rule, whole))


def _joined(rule: Rule, parts: Sequence[LazyTensor], repeats: Mapping[str, LazyTensor]) -> Tensor:
    theirs = [part.materialize() for part in parts]
    for name in not_finite(zip(rule.theirs, theirs, strict=True)):
        bad = amount(theirs[list(rule.theirs).index(name)])
        raise CheckpointError(f"{name}, of which {rule.ours} is made: {bad}")
    joined = rule.join(*theirs)
    for name, repeat in repeats.items():
        check_tied(rule, joined, name, repeat.materialize())
    return joined


def _split(rule: Rule, whole: LazyTensor) -> Sequence[Tensor]:
    return rule.split(whole.materialize())


def _shown(rule: Rule, parts: Sequence[LazyTensor]) -> str:
    pairs = [f"{name} {list(part.shape)}" for name, part in zip(rule.theirs, parts, strict=True)]
    return ", ".join(pairs[:3]) + (", ..." if len(pairs) > 3 else "")
