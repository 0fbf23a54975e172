"""Random numbers on several ranks: initial weights, dropout masks, and both once more under recomputation."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.layers import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import preset
from lightning_megatron.models.transformer import Block
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.recompute import recomputed
from lightning_megatron.testing.parity import whole_parameters

GPT = TransformerConfig(3, 16, 4, 37, 12, vocab_multiple=4)
LLAMA = preset("llama-tiny").replace(
    num_layers=3, hidden_size=16, num_attention_heads=4, ffn_hidden_size=20, vocab_size=37, vocab_multiple=4
)


def mesh_of(tp: int) -> ParallelMesh:
    mesh = ParallelMesh.create(ParallelLayout(tp=tp), torch.device("cpu"))
    mesh.rng.place(tp_rank=mesh.tp.rank)
    return mesh


def initial_weights(tp: int, config: TransformerConfig, dtype: torch.dtype, **part: Any) -> tuple[Any, float]:
    """The whole weights under seed 3, and what the user's own next random number is."""
    mesh = mesh_of(tp)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(3)
        model = GPTModel(config, mesh, **part)
    finally:
        torch.set_default_dtype(before)
    return whole_parameters(model, mesh), torch.rand(()).item()


def weights_of_several(tp: int) -> list[tuple[Any, float]]:
    return [
        initial_weights(tp, GPT, torch.float32),
        initial_weights(tp, LLAMA, torch.float32),
        initial_weights(tp, LLAMA, torch.bfloat16),
    ]


@pytest.mark.parametrize("tp", [2, 4])
def test_one_seed_gives_the_same_whole_weights_on_every_layout(ranks, tp):
    (single,) = ranks(1, weights_of_several, 1)
    for rank in ranks(tp, weights_of_several, tp):
        for (ours, following), (reference, expected) in zip(rank, single, strict=True):
            assert ours.keys() == reference.keys()
            for name in reference:
                assert torch.equal(ours[name], reference[name]), name
            assert following == expected


def weights_of_parts(tp: int) -> list[tuple[Any, float]]:
    """Each stage of a pipeline of three, built alone."""
    return [initial_weights(tp, LLAMA, torch.float32, parts=[stage]) for stage in LayerSplit().stages(3, 3)]


def test_a_rank_that_builds_some_layers_gives_them_the_same_weights(ranks):
    (single,) = ranks(1, weights_of_several, 1)
    reference, expected = single[1]
    seen = set()
    for ours, following in ranks(2, weights_of_parts, 2)[0]:
        for name, weight in ours.items():
            assert torch.equal(weight, reference[name]), name
        assert following == expected
        seen |= ours.keys()
    assert {name.split(".")[1] for name in seen if name.startswith("layers")} == {"0", "1", "2"}
    assert seen == reference.keys()


def large_weights(tp: int) -> dict[str, Tensor]:
    """Weights of more elements than one slab (2^22) of the initialization."""
    mesh = mesh_of(tp)
    torch.manual_seed(4)
    column = ColumnParallelLinear(2048, 4100, mesh, bias=False)
    row = RowParallelLinear(4100, 2048, mesh, bias=False)
    return {f"{i}": w for i, layer in enumerate((column, row)) for w in whole_parameters(layer, mesh).values()}


def test_weights_of_many_slabs_are_whole_normal_and_nowhere_repeated(ranks):
    (single,) = ranks(1, large_weights, 1)
    for name, weight in ranks(2, large_weights, 2)[1].items():
        assert torch.equal(weight, single[name])
        assert weight.std().item() == pytest.approx(0.02, rel=0.01)
        assert weight.mean().item() == pytest.approx(0.0, abs=1e-4)
        assert weight[:, 0].unique().numel() > 0.99 * weight.shape[0]
    assert not torch.equal(single["0"].flatten()[:100], single["1"].flatten()[:100])


def masks(tp: int) -> dict[str, Any]:
    mesh = mesh_of(tp)
    torch.manual_seed(5)
    ones = torch.ones(64)
    outside = F.dropout(ones, 0.5)
    with mesh.rng.tensor_parallel():
        inside = F.dropout(ones, 0.5)
    found = {
        "outside": outside,
        "inside": inside,
        "hidden": Dropout(0.5, mesh)(ones),
        "sharded hidden": Dropout(0.5, mesh, sequence_parallel=True)(ones),
        "evaluated": Dropout(0.5, mesh).eval()(ones),
    }
    return {name: mask.tolist() for name, mask in found.items()} | {"next": torch.rand(()).item()}


def test_masks_differ_inside_tensor_parallel_regions_and_agree_outside(ranks):
    first, second = ranks(2, masks, 2)
    assert first["outside"] == second["outside"] != first["hidden"] == second["hidden"]
    assert first["inside"] != second["inside"]
    assert first["sharded hidden"] != second["sharded hidden"]
    assert first["evaluated"] == [1.0] * 64
    assert first["next"] == second["next"], "drawing inside moves the stream outside alike on all ranks"


def block_gradients(tp: int, how: str) -> dict[str, Tensor]:
    """Local gradients of a block with dropout of hidden states and of attention weights, and what is drawn next."""
    mesh = mesh_of(tp)
    torch.manual_seed(6)
    config = GPT.replace(hidden_dropout=0.3, attention_dropout=0.3)
    block = Block(config, mesh, sequence_parallel=True)
    x = torch.randn(8 // tp, 2, 16, generator=torch.Generator().manual_seed(mesh.rank), requires_grad=True)
    run = {
        "plain": lambda f, x: f(x),
        "recomputed": partial(recomputed, rng=mesh.rng),
        "torch's": partial(checkpoint, use_reentrant=False),
        "torch's, reentrant": partial(checkpoint, use_reentrant=True),
    }[how]
    # Two calls: the streams have moved on since the first forward when its recomputation begins.
    (run(block, x * 1)[0].square().sum() + run(block, x * 2)[0].square().sum()).backward()
    assert x.grad is not None
    following = {"default stream": torch.rand(4)}
    with mesh.rng.tensor_parallel():
        following["tensor stream"] = torch.rand(4)
    named = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {**named, "x": x.grad, **following}


@pytest.mark.parametrize("how", ["recomputed", "torch's", "torch's, reentrant"])
def test_recomputation_draws_the_same_masks(ranks, how):
    plain, again = (ranks(2, block_gradients, 2, each) for each in ("plain", how))
    for rank in range(2):
        assert plain[rank].keys() == again[rank].keys()
        for name, gradient in plain[rank].items():
            assert torch.equal(gradient, again[rank][name]), name  # bit for bit, and so are both streams afterwards


def losses_with_dropout(tp: int, sp: bool) -> list[float]:
    layout = ParallelLayout(tp=tp, sequence_parallel=sp)
    mesh = ParallelMesh.create(layout, torch.device("cpu"))
    mesh.rng.place(tp_rank=mesh.tp.rank)
    torch.manual_seed(7)
    model = GPTModel(GPT.replace(hidden_dropout=0.1, attention_dropout=0.1), mesh)
    tokens = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(1))
    return [model(tokens, tokens).item() for _ in range(2)]


@pytest.mark.parametrize("sp", [False, True])
def test_dropout_in_a_model_keeps_ranks_together_and_runs_repeatable(ranks, sp):
    first, second = ranks(2, losses_with_dropout, 2, sp)
    assert first == second, "all ranks compute one loss"
    assert first[0] != first[1], "another mask in the second step"
    assert ranks(2, losses_with_dropout, 2, sp)[0] == first
