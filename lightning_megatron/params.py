"""Specs of parameters that may be sharded over ranks.

A layer declares a :class:`ParamSpec` for each of its own parameters. Checkpoints, clipping, gradient reduction and
conversion read the specs, and depend on no layer or model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class ShardRanks(NamedTuple):
    """Position of a rank on the axes that shard parameters; a mesh has one.

    Attributes:
        tp: position on the tensor-parallel axis.
        etp: position on the expert-tensor-parallel axis.
        ep: position on the expert-parallel axis.
    """

    tp: int = 0
    etp: int = 0
    ep: int = 0


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor, in coordinates of the whole.

    Attributes:
        offsets: first index of the part, per dimension.
        sizes: length of the part, per dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def is_empty(self) -> bool:
        """True if the box holds no element."""
        return any(size == 0 for size in self.sizes)


NO_PARAMETER = "*"
"""Key, in place of a parameter's name, of optimizer state that belongs to no parameter."""

SAME_NAME = "(the same name)"
"""Value of ``ParamSpec.tied_with`` if the other stage has the parameter under the same global name."""


@dataclass(frozen=True)
class ParamSpec:
    """A parameter in the coordinates of the whole model.

    Attributes:
        global_shape: the shape over all ranks, without padding.
        tp_dim: the dimension that tensor parallelism splits into equal contiguous slices; ``None`` if every tp rank
            holds the whole parameter. The local slices may together be longer than ``global_shape`` (a padded
            vocabulary); the rest is padding, is never saved and has a zero gradient.
        ep_dim: the dimension that counts experts, which expert parallelism splits likewise. A parameter that has one
            belongs to experts: expert tensor parallelism then splits ``tp_dim``, and its replicas are the ranks of
            the expert-data axis.
        grad_sum_over_tp: True if every tp rank holds the whole parameter but sees only part of the sequence or of the
            heads, so that its gradient must be summed over tp (norms and row biases under sequence parallelism).
        decay: True if weight decay applies by default (not to norms and biases).
        tied_with: global name of the parameter this one repeats on another pipeline stage; a repeated parameter is
            left out of gradient norms and checkpoints. A layer does not know global names and declares ``SAME_NAME``.
        multiple: the padded length of ``tp_dim`` in a model on one rank is a multiple of this number.
    """

    global_shape: tuple[int, ...]
    tp_dim: int | None = None
    ep_dim: int | None = None
    grad_sum_over_tp: bool = False
    decay: bool = True
    tied_with: str | None = None
    multiple: int = 1

    @property
    def is_expert(self) -> bool:
        """True for a parameter of experts, whose ranks form the expert grid."""
        return self.ep_dim is not None

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape in a model on one rank, padding included."""
        steps = (self.multiple if dim == self.tp_dim else 1 for dim in range(len(self.global_shape)))
        return tuple(-(-size // step) * step for size, step in zip(self.global_shape, steps, strict=True))

    def sharded_dims(self, ranks: ShardRanks) -> dict[int, int]:
        """The sharded dimensions, each with the position of a rank along it."""
        along = {self.tp_dim: ranks.etp if self.is_expert else ranks.tp, self.ep_dim: ranks.ep}
        return {dim: rank for dim, rank in along.items() if dim is not None}

    def local_box(self, local_shape: tuple[int, ...], ranks: ShardRanks) -> Box:
        """The box of the global parameter that a tensor of ``local_shape`` holds at ``ranks``, without padding."""
        offsets = [0] * len(local_shape)
        sizes = list(local_shape)
        for dim, rank in self.sharded_dims(ranks).items():
            total, length = self.global_shape[dim], local_shape[dim]
            offsets[dim] = min(rank * length, total)
            sizes[dim] = max(0, min(length, total - rank * length))
        return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True, eq=False)
class ParamShard:
    """A contiguous range of one flattened local parameter, with the optimizer state that a rank holds for it.

    Attributes:
        name: global name of the parameter.
        spec: its spec.
        local_shape: shape of the parameter on this rank, padding included.
        start: first element of the range in the flattened local parameter.
        end: one past the last element.
        main: ``[end - start]``, main values (the tensor that the optimizer updates), a view.
        state: state per element by name (``exp_avg``), each ``[end - start]``, views.
        shared: state that all elements share by name (``step``), 0-dim tensors or numbers.
    """

    name: str
    spec: ParamSpec
    local_shape: tuple[int, ...]
    start: int
    end: int
    main: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class HasParamSpecs(Protocol):
    """A layer that declares the parameters it owns directly, and buffers that other programs store as weights."""

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Specs of this module's own parameters and of such buffers, by their name inside the module."""
        ...


def named_specs(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParamSpec]]:
    """Every parameter of ``model`` once, with its global name and spec.

    A parameter without a declared spec (a plain ``nn.Linear`` of the user's) counts as held whole by every rank, with
    weight decay if it is a matrix.
    """
    declared: dict[int, ParamSpec] = {}
    for module in model.modules():
        if isinstance(module, HasParamSpecs):
            own = dict(module.named_parameters(recurse=False))
            for name, spec in module.param_specs().items():
                if name in own:
                    declared.setdefault(id(own[name]), spec)
    for name, param in model.named_parameters():
        known = declared.get(id(param)) or ParamSpec(tuple(param.shape), decay=param.ndim > 1)
        yield name, param, replace(known, tied_with=name) if known.tied_with == SAME_NAME else known


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor, ParamSpec]]:
    """Parameters as :func:`named_specs` gives them, and every buffer for which a layer declares a spec."""
    yield from named_specs(model)
    for prefix, module in model.named_modules():
        for name, buffer, spec in declared_buffers(module):
            yield f"{prefix}.{name}" if prefix else name, buffer, spec


def declared_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor, ParamSpec]]:
    """A module's own buffers for which it declares a spec, by their name inside the module."""
    if not isinstance(module, HasParamSpecs):
        return
    specs = module.param_specs()
    for name, buffer in list(module.named_buffers(recurse=False)):
        if name in specs:
            yield name, buffer, specs[name]


def spec_registry(model: nn.Module) -> dict[str, ParamSpec]:
    """The specs of :func:`named_specs` by global name."""
    return {name: spec for name, _, spec in named_specs(model)}


@torch.no_grad()
def copy_slice(name: str, param: Tensor, spec: ParamSpec, whole: Tensor, ranks: ShardRanks) -> None:
    """Copy this rank's slice of a whole parameter without padding; the rest of a padded slice becomes zero.

    Raises:
        ValueError: if ``whole`` has another shape.
    """
    if tuple(whole.shape) != spec.global_shape:
        raise ValueError(f"{name} is {list(spec.global_shape)}, and the given tensor {list(whole.shape)}")
    box = spec.local_box(tuple(param.shape), ranks)
    copy_box(
        param, whole[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))]
    )


@torch.no_grad()
def copy_box(param: Tensor, part: Tensor) -> None:
    """Copy a rank's part of a whole parameter, which begins its slice; the rest of a padded slice becomes zero."""
    param.zero_()
    param.data[tuple(map(slice, part.shape))].copy_(part)
