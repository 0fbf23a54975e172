"""A job without a model: parameters with specs, and an optimizer's flat shards, whose right values are known."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from lightning_megatron.checkpoint import State, model_state, optimizer_state
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.params import ParamShard, ParamSpec

STATES = ("main", "exp_avg", "exp_avg_sq")
GROUPS = [{"lr": 0.125, "betas": (0.9, 0.95), "weight_decay": 0.1}, {"lr": 0.125, "weight_decay": 0.0}]


def specs_of_whole(width: int) -> dict[str, ParamSpec]:
    """Vocabulary 13, which neither 2 nor 4 divide; matrices cut by rows and by columns, a tensor of rank 3, experts."""
    layer = {
        "up.weight": ParamSpec((8, width), 0),
        "up.bias": ParamSpec((8,), 0, decay=False),
        "down.weight": ParamSpec((width, 8), 1),
        "norm.weight": ParamSpec((width,), decay=False),
        "three": ParamSpec((2, 3, 8), 2),
        "experts.fc1": ParamSpec((4, 2, 4, 3), tp_dim=2, ep_dim=0),
        "experts.fc2": ParamSpec((4, 3, 4), tp_dim=2, ep_dim=0),
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


def slice_of(x: Tensor, spec: ParamSpec, mesh: ParallelMesh) -> Tensor:
    """The local part of a whole tensor, padded with zeros."""
    tp, ep = mesh.etp.size if spec.is_expert else mesh.tp.size, mesh.ep.size
    ways = {spec.tp_dim: tp, spec.ep_dim: ep}
    shape = tuple(-(-n // ways.get(dim, 1)) for dim, n in enumerate(x.shape))
    box = spec.local_box(shape, mesh.shard_ranks)
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
        dense = [name for name, spec in self.specs.items() if not spec.is_expert]
        experts = [name for name, spec in self.specs.items() if spec.is_expert]
        self._shared_out = [(names, axis) for names, axis in ((dense, mesh.dp_cp), (experts, mesh.edp)) if names]
        self.flats = [
            {kind: self._own(self._laid_out(kind, names, axis), axis).clone() for kind in STATES}
            for names, axis in self._shared_out
        ]
        if not filled:
            for tensor in (*self.params.values(), *(tensor for flat in self.flats for tensor in flat.values())):
                tensor.zero_()

    def _stage(self, name: str) -> int:
        if name.startswith("layers."):
            return int(name.split(".")[1]) * self.mesh.pp.size // 2
        return 0 if name.startswith("embedding") else self.mesh.pp.size - 1

    def _right(self, name: str, kind: str) -> Tensor:
        spec = self.specs[name]
        source = whole(spec.tied_with or name, spec, kind)
        return slice_of(source, spec, self.mesh)

    def _laid_out(self, kind: str, names: list[str], axis: Axis) -> Tensor:
        flat = torch.cat([self._right(name, kind).flatten() for name in names])
        return torch.nn.functional.pad(flat, (0, -len(flat) % axis.size))

    def _own(self, flat: Tensor, axis: Axis) -> Tensor:
        return flat.chunk(axis.size)[axis.rank] if self.sharded else flat

    def param_shards(self) -> Iterator[ParamShard]:
        for (names, axis), flat in zip(self._shared_out, self.flats, strict=True):
            length, begin = len(flat["main"]), 0
            first = axis.rank * length if self.sharded else 0
            for name in names:
                spec, shape = self.specs[name], tuple(self.params[name].shape)
                start, end = max(begin, first), min(begin + prod(shape), first + length)
                if start < end:
                    main, *elements = (flat[kind][start - first : end - first] for kind in STATES)
                    state = dict(zip(STATES[1:], elements, strict=True))
                    shared = {"step": self.step, "count": 3}
                    yield ParamShard(name, spec, shape, start - begin, end - begin, main, state, shared)
                begin += prod(shape)

    def state(self) -> State:
        named = [[n for n, s in self.specs.items() if s.decay == decay] for decay in (True, False)]
        groups = [{**group, "params": names} for group, names in zip(GROUPS, named, strict=True)]
        model = model_state(self.params, self.specs, self.mesh)
        return model | optimizer_state(0, self.param_shards(), self.mesh, groups, sharded=self.sharded)

    def wrong(self) -> list[str]:
        """Names of local tensors that are not bit-equal to the right ones (padding: to zero)."""
        found = [n for n in self.specs if not torch.equal(self.params[n], self._right(n, "param").bfloat16())]
        for (names, axis), flat in zip(self._shared_out, self.flats, strict=True):
            right = {kind: self._own(self._laid_out(kind, names, axis), axis) for kind in STATES}
            found += [f"{names[0]}.. {kind}" for kind in STATES if not torch.equal(flat[kind], right[kind])]
        return found + (["step"] if self.step != 7.0 else [])


def mesh_of(**sizes: int) -> ParallelMesh:
    return ParallelMesh.create(ParallelLayout(**sizes), torch.device("cpu"))
