"""Recomputation on tensor-parallel ranks: gradients bit for bit those without it, and what ranks keep meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import preset
from lightning_megatron.recompute import recomputed

GPT = TransformerConfig(3, 16, 4, 37, 12, hidden_dropout=0.3, attention_dropout=0.3, init_std=0.3, vocab_multiple=4)
LLAMA = preset("llama-tiny").replace(
    num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=37,
    vocab_multiple=4, init_std=0.3, hidden_dropout=0.2, attention_dropout=0.2,
)  # fmt: skip
MIXTRAL = preset("mixtral-tiny").replace(
    num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=37,
    vocab_multiple=4, init_std=0.3, hidden_dropout=0.2, moe_z_loss_coeff=0.01,
)  # fmt: skip
PLANS = {
    "selective": RecomputePlan("selective"),
    "attention and mlp": RecomputePlan(["attention", "mlp"]),
    "each layer": RecomputePlan("full"),
    "pairs of layers": RecomputePlan("full", num_layers=2),
    "first layer": RecomputePlan("full", "block"),
}
EXPERTS = {"experts": RecomputePlan("moe"), "experts and attention": RecomputePlan(["moe", "attention"])}
IN_SHARES = {
    "each layer, in shares": RecomputePlan("full", shard_saved=True),
    "pairs of layers, in shares": RecomputePlan("full", num_layers=2, shard_saved=True),
    "first layer, in shares": RecomputePlan("full", "block", shard_saved=True),
}


def mesh_of(tp: int, sp: bool, experts: bool = False) -> ParallelMesh:
    ep = tp if experts else 1
    layout = ParallelLayout(tp=tp, ep=ep, etp=tp // ep, sequence_parallel=sp)
    mesh = ParallelMesh.create(layout, torch.device("cpu"))
    mesh.rng.place(tp_rank=mesh.tp.rank)
    return mesh


def gradients(config: TransformerConfig, plan: RecomputePlan, tp: int, sp: bool, deferred: bool) -> dict[str, Tensor]:
    """This rank's gradients of two micro-batches, and what both of its streams draw afterwards."""
    mesh = mesh_of(tp, sp, experts=config.num_experts > 0)
    mesh.weight_grads.enabled = deferred
    torch.manual_seed(1)
    model = GPTModel(config, mesh, recompute=plan)
    length = 8 if config.num_experts else 7  # 7 does not split over the ranks, and experts refuse it
    tokens = torch.randint(37, (3, length), generator=torch.Generator().manual_seed(1))
    loss = model(tokens, tokens) + model(tokens.flip(1), tokens)
    with mesh.weight_grads.deferring() as weights:
        loss.backward()
    weights.flush()
    following = {"default stream": torch.rand(4)}
    with mesh.rng.tensor_parallel():
        following["tensor stream"] = torch.rand(4)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | following


def wrong_gradients(tp: int, sp: bool) -> list[str]:
    """Every way in which a plan's gradients are not exactly those without it."""
    wrong = []
    families = {"gpt": GPT, "llama": LLAMA} | ({"mixtral": MIXTRAL} if sp else {})
    for family, config in families.items():
        plans = PLANS | (EXPERTS if config.num_experts else {} if sp else IN_SHARES)
        for deferred in (False, True):
            expected = gradients(config, NO_RECOMPUTE, tp, sp, deferred)
            for name, plan in plans.items():
                found = gradients(config, plan, tp, sp, deferred)
                assert found.keys() == expected.keys()
                unequal = [key for key in expected if not torch.equal(expected[key], found[key])]
                wrong += [f"{family}, {name}, deferred={deferred}: {key}" for key in unequal]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("sp", [False, True])
def test_gradients_with_dropout_are_bit_for_bit_those_without_recomputation(ranks, sp):
    assert ranks(2, wrong_gradients, 2, sp) == [[], []]


def kept_in_shares(tp: int) -> dict[str, Any]:
    """Results for inputs of any length, and the parts of them that each rank keeps meanwhile."""
    mesh = mesh_of(tp, sp=False)
    found: dict[str, Any] = {"gradients": [], "gathered": []}
    for length in (8, 7, 1):
        x = torch.arange(1.0, length + 1).requires_grad_()
        seen: list[Tensor] = []

        def square(x: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(x.detach().clone())
            return x * x

        recomputed(square, x, rng=mesh.rng, shard_over=mesh.tp).sum().backward()
        found["gathered"].append(torch.equal(*seen))
        found["gradients"].append(torch.equal(x.grad, 2 * x) if x.grad is not None else None)
    return found


@pytest.mark.parametrize("tp", [2, 3])
def test_inputs_kept_in_shares_come_back_whole(ranks, tp):
    for found in ranks(tp, kept_in_shares, tp):
        assert found == {"gradients": [True] * 3, "gathered": [True] * 3}
