from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear, VocabParallelEmbedding
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import Box, ParamSpec, ShardRanks, named_specs, spec_registry


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("total", [1, 7, 8, 12])
def test_boxes_of_all_ranks_tile_the_whole_without_padding(tp, total):
    local = -(-total // tp) + 1  # always some padding, for some ranks nothing else
    spec = ParamSpec((3, total), tp_dim=1)
    cover = torch.zeros(3, total)
    for rank in range(tp):
        box = spec.local_box((3, local), ShardRanks(tp=rank))
        (row, column), (height, width) = box.offsets, box.sizes
        cover[row : row + height, column : column + width] += 1
        assert box.is_empty == (width == 0)
    assert torch.equal(cover, torch.ones(3, total))


def test_a_rank_of_nothing_but_padding_holds_an_empty_box():
    assert ParamSpec((5,), tp_dim=0).local_box((4,), ShardRanks(tp=2)) == Box((5,), (0,))
    assert ParamSpec((5,)).local_box((5,), ShardRanks(tp=2)) == Box((0,), (5,))


class Mixed(nn.Module):
    """Parallel layers, a plain layer and a parameter under two names."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(10, 8, mesh, multiple=4)
        self.up = ColumnParallelLinear(8, 16, mesh, blocks=2)
        self.down = RowParallelLinear(16, 8, mesh, sequence_parallel=True)
        self.norm = LayerNorm(8, mesh, sequence_parallel=True)
        self.plain = nn.Linear(8, 8)
        self.head = nn.Module()
        self.head.weight = self.word.weight


def test_specs_name_every_parameter_once_in_global_coordinates():
    model = Mixed(ParallelMesh(ParallelLayout(tp=4).resolve(4), 1))
    assert spec_registry(model) == {
        "word.weight": ParamSpec((10, 8), tp_dim=0, multiple=4),
        "up.weight": ParamSpec((2, 8, 8), tp_dim=1),
        "up.bias": ParamSpec((2, 8), tp_dim=1, decay=False),
        "down.weight": ParamSpec((8, 16), tp_dim=1),
        "down.bias": ParamSpec((8,), grad_sum_over_tp=True, decay=False),
        "norm.weight": ParamSpec((8,), grad_sum_over_tp=True, decay=False),
        "norm.bias": ParamSpec((8,), grad_sum_over_tp=True, decay=False),
        "plain.weight": ParamSpec((8, 8)),
        "plain.bias": ParamSpec((8,), decay=False),
    }
    assert {name: tuple(p.shape) for name, p, _ in named_specs(model)}["up.weight"] == (2, 2, 8)


def test_on_one_rank_nothing_is_summed_over_tp():
    model = Mixed(ParallelMesh.single())
    assert not any(spec.grad_sum_over_tp for spec in spec_registry(model).values())
