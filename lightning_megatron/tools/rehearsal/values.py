"""Values of small fake tensors, as far as they follow from constants of the program and from its batch.

Fake tensors have no values, and a training step reads a few: counts, flags, random seeds, rows for each expert. Here
the values of small tensors are computed next to the fake ones as long as all their inputs are known: constants,
ranges, the batch. Two assumptions go further, and are stated in the docs: every number is finite, and all ranks hold
the values that this one holds. Reading any other value raises an error that names it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.tools.rehearsal.errors import RehearsalError
from lightning_megatron.tools.rehearsal.torch_private import is_summing, signature_of, without_fake_tensors

_LIMIT = 1 << 25
"""Largest number of elements whose values are kept: a flag for each row of the largest bucket."""
_MOST_MADE = 1 << 22
"""Largest number of elements of a constant whose values are kept."""
_MOST_FLOATS = 1 << 12
"""Largest number of floating-point numbers whose values are kept: weights and activations are not read by a program."""

_aten = torch.ops.aten
_UNDEFINED = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_OVERWRITES = {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
_LIFTS = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default}
_RANDOM_IN_PLACE = {_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.random_.default}
_MOST_RANDOM = 16
"""Largest number of random values that are drawn: seeds are, weights are not."""


class GroupPlace(NamedTuple):
    """Place of a rank in the collective that runs.

    Attributes:
        rank: position in the group.
        size: ranks of the group.
        gathers: True for an all-gather, in which each broadcast fills one rank's piece.
    """

    rank: int
    size: int
    gathers: bool


class _Shadow:
    """Values of a storage, with a flag for each element that is known."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.flat = torch.zeros(numel, dtype=dtype)
        self.known = torch.zeros(numel, dtype=torch.bool)


class KnownValues:
    """Known values of fake tensors.

    Args:
        place: function that gives this rank's place in the collective that runs; ``None`` where it is not known.
    """

    def __init__(self, place: Callable[[], GroupPlace | None]) -> None:
        self._place = place
        self._shadows: dict[int, tuple[_Shadow, weakref.ref[Any]]] = {}
        self._signatures: dict[Any, Any] = {}

    # Reading and writing

    def know(self, fake: Tensor, value: Tensor) -> None:
        """Set the values of a fake tensor."""
        with without_fake_tensors():
            self._write(fake, value, at_most=_LIMIT)

    def of(self, fake: Tensor) -> Tensor | None:
        """Values of a fake tensor; ``None`` if some of them are not known."""
        with without_fake_tensors():
            return self._read(fake)

    def _read(self, fake: Tensor, shift: int = 0) -> Tensor | None:
        """Values of a fake tensor, or of one that lies ``shift`` elements behind it in the same storage."""
        if not fake.numel():
            return torch.empty(fake.shape, dtype=fake.dtype)
        found = self._shadows.get(id(fake.untyped_storage()))
        if found is None or found[0].flat.dtype != fake.dtype:
            return None
        shadow = found[0]
        place = tuple(fake.shape), fake.stride(), fake.storage_offset() + shift
        if not bool(shadow.known.as_strided(*place).all()):
            return None
        return shadow.flat.as_strided(*place)

    def _write(self, fake: Tensor, value: Tensor | None, at_most: int | None = None) -> None:
        storage = fake.untyped_storage()
        found = self._shadows.get(id(storage))
        if found is None:
            numel = storage.nbytes() // fake.element_size()
            if at_most is None:
                at_most = _MOST_FLOATS if fake.is_floating_point() else _LIMIT
            if value is None or numel > at_most:
                return
            key = id(storage)
            found = _Shadow(numel, fake.dtype), weakref.ref(storage, lambda _: self._shadows.pop(key, None))
            self._shadows[key] = found
        shadow = found[0]
        if shadow.flat.dtype != fake.dtype:
            del self._shadows[id(storage)]
            return
        place = tuple(fake.shape), fake.stride(), fake.storage_offset()
        if value is not None:
            shadow.flat.as_strided(*place).copy_(value)
        shadow.known.as_strided(*place).fill_(value is not None)

    # Following a program

    def item(self, fake: Tensor) -> Any:
        """The value of a tensor of one element.

        Raises:
            RehearsalError: if it is not known.
        """
        value = self.of(fake)
        if value is None:
            raise RehearsalError(
                f"the program reads a value of a {str(fake.dtype).removeprefix('torch.')} tensor that depends on"
                " weights or on other ranks, of which a rehearsal has only shapes"
            )
        with without_fake_tensors():
            return value.item()

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operator on known values; ``None`` if an input is not known."""
        with without_fake_tensors():
            real, known = self._real((args, kwargs))
            return func(*real[0], **_on_host(real[1])) if known else None

    def _real(self, tree: Any) -> tuple[Any, bool]:
        """A structure of arguments with values in place of fake tensors; False if one is not known."""
        if isinstance(tree, Tensor):
            value = self._read(tree)
            return value, value is not None
        if isinstance(tree, dict):
            found = {name: self._real(item) for name, item in tree.items()}
            return {name: item for name, (item, _) in found.items()}, all(known for _, known in found.values())
        if isinstance(tree, list | tuple):
            items = [self._real(item) for item in tree]
            return type(tree)(item for item, _ in items), all(known for _, known in items)
        return tree, True

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Compute the values of an operator's results, after it has run on fake tensors."""
        if func.namespace == "c10d":
            self._follow_collective(func, args)
            return
        if func in _LIFTS:  # a constant of the program becomes a fake tensor
            self.know(out, args[0])
            return
        signature = self._signatures.get(func)
        if signature is None:
            signature = self._signatures[func] = signature_of(func)
        if signature.is_view:
            return
        written = [args[i] for i in signature.written if i < len(args)]
        written += [kwargs[name] for name in signature.written_names if name in kwargs]
        written = list(_tensors(written))
        fresh = [] if written else list(_tensors(out))
        if all(tensor.numel() <= _LIMIT for tensor in fresh):
            with without_fake_tensors():
                self._follow_local(func, args, kwargs, fresh, written)

    def _follow_local(self, func: Any, args: Any, kwargs: Any, fresh: list[Tensor], written: list[Tensor]) -> None:
        """Values after an operator that is no collective: those of the tensors that it returns or writes to."""
        inputs = list(_tensors((args, kwargs)))
        assumed = _assumed_finite(func, args)
        if assumed is not None:
            for tensor in fresh:
                self._write(tensor, torch.full(tensor.shape, assumed))
        elif not inputs:
            self._make(func, args, kwargs, fresh)
        elif func is _aten.stack.default:
            self._stack(inputs, fresh[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))
        elif func in _OVERWRITES:
            self._overwrite(func, args)
        elif func in _UNDEFINED or func in _RANDOM_IN_PLACE or not self._known(inputs):
            for tensor in written:
                self._write(tensor, None)
        else:
            self._repeat(func, args, kwargs, fresh, written)

    def _known(self, inputs: list[Tensor]) -> bool:
        """True if the values of all inputs are known; asks first if they are kept at all."""
        shadows = self._shadows
        return all(id(t.untyped_storage()) in shadows or not t.numel() for t in inputs) and all(
            self._read(t) is not None for t in inputs
        )

    def _make(self, func: Any, args: Any, kwargs: Any, fresh: list[Tensor]) -> None:
        """Values of a tensor that is made from numbers."""
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if any(t.numel() > _MOST_MADE for t in fresh):
            return
        if func in _UNDEFINED or (is_random and any(t.numel() > _MOST_RANDOM for t in fresh)):
            return
        real = func(*args, **_on_host(kwargs))
        for fake, value in zip(fresh, _tensors(real), strict=True):
            self._write(fake, value)

    def _stack(self, parts: list[Tensor], out: Tensor, dim: int) -> None:
        """Values of stacked tensors, some of which may be unknown."""
        values = [self._read(part) for part in parts]
        if all(value is None for value in values):
            return
        filled = [torch.zeros(p.shape, dtype=p.dtype) if v is None else v for p, v in zip(parts, values, strict=True)]
        known = [torch.full(p.shape, v is not None) for p, v in zip(parts, values, strict=True)]
        self._write(out, torch.stack(filled, dim).to(out.dtype))
        shadow = self._shadows.get(id(out.untyped_storage()))
        if shadow is not None:
            place = tuple(out.shape), out.stride(), out.storage_offset()
            shadow[0].known.as_strided(*place).copy_(torch.stack(known, dim))

    def _overwrite(self, func: Any, args: Any) -> None:
        target = args[0]
        if func is _aten.zero_.default:
            value: Any = 0
        else:
            value = args[1] if not isinstance(args[1], Tensor) else self._read(args[1])
        if value is None or target.untyped_storage().nbytes() // target.element_size() > _LIMIT:
            self._write(target, None)
            if func is _aten.copy_.default and target.shape == args[1].shape:
                self._copy_partly(target, args[1])
            return
        self._write(target, torch.as_tensor(value).expand(target.shape).to(target.dtype))

    def _copy_partly(self, target: Tensor, source: Tensor) -> None:
        """Values of a copy, where only some of the source are known."""
        given, kept = (self._shadows.get(id(x.untyped_storage())) for x in (source, target))
        if given is None or kept is None or given[0].flat.dtype != source.dtype or kept[0].flat.dtype != target.dtype:
            return
        here = tuple(target.shape), target.stride(), target.storage_offset()
        there = tuple(source.shape), source.stride(), source.storage_offset()
        kept[0].flat.as_strided(*here).copy_(given[0].flat.as_strided(*there))
        kept[0].known.as_strided(*here).copy_(given[0].known.as_strided(*there))

    def _repeat(self, func: Any, args: Any, kwargs: Any, fresh: list[Tensor], written: list[Tensor]) -> None:
        real, _ = self._real((args, kwargs))
        result = func(*real[0], **_on_host(real[1]))  # what it writes, it writes to the kept values
        if not written:
            for fake, value in zip(fresh, _tensors(result), strict=True):
                self._write(fake, value)

    def _follow_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        """Values after a collective if all ranks hold the same values; those of a received message are unknown."""
        name = func.name().removeprefix("c10d::")
        with without_fake_tensors():
            if name == "allreduce_":
                summing, place = is_summing(args[2]), self._place()
                for tensor in args[0]:
                    value = self._read(tensor)
                    if value is not None and summing:
                        self._write(tensor, None if place is None else value * place.size)
            elif name == "alltoall_base_":
                self._write(args[0], self._exchanged(args[1], args[3], args[4]))
            elif name == "broadcast_":
                place = self._place()
                if place is not None and place.gathers:  # otherwise the value of another rank is this one's
                    for piece in args[0]:
                        self._write(piece, self._read(piece, (place.rank - args[2]) * piece.numel()))
            else:
                for tensor in _tensors(args[0]):
                    self._write(tensor, None)

    def _exchanged(self, sent: Tensor, received_rows: Any, sent_rows: Any) -> Tensor | None:
        """Pieces that this rank receives from all ranks, if each of them sends the same as this one."""
        value, place = self._read(sent), self._place()
        if value is None or place is None or received_rows or sent_rows:
            return None
        own = value.unflatten(0, (place.size, value.shape[0] // place.size))[place.rank]
        return own.repeat(place.size, *(1,) * (own.ndim - 1))


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs


def _assumed_finite(func: Any, args: tuple[Any, ...]) -> bool | None:
    """Result of a check for NaN or infinity, which are assumed never to occur; ``None`` for other operators."""
    if func in (_aten.isnan.default, _aten.isinf.default):
        return False
    if func is _aten.eq.Tensor and args[0] is args[1]:
        return True
    if func in (_aten.ne.Scalar, _aten.eq.Scalar, _aten.lt.Scalar) and args[1] == math.inf:
        return func is not _aten.eq.Scalar
    return False if func is _aten.ne.Tensor and args[0] is args[1] else None
