"""Whole models through a weight map, in memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_megatron.checkpoint.formats.hf import tensors as hf_tensors
from lightning_megatron.checkpoint.formats.weight_map import WeightMap
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.config.hugging_face.family import Family
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.lightning.pretrained.parameter_specs import weight_shapes


def lazy(tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    """Tensors that are there, as conversions take them."""
    return {
        name: LazyTensor(tuple(tensor.shape), tensor.dtype, lambda tensor=tensor: tensor)  # type: ignore[misc]
        for name, tensor in tensors.items()
    }


def weight_map(family: Family, config: TransformerConfig) -> WeightMap:
    """The rules between a Hugging Face model and a whole model of ours."""
    return hf_tensors.weight_map(family, config, weight_shapes(config))


def to_native(
    rules: WeightMap, foreign: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Our tensors of another program's."""
    return {name: tensor.materialize() for name, tensor in rules.to_native(lazy(foreign), shapes).items()}


def to_foreign(rules: WeightMap, native: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other program's tensors of ours."""
    return {
        name: tensor
        for split in rules.to_foreign(lazy(native))
        for name, tensor in zip(split.tensors, split.materialize(), strict=True)
    }
