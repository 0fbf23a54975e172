"""Rules that convert tensors between another program's model and ours, and whole models by them, tensor by tensor.

A rule names one of our full tensors (native), the tensors of the other program that it is made of (foreign), and the
two functions between them. So a family is a list of rules, and a conversion holds one rule's tensors at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product

import torch
from torch import Tensor

from lightning_megatron.checkpoint.integrity.fault import listed
from lightning_megatron.checkpoint.tensors.fragment import part_of
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.device.finite import amount, not_finite
from lightning_megatron.errors import CheckpointError, ConfigError, Problem, nearest_names
from lightning_megatron.params import Box

_SHOWN_NAMES = 8


@dataclass(frozen=True)
class ForeignParts:
    """Parts of foreign tensors that make a box of ours.

    Attributes:
        boxes: a box of each foreign tensor; ``None`` for one that is not needed.
        join: function of these parts that gives the box.
    """

    boxes: tuple[Box | None, ...]
    join: Callable[..., Tensor]


def uncut(shape: tuple[int, ...], box: Box) -> ForeignParts | None:
    """``None``: each box of ours needs whole foreign tensors."""
    return None


@dataclass(frozen=True)
class WeightRule:
    """One of our tensors and the foreign tensors that it is made of.

    Attributes:
        native: global name, as in ``GPTModel.state_dict()``.
        foreign: names in the other model.
        join: function of the foreign tensors, in the order of ``foreign``, that gives ours.
        split: inverse of ``join``.
        repeats: further names under which the files may hold the same (tied) tensor.
        otherwise: name of the tensor to use if files lack a foreign one; ``None`` if they must have it.
        cut: function of the shape of ours and a box of it that gives the boxes of the foreign tensors which make that
            box; ``None`` if there are none that do.
    """

    native: str
    foreign: tuple[str, ...]
    join: Callable[..., Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]
    repeats: tuple[str, ...] = ()
    otherwise: str | None = None
    cut: Callable[[tuple[int, ...], Box], ForeignParts | None] = uncut


def same(native: str, foreign: str, *repeats: str) -> WeightRule:
    """A tensor that is the same on both sides."""

    def join(x: Tensor) -> Tensor:
        return x

    return WeightRule(native, (foreign,), join, lambda x: (x,), repeats, cut=lambda _, box: ForeignParts((box,), join))


def transposed(native: str, foreign: str) -> WeightRule:
    """A matrix, or one per expert, that the other program stores as ``[in, out]``."""

    def join(x: Tensor) -> Tensor:
        return x.mT.contiguous()

    def cut(shape: tuple[int, ...], box: Box) -> ForeignParts:
        offsets, sizes = ((*ends[:-2], ends[-1], ends[-2]) for ends in (box.offsets, box.sizes))
        return ForeignParts((Box(offsets, sizes),), join)

    return WeightRule(native, (foreign,), join, lambda x: (x.mT.contiguous(),), cut=cut)


def stacked(native: str, *foreign: str, lead: tuple[int, ...] = ()) -> WeightRule:
    """Foreign tensors stacked along new first dimensions of ours: gate and up ``[2, F, H]``, experts' ``[E, 2, F, H]``.

    ``lead`` has the sizes of the new dimensions; empty for a single one.
    """
    lead = lead or (len(foreign),)

    def split(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in x.flatten(0, len(lead) - 1).unbind())

    def join(*parts: Tensor, sizes: tuple[int, ...] = lead) -> Tensor:
        return torch.stack(parts).unflatten(0, sizes)

    def cut(shape: tuple[int, ...], box: Box) -> ForeignParts:
        ends = zip(box.offsets, box.sizes, strict=True)
        chosen = set(product(*(range(start, start + size) for start, size in islice(ends, len(lead)))))
        part = Box(box.offsets[len(lead) :], box.sizes[len(lead) :])
        boxes = (part if place in chosen else None for place in product(*map(range, lead)))
        return ForeignParts(tuple(boxes), partial(join, sizes=box.sizes[: len(lead)]))

    return WeightRule(native, foreign, join, split, cut=cut)


def interleaved_experts(native: str, foreign: str) -> WeightRule:
    """Gate and up of each expert, whose rows alternate in ``[E, 2 F, ...]``, to ``[E, 2, F, ...]``."""
    return WeightRule(
        native,
        (foreign,),
        lambda x: x.unflatten(1, (-1, 2)).transpose(1, 2).contiguous(),
        lambda x: (x.transpose(1, 2).flatten(1, 2).contiguous(),),
    )


def fused_qkv(native: str, foreign: tuple[str, ...], heads: int, groups: int) -> WeightRule:
    """Queries, keys and values of three tensors, or concatenated in one tensor, to rows of query groups."""
    join, split = partial(fuse_qkv, groups=groups), partial(split_qkv, heads=heads, groups=groups)

    def cut(shape: tuple[int, ...], box: Box) -> ForeignParts | None:
        queries, dim = heads // groups, shape[0] // (heads + 2 * groups)
        first, rest = divmod(box.offsets[0], (queries + 2) * dim)
        number, ragged = divmod(box.sizes[0], (queries + 2) * dim)
        if rest or ragged:
            return None
        rows = [Box((first * n, *box.offsets[1:]), (number * n, *box.sizes[1:])) for n in (queries * dim, dim, dim)]
        return ForeignParts(tuple(rows), partial(fuse_qkv, groups=number))

    if len(foreign) == 3:
        return WeightRule(native, foreign, join, split, cut=cut)
    return WeightRule(native, foreign, lambda x: join(*x.tensor_split(3)), lambda x: (torch.cat(split(x)),))


def fused_kv(native: str, foreign: tuple[str, ...], groups: int) -> WeightRule:
    """Keys and values of two tensors ``[G D, ...]`` to rows ``[k, v]`` of each group, end to end."""

    def join(k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([x.unflatten(0, (groups, -1)) for x in (k, v)], dim=1).flatten(0, 1)

    def split(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.flatten(0, 1).contiguous() for part in x.unflatten(0, (groups, -1)).chunk(2, dim=1))

    return WeightRule(native, foreign, join, split)


def fused_groups(native: str, foreign: tuple[str, ...], count: int, widths: tuple[int, ...]) -> WeightRule:
    """Parts to rows of groups, each with ``widths`` rows of every part; of one tensor per part, or of all in one."""

    def join(*parts: Tensor, groups: int = count) -> Tensor:
        rows = [part.unflatten(0, (groups, width)) for part, width in zip(parts, widths, strict=True)]
        return torch.cat(rows, dim=1).flatten(0, 1)

    def split(x: Tensor) -> tuple[Tensor, ...]:
        parts = x.unflatten(0, (count, -1)).split(widths, dim=1)
        return tuple(part.flatten(0, 1).contiguous() for part in parts)

    def cut(shape: tuple[int, ...], box: Box) -> ForeignParts | None:
        (first, rest), (number, ragged) = (divmod(ends[0], sum(widths)) for ends in (box.offsets, box.sizes))
        if rest or ragged:
            return None
        rows = [Box((first * n, *box.offsets[1:]), (number * n, *box.sizes[1:])) for n in widths]
        return ForeignParts(tuple(rows), partial(join, groups=number))

    if len(foreign) == len(widths):
        return WeightRule(native, foreign, join, split, cut=cut)
    rows = [count * width for width in widths]
    return WeightRule(native, foreign, lambda x: join(*x.split(rows)), lambda x: (torch.cat(split(x)),))


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Fuse ``[N D, ...]`` and twice ``[G D, ...]`` to rows ``[q.., k, v]`` of each query group, end to end.

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


def paired(native: str, foreign: str, *, heads: int, turned: int) -> WeightRule:
    """Heads whose last ``turned`` rows are rotated in adjacent pairs there, and here as one half with the other."""

    def reorder(x: Tensor, pairs: tuple[int, int]) -> Tensor:
        rows = x.unflatten(0, (heads, -1))
        plain, last = rows.split((rows.shape[1] - turned, turned), dim=1)
        return torch.cat((plain, last.unflatten(1, pairs).transpose(1, 2).flatten(1, 2)), dim=1).flatten(0, 1)

    return WeightRule(
        native,
        (foreign,),
        lambda x: reorder(x, (turned // 2, 2)),
        lambda x: (reorder(x, (2, turned // 2)),),
    )


@dataclass(frozen=True)
class Split:
    """Foreign tensors that are made together from one of ours.

    Attributes:
        tensors: tensors on the meta device, which show shape and dtype, by foreign name.
        materialize: function that computes their values, in the same order.
    """

    tensors: Mapping[str, Tensor]
    materialize: Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class WeightMap:
    """The rules of one model, both ways.

    Attributes:
        rules: one for each of our tensors.
        ignored: pattern of foreign names that hold no parameter (buffers of older versions).
        prefix: beginning of foreign names; files of the model without its head leave it out.
        heads: beginning of the names of heads, which have no prefix.
        label: words for foreign tensors in messages.
    """

    rules: tuple[WeightRule, ...]
    ignored: str
    prefix: str
    label: str = "Hugging Face tensors"
    heads: str = "lm_head."

    @property
    def native_names(self) -> set[str]:
        """Global names of our tensors."""
        return {rule.native for rule in self.rules}

    def has_stack(self, stack: str, names: Iterable[str]) -> bool:
        """True if any of the ``names`` in files makes a tensor of ours in a stack of layers."""
        needed = {name for rule in self.rules if rule.native.startswith(f"{stack}.") for name in rule.foreign}
        return not needed or any(self._full_name(name) in needed for name in names)

    def to_native(
        self, foreign: Mapping[str, LazyTensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, LazyTensor]:
        """Our tensors; values are joined, and compared with repeats in the files, when they are materialized.

        Args:
            foreign: tensors of a directory of the other program.
            shapes: required shapes by global name; tensors of the model that are not named here are left out.

        Raises:
            ConfigError: naming foreign tensors that are missing, or that the model has no place for.
            CheckpointError: naming tensors of another shape.
        """
        file_names = self._file_names(foreign)
        faults, found = [], {}
        for rule in self.rules:
            if rule.native not in shapes:
                continue
            parts = [foreign[file_names[name]] for name in rule.foreign]
            try:
                joined = rule.join(*(part.on_meta() for part in parts))
            except (RuntimeError, ValueError, AssertionError) as error:  # the last: torch 2.6's stack
                faults.append(f"{_shown(rule, parts)}: cannot be joined to {rule.native}: {error}")
                continue
            shape, required = tuple(joined.shape), shapes[rule.native]
            if shape != required:
                made = f"{rule.native} {list(shape)}"
                faults.append(f"{_shown(rule, parts)}: makes {made}, and the model's is {list(required)}")
            repeats = {name: foreign[file_names[name]] for name in rule.repeats if name in file_names}
            read = partial(_joined, rule, parts, repeats, shape)
            found[rule.native] = LazyTensor(shape, joined.dtype, read, read)
        if faults:
            raise CheckpointError(f"the tensors do not fit the model:\n{listed(faults)}")
        return found

    def to_foreign(self, native: Mapping[str, LazyTensor]) -> Iterator[Split]:
        """Foreign tensors, in the order of the rules, from all of ours.

        Raises:
            ConfigError: naming tensors of ours that are missing, or that the family has no place for.
        """
        _refuse_other_names("tensors", native, self.native_names)
        for rule in self.rules:
            whole = native[rule.native]
            on_meta = dict(zip(rule.foreign, rule.split(whole.on_meta()), strict=True))
            yield Split(on_meta, partial(_split, rule, whole))

    def _file_names(self, names: Iterable[str]) -> dict[str, str]:
        """Names in the files, by full name, of the tensors that the rules need and of existing repeats."""
        found = {full: name for name in names if (full := self._full_name(name)) is not None}
        for rule in self.rules:
            if rule.otherwise in found:
                found |= {name: found[rule.otherwise] for name in rule.foreign if name not in found}
        needed = {name for rule in self.rules for name in rule.foreign}
        repeats = {name for rule in self.rules for name in rule.repeats}
        _refuse_other_names(self.label, found.keys() - repeats, needed)
        return {name: found[name] for name in needed | (repeats & found.keys())}

    def _full_name(self, name: str) -> str | None:
        """The full name of a tensor in a file; ``None`` if it holds no parameter."""
        if re.search(self.ignored, name):
            return None
        known = name.startswith((self.prefix, self.heads))
        return name if known else self.prefix + name


def _joined(
    rule: WeightRule,
    parts: Sequence[LazyTensor],
    repeats: Mapping[str, LazyTensor],
    shape: tuple[int, ...],
    box: Box | None = None,
) -> Tensor:
    """A box of our tensor, or all of it."""
    cut = None if box is None else rule.cut(shape, box)
    boxes = [None] * len(parts) if cut is None else cut.boxes
    join = rule.join if cut is None else cut.join

    def read(tensor: LazyTensor, part: Box | None) -> Tensor:
        return tensor.materialize() if part is None else tensor.part(part)

    needed = zip(rule.foreign, parts, boxes, strict=True)
    foreign = {name: read(tensor, part) for name, tensor, part in needed if part is not None or cut is None}
    for name in not_finite(foreign.items()):
        raise CheckpointError(f"{name} (for {rule.native}): {amount(foreign[name])}")
    joined = join(*foreign.values())
    for name, repeat in repeats.items():
        if not torch.equal(joined, join(read(repeat, boxes[0])).to(joined.dtype)):
            original = rule.foreign[0]
            reason = f"the configuration ties it to {original}, and their values differ: untie them there"
            raise ConfigError([Problem("tensor", name, reason)])
    return joined if box is None or cut is not None else part_of(joined, box)


def _split(rule: WeightRule, whole: LazyTensor) -> Sequence[Tensor]:
    return rule.split(whole.materialize())


def _shown(rule: WeightRule, parts: Sequence[LazyTensor]) -> str:
    pairs = [f"{name} {list(part.shape)}" for name, part in zip(rule.foreign, parts, strict=True)]
    return ", ".join(pairs[:3]) + (", ..." if len(pairs) > 3 else "")


def _refuse_other_names(what: str, given: Iterable[str], needed: Iterable[str]) -> None:
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
