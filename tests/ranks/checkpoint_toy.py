"""A job without a model: parameters with specs, and an optimizer's flat shards, whose right values are known."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from lightning_megatron.checkpoint import State, model_state, optimizer_state
from lightning_megatron.checkpoint.state import Piece
from lightning_megatron.config import ParallelLayout
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import FlatPiece, ParamSpec

STATES = ("main", "exp_avg", "exp_avg_sq")
GROUPS = [{"lr": 0.125, "betas": (0.9, 0.95), "weight_decay": 0.1}, {"lr": 0.125, "weight_decay": 0.0}]


def specs_of_whole(width: int) -> dict[str, ParamSpec]:
    """Vocabulary 13, which neither 2 nor 4 divide; a matrix cut by rows, one by columns, one of three dimensions."""
    layer = {
        "up.weight": ParamSpec((8, width), 0),
        "up.bias": ParamSpec((8,), 0, decay=False),
        "down.weight": ParamSpec((width, 8), 1),
        "norm.weight": ParamSpec((width,), decay=False),
        "three": ParamSpec((2, 3, 8), 2),
    }
    return {
        "embedding.weight": ParamSpec((13, width), 0),
        **{f"layers.{i}.{name}": spec for i in range(2) for name, spec in layer.items()},
        "scale": ParamSpec(()),
    }


def whole(name: str, spec: ParamSpec, kind: str) -> Tensor:
    """The right value: the same for everyone who asks."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{kind}".encode()))
    return torch.randn(spec.global_shape, generator=generator)


def slice_of(x: Tensor, spec: ParamSpec, tp: int, tp_rank: int) -> Tensor:
    """The local part of a whole tensor, padded with zeros."""
    shape = tuple(-(-n // tp) if dim == spec.tp_dim else n for dim, n in enumerate(x.shape))
    box = spec.local_box(shape, tp_rank)
    local = torch.zeros(shape, dtype=x.dtype)
    inside = tuple(slice(0, n) for n in box.sizes)
    local[inside] = x[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
    return local


class Toy:
    """One rank's parameters in bf16 and its share of an optimizer in fp32, filled or zero."""

    def __init__(self, mesh: ParallelMesh, *, filled: bool, width: int = 6, sharded: bool = True) -> None:
        self.mesh, self.filled, self.sharded = mesh, filled, sharded
        self.specs = {name: spec for name, spec in specs_of_whole(width).items() if self._stage(name) == mesh.pp.rank}
        if mesh.pp.size > 1 and mesh.pp.rank == mesh.pp.size - 1:
            self.specs["head.weight"] = ParamSpec((13, width), 0, tied_with="embedding.weight")
        self.params = {name: self._right(name, "param").bfloat16() for name in self.specs}
        self.step = torch.tensor(7.0 if filled else 0.0)
        self.flat = {kind: self._own(self._laid_out(kind)).clone() for kind in STATES}
        if not filled:
            for tensor in (*self.params.values(), *self.flat.values()):
                tensor.zero_()

    def _stage(self, name: str) -> int:
        if name.startswith("layers."):
            return int(name.split(".")[1]) * self.mesh.pp.size // 2
        return 0 if name.startswith("embedding") else self.mesh.pp.size - 1

    def _right(self, name: str, kind: str) -> Tensor:
        spec = self.specs[name]
        source = whole(spec.tied_with or name, spec, kind)
        return slice_of(source, spec, self.mesh.tp.size, self.mesh.tp.rank)

    def _laid_out(self, kind: str) -> Tensor:
        flat = torch.cat([self._right(name, kind).flatten() for name in self.specs])
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.mesh.dp_cp.size))

    def _own(self, flat: Tensor) -> Tensor:
        return flat.chunk(self.mesh.dp_cp.size)[self.mesh.dp_cp.rank] if self.sharded else flat

    def pieces(self) -> Iterator[Piece]:
        length, first, begin = len(self.flat["main"]), 0, 0
        if self.sharded:
            first = self.mesh.dp_cp.rank * length
        for name, spec in self.specs.items():
            shape = tuple(self.params[name].shape)
            start, end = max(begin, first), min(begin + prod(shape), first + length)
            if start < end:
                main, *elements = (self.flat[kind][start - first : end - first] for kind in STATES)
                piece = FlatPiece(name, spec, shape, start - begin, end - begin)
                yield piece, main, dict(zip(STATES[1:], elements, strict=True)), {"step": self.step, "count": 3}
            begin += prod(shape)

    def state(self) -> State:
        named = [[n for n, s in self.specs.items() if s.decay == decay] for decay in (True, False)]
        groups = [{**group, "params": names} for group, names in zip(GROUPS, named, strict=True)]
        model = model_state(self.params, self.specs, self.mesh)
        return model | optimizer_state(0, self.pieces(), self.mesh, groups, sharded=self.sharded)

    def wrong(self) -> list[str]:
        """Names of local tensors that are not bit-equal to the right ones (padding: to zero)."""
        found = [n for n in self.specs if not torch.equal(self.params[n], self._right(n, "param").bfloat16())]
        found += [kind for kind in STATES if not torch.equal(self.flat[kind], self._own(self._laid_out(kind)))]
        return found + (["step"] if self.step != 7.0 else [])


def mesh_of(**sizes: int) -> ParallelMesh:
    return ParallelMesh.create(ParallelLayout(**sizes), torch.device("cpu"))
