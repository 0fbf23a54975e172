"""Layers of experts on every grid of ranks against a dense reference: outputs, all gradients, drops, losses.

The reference computes every expert on every token and knows no dispatcher. Tokens of the whole job are drawn on every
rank; each takes its share by data-parallel rank and, inside, its sequence shard by tp rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm.collectives import all_reduce, all_reduce_max, local_shard
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.moe.aux_loss import count_tokens
from lightning_megatron.moe.dispatch import ExpertGrid, allgather, alltoall, padded_alltoall
from lightning_megatron.moe.layer import MoELayer
from lightning_megatron.testing.parity import differences, load_whole, whole_gradients

S, B, H, FFN, E, K = 8, 2, 12, 8, 4, 2
CONFIG = TransformerConfig(
    1, H, 2, 32, S, ffn_hidden_size=FFN, add_bias_linear=False, activation="swiglu", init_std=0.5,
    num_experts=E, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.1,
)  # fmt: skip
WAYS = {
    "alltoall": CONFIG,
    "allgather": replace(CONFIG, moe_token_dispatcher="allgather"),
    "dynamic": replace(CONFIG, moe_dynamic=True),
    "bins": replace(CONFIG, moe_capacity_bins=2, moe_capacity_bins_alignment=1, moe_capacity_bins_base=1.0),
    "factor, never full": replace(CONFIG, moe_capacity_factor=4.0),
    "factor, never full, padded": replace(CONFIG, moe_capacity_factor=4.0, moe_pad_to_capacity=True),
    "drops": replace(CONFIG, moe_capacity_factor=0.75),
    "drops, padded": replace(CONFIG, moe_capacity_factor=0.75, moe_pad_to_capacity=True),
    "drops, by position": replace(CONFIG, moe_capacity_factor=0.75, moe_token_drop_policy="position"),
    "drops, allgather": replace(CONFIG, moe_capacity_factor=0.75, moe_token_dispatcher="allgather"),
    "pre-softmax, one choice": replace(CONFIG, moe_router_topk=1, moe_router_pre_softmax=True),
    "shared": replace(CONFIG, moe_shared_expert_ffn_hidden_size=8),
    "biases": replace(CONFIG, moe_linear_bias=True),
    "biases, dynamic": replace(CONFIG, moe_linear_bias=True, moe_dynamic=True),
    "biases, drops, padded": replace(CONFIG, moe_linear_bias=True, moe_capacity_factor=0.75, moe_pad_to_capacity=True),
}


def layer_of(config: TransformerConfig, mesh: ParallelMesh, activation: str = "swiglu") -> MoELayer:
    return MoELayer(replace(config, activation=activation), mesh, sequence_parallel=mesh.tp.size > 1)


def dense(params: dict[str, Tensor], x: Tensor, routing: Any, activation: str) -> Tensor:
    """Every expert on every token ``[T, H]``, then the weights of the choices that were not dropped."""
    outputs = []
    none = x.new_zeros(E, 1, 1)  # broadcast in place of biases
    biases = params.get("experts.fc1_bias", none), params.get("experts.fc2_bias", none[..., 0])
    for fc1, fc2, b1, b2 in zip(params["experts.fc1"], params["experts.fc2"], *biases, strict=True):
        if activation == "swiglu":
            gate, up = (x @ matrix.t() + bias for matrix, bias in zip(fc1, b1.expand(2, -1), strict=True))
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(x @ fc1.t())
        outputs.append(inner @ fc2.t() + b2)
    table = x.new_zeros(len(x), E + 1)
    table.scatter_add_(1, routing.experts, routing.weights)
    out = torch.einsum("te,eth->th", table[:, :E], torch.stack(outputs))
    if "shared.fc1.weight" in params:
        gate, up = params["shared.fc1.weight"]
        out = out + (F.silu(x @ gate.t()) * (x @ up.t())) @ params["shared.fc2.weight"].t()
    return out


def check(mesh: ParallelMesh, config: TransformerConfig, seed: int, skewed: bool, activation: str) -> dict[str, str]:
    torch.manual_seed(seed)
    single = layer_of(config, ParallelMesh.single(), activation)
    if skewed:  # expert 2 gets nothing, expert 0 something from everybody
        with torch.no_grad():
            single.router.weight[0], single.router.weight[2] = 3.0, -3.0
    params = dict(single.named_parameters())
    for name, param in params.items():
        if name.endswith("bias"):
            torch.nn.init.normal_(param, std=0.5)
    every = torch.randn(mesh.dp.size, S, B, H) + (1.0 if skewed else 0.0)
    upstream = torch.randn(mesh.dp.size, S, B, H)

    layer = layer_of(config, mesh, activation)
    load_whole(layer, {name: p.detach() for name, p in params.items()}, mesh)
    x = local_shard(every[mesh.dp.rank], mesh.tp).clone().requires_grad_()
    out, aux = layer(x)
    (out * local_shard(upstream[mesh.dp.rank], mesh.tp)).sum().add(aux).backward()
    assert x.grad is not None

    # The reference: rank by rank, because capacity is a rank's; counts for the losses over the ranks of a sequence.
    parts, expected_x, losses = [], every.clone().requires_grad_(), []
    for replica in range(mesh.dp.size):
        shards = expected_x[replica].chunk(mesh.tp.size)
        routings = [single.router(shard) for shard in shards]
        flat = [shard.flatten(0, 1) for shard in shards]
        parts += [dense(params, tokens, r, activation) for tokens, r in zip(flat, routings, strict=True)]
        logits = F.linear(torch.cat(flat), single.router.weight, single.router.bias)
        chosen = (logits if not config.moe_router_pre_softmax else logits.softmax(-1)).topk(config.moe_router_topk)
        counts = count_tokens(chosen.indices, E).float()
        balance = E * (counts * logits.softmax(-1).sum(0)).sum() / (config.moe_router_topk * len(logits) ** 2)
        z = logits.logsumexp(-1).square().mean()
        losses.append(config.moe_aux_loss_coeff * balance + config.moe_z_loss_coeff * z)
    expected = torch.cat(parts).view(mesh.dp.size, S, B, H)
    ((expected * upstream).sum() + torch.stack(losses).sum()).backward()
    assert expected_x.grad is not None

    def mine(whole: Tensor) -> Tensor:
        return local_shard(whole[mesh.dp.rank], mesh.tp)

    found = {"out": out, "dx": x.grad, "aux": all_reduce(aux.detach(), mesh.tp)}
    right = {"out": mine(expected), "dx": mine(expected_x.grad), "aux": losses[mesh.dp.rank]}
    gradients = whole_gradients(layer, mesh)
    for name, p in params.items():
        assert p.grad is not None
        right[name] = p.grad
        found[name] = gradients[name] if "experts" in name else all_reduce(gradients[name], mesh.dp)
    return differences(found, right, rtol=2e-5)


def check_all(layout: dict[str, int]) -> dict[str, Any]:
    mesh = ParallelMesh.create(ParallelLayout(**layout), torch.device("cpu"))
    wrong: dict[str, Any] = {}
    for seed, (name, config) in enumerate(WAYS.items()):
        for skewed in (False, True):
            wrong[f"{name}{', skewed' if skewed else ''}"] = check(mesh, config, seed, skewed, "swiglu")
    wrong["gelu"] = check(mesh, CONFIG, 1, False, "gelu")
    wrong["gelu, dynamic"] = check(mesh, WAYS["dynamic"], 1, False, "gelu")
    return {case: faults for case, faults in wrong.items() if faults}


LAYOUTS = {
    "one": {},
    "dp2": {"dp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "ep4": {"dp": 4, "ep": 4},
    "dp4 ep2": {"dp": 4, "ep": 2},
    "tp2 etp2": {"tp": 2, "dp": 1},
    "tp2 ep2 etp1": {"tp": 2, "dp": 1, "ep": 2, "etp": 1},
    "tp2 etp1": {"tp": 2, "dp": 1, "etp": 1},
    "tp2 dp2 ep2 etp2": {"tp": 2, "dp": 2, "ep": 2},
    "tp2 dp2 ep4 etp1": {"tp": 2, "dp": 2, "ep": 4, "etp": 1},
    "dp4 ep2 etp2, more than tp": {"dp": 4, "ep": 2, "etp": 2},
    "tp4 ep2 etp2": {"tp": 4, "dp": 1, "ep": 2, "etp": 2},
}
SIZES = {name: sizes.get("tp", 1) * sizes.get("dp", 1) for name, sizes in LAYOUTS.items()}


OFTEN = [name for name in LAYOUTS if SIZES[name] <= 2] + ["dp4 ep2", "tp2 dp2 ep2 etp2"]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in LAYOUTS]
)
def test_outputs_and_all_gradients_equal_a_dense_reference(ranks, layout):
    assert ranks(SIZES[layout], check_all, LAYOUTS[layout]) == [{}] * SIZES[layout]


def uneven(layout: dict[str, int]) -> dict[str, str]:
    """Ranks with different numbers of tokens, one with none."""
    mesh = ParallelMesh.create(ParallelLayout(**layout), torch.device("cpu"))
    torch.manual_seed(3)
    config = replace(CONFIG, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.0)
    single = layer_of(config, ParallelMesh.single())
    layer = layer_of(config, mesh)
    load_whole(layer, {name: p.detach() for name, p in single.named_parameters()}, mesh)
    x = torch.randn(3 * mesh.rank, 1, H, requires_grad=True)
    reference = x.detach().clone().requires_grad_()
    out, right = layer(x)[0], single(reference)[0]
    out.square().sum().backward()
    right.square().sum().backward()
    assert x.grad is not None
    assert reference.grad is not None
    return differences({"out": out, "dx": x.grad}, {"out": right, "dx": reference.grad})


def test_ranks_may_have_different_numbers_of_tokens(ranks):
    assert ranks(4, uneven, {"dp": 4, "ep": 2}) == [{}] * 4


def recomputed_alike(layout: dict[str, int]) -> list[str]:
    mesh = ParallelMesh.create(ParallelLayout(**layout), torch.device("cpu"))
    results = []
    for recompute in (False, True):
        torch.manual_seed(5)
        config = replace(CONFIG, moe_input_jitter_eps=0.2)
        layer = layer_of(config, mesh)
        layer.recompute = recompute
        mesh.rng.place(tp_rank=mesh.tp.rank)
        x = torch.randn(S // mesh.tp.size, B, H, requires_grad=True)
        out, aux = layer(x)
        (out.square().sum() + aux).backward()
        counts, losses, forwards = layer.router.load.take(torch.device("cpu"))
        results.append([out, x.grad, *(p.grad for p in layer.parameters()), counts, *losses.values(), forwards])
    same = [torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(*results, strict=True)]
    return [str(i) for i, equal in enumerate(same) if not equal]


@pytest.mark.parametrize("layout", ["ep2", "tp2 ep2 etp1"])
def test_recomputed_experts_give_bit_equal_gradients_and_are_counted_once(ranks, layout):
    assert ranks(2, recomputed_alike, LAYOUTS[layout]) == [[], []]


def zipped_capacities(config: TransformerConfig, layout: dict[str, int]) -> list[int]:
    mesh = ParallelMesh.create(ParallelLayout(**layout), torch.device("cpu"))
    torch.manual_seed(mesh.rank)
    layer = layer_of(config, mesh)
    with torch.no_grad():
        layer.router.weight.copy_(torch.randn(E, H, generator=torch.Generator().manual_seed(0)))
    for _ in range(3):
        layer(torch.randn(S, B, H))[0].sum().backward()
        assert layer.bins is not None
        layer.bins.after_optimizer_step()
    assert layer.bins.usage.sum() == 6, "three forwards on each of two ranks"
    return [*layer.bins.edges.tolist(), *layer.bins.usage.tolist(), *layer.bins.rows.tolist()]


@pytest.mark.parametrize("layout", ["ep2", "tp2 ep2 etp1"])
def test_bins_are_the_same_on_all_ranks_whatever_each_has_seen(ranks, layout):
    config = replace(WAYS["bins"], moe_capacity_bins_interval=0)
    first, second = ranks(2, zipped_capacities, config, LAYOUTS[layout])
    assert first == second


def test_experts_and_features_must_split_and_tp_ranks_need_tokens_of_their_own():
    layout = ParallelLayout(tp=2, ep=3, etp=1, dp=3).resolve(6)
    mesh = ParallelMesh(layout, 0)
    with pytest.raises(ConfigError, match=r"ep=3: 4 experts do not split over 3 ranks; nearest valid: 2, 4"):
        layer_of(CONFIG, mesh)
    with pytest.raises(ConfigError, match=r"sequence_parallel=False: with experts and tp > 1"):
        MoELayer(CONFIG, mesh, sequence_parallel=False)


class ScaledById:
    """Experts that multiply by their number + 1, and by a share of it where ranks hold slices: what arrives is seen."""

    def __init__(self, grid: ExpertGrid, mesh: ParallelMesh) -> None:
        self.first, self.local, self.etp = mesh.ep.rank * grid.local, grid.local, grid.etp
        self.rows = 0

    def grouped(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        self.rows += len(x)
        scales = torch.arange(self.local) + self.first + 1.0
        return x * scales.repeat_interleave(torch.tensor(list(counts))).unsqueeze(1) / self.etp

    def batched(self, x: Tensor) -> Tensor:
        self.rows += int((x != 0).any(-1).sum())
        return x * (torch.arange(self.local) + self.first + 1.0).view(-1, 1, 1) / self.etp

    def routed(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        here = (experts >= self.first) & (experts < self.first + self.local)
        self.rows += int(here.sum())
        return x * ((experts + 1) * weights * here).sum(1, keepdim=True) / self.etp


def conserved(layout: dict[str, int], seeds: range) -> list[str]:
    """Any routing, also one that names an expert twice or nobody: nothing is lost, doubled or sent astray."""
    mesh = ParallelMesh.create(ParallelLayout(**layout), torch.device("cpu"))
    grid = ExpertGrid(E, mesh)
    wrong = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(1000 * seed + mesh.rank)
        shared = torch.Generator().manual_seed(seed)
        tokens, topk, favourite, dropped = (int(torch.randint(n, (), generator=shared)) for n in (9, 3, E, 2))
        x = 1.0 + torch.rand(tokens, 3, generator=generator)
        experts = torch.randint(E + dropped, (tokens, topk + 1), generator=generator)
        experts = torch.where(torch.rand(experts.shape, generator=generator) < 0.4, favourite, experts)
        weights = torch.rand(experts.shape, generator=generator)
        expected = x * ((experts + 1) * weights * (experts < E)).sum(1, keepdim=True)
        most = all_reduce_max(count_tokens(experts, E).max(), mesh.world)
        ways: dict[str, Callable[[ScaledById], Tensor]] = {
            "alltoall": partial(alltoall_with, x, experts, weights, grid),
            "padded": partial(padded_with, x, experts, weights, grid, int(most) + seed % 3),
            "allgather": partial(allgather_with, x, experts, weights, grid),
        }
        for name, way in ways.items():
            compute = ScaledById(grid, mesh)
            if not torch.allclose(way(compute), expected, rtol=1e-5, atol=1e-6):
                wrong.append(f"seed {seed}, {name}")
            arrived = all_reduce(torch.tensor(compute.rows), mesh.world)
            choices = all_reduce((experts < E).sum(), mesh.world)
            if int(arrived) != int(choices) * grid.etp:
                wrong.append(f"seed {seed}, {name}: {arrived} rows for {choices} choices")
    return wrong


def alltoall_with(x: Tensor, experts: Tensor, weights: Tensor, grid: ExpertGrid, compute: ScaledById) -> Tensor:
    return alltoall(x, experts, weights, compute, grid)


def padded_with(
    x: Tensor, experts: Tensor, weights: Tensor, grid: ExpertGrid, capacity: int, compute: ScaledById
) -> Tensor:
    return padded_alltoall(x, experts, weights, compute, grid, capacity)


def allgather_with(x: Tensor, experts: Tensor, weights: Tensor, grid: ExpertGrid, compute: ScaledById) -> Tensor:
    return allgather(x, experts, weights, compute.routed, grid.axis)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if SIZES[name] > 2 else ()) for name in LAYOUTS]
)
def test_tokens_are_conserved_by_every_dispatcher_whatever_the_routing(ranks, layout):
    assert ranks(SIZES[layout], conserved, LAYOUTS[layout], range(60)) == [[]] * SIZES[layout]
