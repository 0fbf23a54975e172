"""Whole models through a weight map, in memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_megatron.checkpoint.formats.weight_map import WeightMap
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor


def lazy(tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    """Tensors that are there, as conversions take them."""
    return {
        name: LazyTensor(tuple(tensor.shape), tensor.dtype, lambda tensor=tensor: tensor)  # type: ignore[misc]
        for name, tensor in tensors.items()
    }


def to_native(
    weight_map: WeightMap, foreign: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Our tensors of another program's."""
    return {name: tensor.materialize() for name, tensor in weight_map.to_native(lazy(foreign), shapes).items()}


def to_foreign(weight_map: WeightMap, native: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other program's tensors of ours."""
    return {
        name: tensor
        for split in weight_map.to_foreign(lazy(native))
        for name, tensor in zip(split.tensors, split.materialize(), strict=True)
    }
