"""Resharding in memory: a state that ranks hold under one layout, sent to the same ranks under another, without files.

Each tensor that a rank lacks goes from the rank that would save it directly to the ranks that need it, over the host
group, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron.checkpoint.integrity.fault import listed
from lightning_megatron.checkpoint.tensors.fragment import Chunk, Fragment
from lightning_megatron.checkpoint.tensors.keys import Key
from lightning_megatron.checkpoint.tensors.state_dict import State
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.comm.p2p import as_bytes, receive, send
from lightning_megatron.errors import CheckpointError
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import Box

_SHOWN = 8


class _Offer(NamedTuple):
    """A chunk that its rank can send."""

    key: str
    box: Box
    dtype: torch.dtype


def reshard(source: State, target: State, mesh: ParallelMesh) -> None:
    """Fill the fragments of one state from those of another; all ranks of the mesh call this.

    Args:
        source: state of this rank under any layout; only its fragments are used.
        target: state under another layout; filled in place, in its own dtypes.
        mesh: ranks that exchange the state.

    Raises:
        CheckpointError: on every rank, naming tensors that no rank holds or that have another shape.
    """
    own, wanted = _chunks(source), _chunks(target)
    _refuse_misfit(all_gather_object(mesh, (_shapes(source), _shapes(target))))
    lacking = {key: [each for each in chunks if not _taken(each, own.get(key, ()))] for key, chunks in wanted.items()}
    offers = [_Offer(key, p.box, p.data.dtype) for key, chunks in own.items() for p in chunks if p.write]
    needs = {key: [chunk.box for chunk in chunks] for key, chunks in lacking.items() if chunks}
    by_rank = all_gather_object(mesh, (offers, needs))
    for sender, (offered, _) in enumerate(by_rank):
        for offer in offered:
            for receiver, (_, needed) in enumerate(by_rank):
                if any(_common(offer.box, box) for box in needed.get(offer.key, ())):
                    _carry(offer, sender, receiver, own, lacking, mesh)


def _chunks(state: State) -> dict[str, tuple[Chunk, ...]]:
    return {key: value.chunks for key, value in state.items() if isinstance(value, Fragment) and value.chunks}


def _taken(wanted: Chunk, own: Sequence[Chunk]) -> bool:
    """Fill a chunk from this rank's own memory, if one of its chunks contains it."""
    for chunk in own:
        if _common(chunk.box, wanted.box) == wanted.box:
            _copy(chunk.box, chunk.data, wanted)
            return True
    return wanted.box.is_empty


def _carry(
    offer: _Offer,
    sender: int,
    receiver: int,
    own: Mapping[str, Sequence[Chunk]],
    lacking: Mapping[str, Iterable[Chunk]],
    mesh: ParallelMesh,
) -> None:
    if mesh.rank == sender:
        data = next(chunk.data for chunk in own[offer.key] if chunk.write and chunk.box == offer.box)
        if receiver == sender:
            _fill(offer.box, data, lacking[offer.key])
        else:
            send(as_bytes(data), mesh.host, receiver)
    elif mesh.rank == receiver:
        data = torch.empty(offer.box.sizes, dtype=offer.dtype, device="cpu")
        receive(as_bytes(data), mesh.host, sender)
        _fill(offer.box, data, lacking[offer.key])


def _fill(box: Box, data: Tensor, chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        _copy(box, data, chunk)


@torch.no_grad()
def _copy(box: Box, data: Tensor, wanted: Chunk) -> None:
    """Copy what a box has in common with a wanted chunk."""
    both = _common(box, wanted.box)
    if both is not None:
        _inside(wanted.data, wanted.box, both).copy_(_inside(data, box, both))


def _inside(data: Tensor, box: Box, inner: Box) -> Tensor:
    for dim, (first, begin, size) in enumerate(zip(box.offsets, inner.offsets, inner.sizes, strict=True)):
        data = data.narrow(dim, begin - first, size)
    return data


def _common(a: Box, b: Box) -> Box | None:
    """The box that two boxes have in common, or ``None``."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = (min(ao + an, bo + bn) for ao, an, bo, bn in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    found = Box(offsets, tuple(end - offset for end, offset in zip(ends, offsets, strict=True)))
    return None if any(size <= 0 for size in found.sizes) else found


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    fragments = ((key, value) for key, value in state.items() if isinstance(value, Fragment))
    return {key: value.shape for key, value in fragments if not Key.parse(key).is_calibration}


def _refuse_misfit(shapes: Sequence[tuple[Mapping[str, tuple[int, ...]], Mapping[str, tuple[int, ...]]]]) -> None:
    held = {key: shape for source, _ in shapes for key, shape in source.items()}
    wanted = {key: shape for _, target in shapes for key, shape in target.items()}
    faults = [
        f"{key}: {'missing' if key not in held else f'shape {held[key]} before, {shape} now'}"
        for key, shape in wanted.items()
        if held.get(key) != shape
    ]
    faults += [f"{key}: not in the new model" for key in held if key not in wanted]
    if faults:
        raise CheckpointError(f"the new model's tensors differ:\n{listed(faults, _SHOWN)}")
