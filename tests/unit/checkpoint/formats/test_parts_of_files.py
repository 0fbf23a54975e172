"""Weights that a rank reads of another program's files: its own part, equal to that part of the whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_megatron.checkpoint.formats.hf.directory import read_tensors
from lightning_megatron.checkpoint.tensors.fragment import part_of
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.families import FAMILIES
from lightning_megatron.lightning.pretrained.parameter_specs import weight_shapes
from lightning_megatron.params import Box, ParamSpec, ShardRanks, named_weights
from tests.families import TINY, our_config, random_model, whole_weights
from tests.foreign import to_foreign, weight_map


def written(folder: Path, family: str, config: TransformerConfig) -> dict[str, ParamSpec]:
    """Specs of the weights of a model at random whose tensors are written by the family's names."""
    model = random_model(config)
    tensors = to_foreign(weight_map(FAMILIES[family], config), whole_weights(model))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return {name: spec for name, _, spec in named_weights(model)}


def box_of(spec: ParamSpec, rank: int, size: int) -> Box:
    """The box of a rank if every axis along which a weight can be cut has ``size`` ranks."""
    ranks = ShardRanks(rank, rank, rank)
    local = list(spec.global_shape)
    for dim in spec.sharded_dims(ranks):
        local[dim] = -(-local[dim] // size)
    return spec.local_box(tuple(local), ranks)


def counting(tensors: Mapping[str, LazyTensor], read: list[int]) -> dict[str, LazyTensor]:
    """The same tensors; each read adds its bytes to a list."""

    def counted(tensor: LazyTensor, box: Box | None = None) -> torch.Tensor:
        value = tensor.materialize() if box is None else tensor.part(box)
        read.append(value.nbytes)
        return value

    def whole(tensor: LazyTensor) -> LazyTensor:
        return replace(
            tensor,
            materialize=lambda: counted(tensor),
            read=None if tensor.read is None else lambda b: counted(tensor, b),
        )

    return {name: whole(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", TINY)
def test_a_part_is_that_part_of_the_whole(family: str, tmp_path: Path) -> None:
    config = our_config(TINY[family])
    specs = written(tmp_path, family, config)
    ours = weight_map(FAMILIES[family], config).to_native(read_tensors(tmp_path), weight_shapes(config))
    for name, tensor in ours.items():
        whole = tensor.materialize()
        for rank in range(2):
            box = box_of(specs[name], rank, 2)
            assert torch.equal(tensor.part(box), part_of(whole, box)), name
            odd = Box((0,) * whole.dim(), tuple(max(1, size // 3) for size in whole.shape))
            assert torch.equal(tensor.part(odd), part_of(whole, odd)), name


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_rank_of_eight_reads_its_share(family: str, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 64}
    config = our_config(TINY[family] | heads | ({"num_experts": 8} if "moe" in family else {}))
    specs = written(tmp_path, family, config)
    read: list[int] = []
    foreign = counting(read_tensors(tmp_path), read)
    ours = weight_map(FAMILIES[family], config).to_native(foreign, weight_shapes(config))
    for rank in range(8):
        read.clear()
        share = sum(ours[name].part(box_of(specs[name], rank, 8)).nbytes for name in specs)
        assert share < sum(read) * 1.0001 <= 1.1 * share
