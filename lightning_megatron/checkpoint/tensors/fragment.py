"""Fragments: the rectangular boxes of a whole tensor that one rank holds.

An optimizer shard is a flat range of a local parameter, and the local parameter is a slice of the whole one. As boxes
of the *whole* parameter, the range can be written to a checkpoint from memory, without a gather, and loaded under any
other layout. Everything here is arithmetic on shapes and views, without processes and files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_megatron.params import Box, ParamSpec, ShardRanks


@dataclass(frozen=True)
class FlatBox:
    """A box of a whole parameter and its place in a flat range of the local one.

    Attributes:
        box: box in coordinates of the whole parameter, without padding.
        start: first element, counted from the beginning of the flat range.
        shape: sizes of the box with the padding that lies inside it.
    """

    box: Box
    start: int
    shape: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """The elements of the box as a view of the flat range."""
        padded = flat[self.start : self.start + prod(self.shape)].view(self.shape)
        return part_of(padded, Box.whole(self.box.sizes))


def boxes_of_range(
    spec: ParamSpec, local_shape: Sequence[int], ranks: ShardRanks, start: int, end: int
) -> list[FlatBox]:
    """Split elements ``start .. end-1`` of a flattened local parameter into boxes of the whole one.

    The range covers each of its elements once; padding beyond ``spec.global_shape`` is in no box. A parameter of
    ``n`` dimensions gives at most ``2n - 1`` boxes: the ragged ends of the range, and the full rows between.
    """
    shape = tuple(local_shape)
    held = spec.local_box(shape, ranks)
    found, place = [], 0
    for offsets, sizes in _boxes(shape, start, end):
        true = tuple(max(0, min(n, h - o)) for n, h, o in zip(sizes, held.sizes, offsets, strict=True))
        box = Box(tuple(a + b for a, b in zip(held.offsets, offsets, strict=True)), true)
        if not box.is_empty:
            found.append(FlatBox(box, place, sizes))
        place += prod(sizes)
    return found


def _boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the boxes that a row-major range fills, in order of their elements."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first_full, last_full = -(-start // row), end // row
    if first_full > last_full:  # the range lies inside one row
        yield from _inside_row(shape, last_full, start - last_full * row, end - last_full * row)
        return
    yield from _inside_row(shape, first_full - 1, start - (first_full - 1) * row, row if start % row else 0)
    if first_full < last_full:
        zeros = (0,) * (len(shape) - 1)
        yield (first_full, *zeros), (last_full - first_full, *shape[1:])
    yield from _inside_row(shape, last_full, 0, end - last_full * row)


def _inside_row(
    shape: tuple[int, ...], row: int, start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in _boxes(shape[1:], start, end):
        yield (row, *offsets), (1, *sizes)


def part_of(whole: Tensor, box: Box) -> Tensor:
    """The elements of a box as a view of the whole tensor."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


@dataclass(frozen=True)
class Chunk:
    """One box of a whole tensor and the live memory that holds it.

    Attributes:
        box: its place in the whole tensor.
        data: view of that shape; read when saving, written in place when loading.
        write: True if this rank, among all replicas, saves it.
    """

    box: Box
    data: Tensor
    write: bool


@dataclass(frozen=True)
class Fragment:
    """The boxes of a whole tensor that one rank holds.

    Attributes:
        shape: shape of the whole tensor, without padding.
        dtype: dtype of the tensor.
        chunks: boxes with their memory; empty if this rank holds nothing but padding.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @classmethod
    def of_local(cls, local: Tensor, spec: ParamSpec, ranks: ShardRanks, write: bool) -> Fragment:
        """The fragment of a contiguous local parameter.

        Raises:
            ValueError: if the local shape cannot be a slice of ``spec.global_shape``.
        """
        local_shape = tuple(local.shape)
        box = spec.local_box(local_shape, ranks) if _can_be_slice(local_shape, spec) else None
        if box is None:
            dims = " and ".join(map(str, spec.sharded_dims(ranks)))
            how = f"cut along dimension {dims}" if dims else "held whole by every rank"
            raise ValueError(
                f"a local tensor of shape {local_shape} is no slice of one of shape {spec.global_shape} {how}"
            )
        data = part_of(local.detach(), Box.whole(box.sizes))
        keep = not box.is_empty or 0 in spec.global_shape  # a tensor without elements still has a name and a shape
        return cls(spec.global_shape, local.dtype, (Chunk(box, data, write),) if keep else ())

    @classmethod
    def of_flat(
        cls, flat: Tensor, spec: ParamSpec, local_shape: Sequence[int], ranks: ShardRanks, start: int, write: bool
    ) -> Fragment:
        """The fragment of a flat range of a local parameter that begins at its element ``start``."""
        boxes = boxes_of_range(spec, local_shape, ranks, start, start + flat.numel())
        return cls(spec.global_shape, flat.dtype, tuple(Chunk(b.box, b.view(flat.detach()), write) for b in boxes))

    def joined(self, other: Fragment) -> Fragment:
        """This fragment with the chunks of another one of the same tensor."""
        if other.shape != self.shape:
            raise ValueError(f"two parts of one tensor disagree about its shape: {self.shape} and {other.shape}")
        return Fragment(self.shape, self.dtype, self.chunks + other.chunks)

    @property
    def writes_origin(self) -> bool:
        """True if this rank saves the first element, which exactly one rank of the job does."""
        return any(chunk.write and not any(chunk.box.offsets) for chunk in self.chunks)


def _can_be_slice(local_shape: tuple[int, ...], spec: ParamSpec) -> bool:
    whole = spec.global_shape
    return len(local_shape) == len(whole) and all(
        n == m or dim in (spec.tp_dim, spec.ep_dim) for dim, (n, m) in enumerate(zip(local_shape, whole, strict=True))
    )


def cover_fault(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Reason why boxes do not cover a tensor exactly once; ``None`` if they do."""
    boxes = list(boxes)
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == len(shape):
            return f"the box at {box.offsets} of sizes {box.sizes} has other dimensions than the shape {tuple(shape)}"
    boxes = [box for box in boxes if not box.is_empty]
    for box in boxes:
        if any(o < 0 or o + n > total for o, n, total in zip(box.offsets, box.sizes, shape, strict=True)):
            return f"the box at {box.offsets} of sizes {box.sizes} reaches beyond the shape {tuple(shape)}"
    if fault := _overlap_fault(shape, boxes):
        return fault
    written = sum(prod(box.sizes) for box in boxes)
    if written != prod(shape):
        return f"{prod(shape) - written} of {prod(shape)} elements are written by no rank"
    return None


def _overlap_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Sweeps along the longest dimension: only boxes that overlap there are compared."""
    if not len(shape):
        return "two ranks write the same scalar" if len(boxes) > 1 else None
    dim = max(range(len(shape)), key=shape.__getitem__)
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        active = [a for a in active if a.offsets[dim] + a.sizes[dim] > box.offsets[dim]]
        for other in active:
            if _overlap(box, other):
                return f"two ranks write the same elements: boxes at {other.offsets} and {box.offsets}"
        active.append(box)
    return None


def _overlap(a: Box, b: Box) -> bool:
    return all(
        ao < bo + bn and bo < ao + an for ao, an, bo, bn in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
