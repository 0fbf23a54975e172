"""DeepSeek's routing against transformers': groups of experts, a bias in the choice, weights as they are, a layer."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.config.moe import MoEConfig
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.moe.layer import MoELayer
from lightning_megatron.moe.router import Router

transformers = pytest.importorskip("transformers")
v2 = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
v3 = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")

S, B, H, E, FFN = 7, 3, 16, 12, 8
GROUPS = [(1, 1), (3, 1), (3, 2), (3, 3), (4, 2), (6, 3)]


def of_v3(**fields: Any) -> Any:
    sizes = {"hidden_size": H, "moe_intermediate_size": FFN, "n_routed_experts": E, "num_hidden_layers": 1}
    return transformers.DeepseekV3Config(**sizes | fields)


def router_of(weight: Tensor, bias: Tensor | None = None, **fields: Any) -> Router:
    config = MoEConfig(num_experts=E, **fields)
    router = Router(H, config, ParallelMesh.single(), sequence_parallel=False, init_std=1.0)
    state = {"weight": weight} if bias is None else {"weight": weight, "expert_bias": bias}
    router.load_state_dict(state)
    return router


def in_order(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Choices by the number of the expert: the order of a token's choices means nothing."""
    order = experts.argsort(-1)
    return experts.gather(-1, order), weights.gather(-1, order)


@pytest.mark.parametrize(
    ("groups", "k", "normalize"),
    [(g, k, n) for g, k, n in product(GROUPS, (2, 4), (True, False)) if g[1] * 12 >= k * g[0]],
)
def test_choices_and_weights_are_those_of_deepseek_v3(groups: tuple[int, int], k: int, normalize: bool) -> None:
    torch.manual_seed(k)
    given = {"n_group": groups[0], "topk_group": groups[1], "num_experts_per_tok": k, "norm_topk_prob": normalize}
    theirs = v3.DeepseekV3TopkRouter(of_v3(**given, routed_scaling_factor=2.5))
    weight, bias = torch.randn(E, H) * 0.3, torch.randn(E) * 0.2
    theirs.load_state_dict({"weight": weight, "e_score_correction_bias": bias})
    fields: dict[str, Any] = {"moe_router_score": "sigmoid", "moe_expert_bias": True, "moe_router_topk": k}
    fields |= {"moe_router_num_groups": groups[0], "moe_router_group_topk": groups[1]}
    fields |= {"moe_router_normalize": normalize, "moe_router_scaling_factor": 2.5}
    x = torch.randn(S, B, H)
    routing = router_of(weight, bias, **fields)(x)
    _, weights, experts = theirs(x)
    mine, right = in_order(routing.experts, routing.weights), in_order(experts, weights)
    assert torch.equal(mine[0], right[0])
    torch.testing.assert_close(mine[1], right[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("groups", [None, *GROUPS])
def test_choices_and_weights_are_those_of_deepseek_v2(groups: tuple[int, int] | None) -> None:
    torch.manual_seed(2)
    sizes: dict[str, Any] = {
        "hidden_size": H,
        "num_attention_heads": 2,
        "n_routed_experts": E,
        "num_experts_per_tok": 2,
    }
    sizes |= {"routed_scaling_factor": 16.0}
    number, chosen = groups or (None, None)
    method = {"topk_method": "greedy" if groups is None else "group_limited_greedy"}
    theirs = v2.DeepseekV2TopkRouter(
        transformers.DeepseekV2Config(**sizes, **method, n_group=number, topk_group=chosen)
    )
    weight, x = torch.randn(E, H) * 0.3, torch.randn(S, B, H)
    theirs.load_state_dict({"weight": weight})
    fields: dict[str, Any] = {"moe_router_pre_softmax": True, "moe_router_scaling_factor": 16.0}
    fields |= {"moe_router_num_groups": number or 0, "moe_router_group_topk": chosen or 0}
    routing = router_of(weight, **fields)(x)
    _, weights, experts = theirs(x)
    mine, right = in_order(routing.experts, routing.weights), in_order(experts, weights)
    assert torch.equal(mine[0], right[0])
    torch.testing.assert_close(mine[1], right[1], rtol=1e-6, atol=1e-7)


def test_groups_limit_the_choice_by_softmax_over_the_chosen_too() -> None:
    weight, x = torch.randn(E, H, generator=torch.Generator().manual_seed(4)), torch.randn(S, B, H)
    fields: dict[str, Any] = {"moe_router_num_groups": 6, "moe_router_group_topk": 1}
    routing = router_of(weight, **fields)(x)
    best = (x.flatten(0, 1) @ weight.t()).argmax(-1)
    assert torch.equal(routing.experts.sort(-1).values, torch.stack((best // 2 * 2, best // 2 * 2 + 1), dim=-1))


def layer_of(theirs: Any, k: int) -> MoELayer:
    """Our layer with the weights of ``DeepseekV3MoE``."""
    fields: dict[str, Any] = {"num_experts": E, "moe_router_topk": k, "moe_router_score": "sigmoid"}
    fields |= {"moe_expert_bias": True, "moe_router_num_groups": 3, "moe_router_group_topk": 2}
    fields |= {"moe_router_scaling_factor": 2.5, "moe_shared_expert_ffn_hidden_size": FFN, "moe_ffn_hidden_size": FFN}
    config = TransformerConfig(1, H, 2, 11, 8, activation="swiglu", add_bias_linear=False, **fields)
    layer = MoELayer(config, ParallelMesh.single(), sequence_parallel=False)
    state = theirs.state_dict()
    shared = [state[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up")]
    layer.load_state_dict(
        {
            "router.weight": state["gate.weight"],
            "router.expert_bias": state["gate.e_score_correction_bias"],
            "experts.fc1": state["experts.gate_up_proj"].unflatten(1, (2, FFN)),
            "experts.fc2": state["experts.down_proj"],
            "shared.fc1.weight": torch.cat(shared).view_as(layer.state_dict()["shared.fc1.weight"]),
            "shared.fc2.weight": state["shared_experts.down_proj.weight"],
        }
    )
    return layer


@pytest.mark.parametrize("k", [2, 5])
def test_a_layer_with_a_shared_expert_computes_and_learns_like_theirs(k: int) -> None:
    torch.manual_seed(k)
    theirs = v3.DeepseekV3MoE(of_v3(num_experts_per_tok=k, n_group=3, topk_group=2, routed_scaling_factor=2.5))
    for tensor in (*theirs.parameters(), theirs.gate.e_score_correction_bias):
        torch.nn.init.normal_(tensor, std=0.3)
    layer, x = layer_of(theirs, k), torch.randn(S, B, H)
    mine, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, _ = layer(mine)
    expected = theirs(right)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for each in (out, expected):
        each.square().mean().backward()
    torch.testing.assert_close(mine.grad, right.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(layer.router.weight.grad, theirs.gate.weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(layer.experts.fc2.grad, theirs.experts.down_proj.grad, rtol=1e-4, atol=1e-6)


def test_a_bias_without_a_rate_stays_as_it_is() -> None:
    bias = torch.arange(E) * 0.125
    router = router_of(torch.randn(E, H), bias, moe_router_score="sigmoid", moe_expert_bias=True)
    router(torch.randn(S, B, H))
    router.after_optimizer_step()
    assert torch.equal(router.expert_bias, bias)
    assert "expert_bias" in router.state_dict()


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"moe_router_group_topk": 2}, "moe_router_group_topk=2: there are no groups to choose from"),
        ({"moe_router_num_groups": 5}, "moe_router_num_groups=5: num_experts=12 does not split into groups"),
        (
            {"moe_router_num_groups": 12, "moe_router_group_topk": 2, "moe_router_score": "sigmoid"},
            "moe_router_num_groups=12: a group's score sums its two best experts, and it has one; nearest valid: 6",
        ),
        (
            {"moe_router_num_groups": 6, "moe_router_group_topk": 1, "moe_router_topk": 3},
            "moe_router_group_topk=1: a token visits 3 experts of 6 groups with 2 each; nearest valid: 2, 6",
        ),
        (
            {"moe_router_num_groups": 3, "moe_router_group_topk": 4},
            "moe_router_group_topk=4: a token visits 2 experts of 3 groups with 4 each; nearest valid: 3, 1",
        ),
        ({"moe_expert_bias": True}, "moe_router_score='softmax': the expert bias needs scores"),
        ({"moe_router_normalize": False}, "moe_router_normalize=False: for softmax over all experts"),
    ],
)
def test_routing_that_cannot_work_is_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        TransformerConfig(1, H, 2, 11, 8, add_bias_linear=False, num_experts=E, **fields)
    assert fault in str(error.value)


@pytest.mark.parametrize(("score", "pre"), [("softmax", True), ("softmax", False), ("sigmoid", False)])
@pytest.mark.parametrize(("groups", "chosen", "k"), [(3, 2, 4), (3, 1, 3), (4, 2, 4), (2, 2, 6), (6, 4, 4)])
def test_groups_are_ranked_by_megatrons_rule(groups: int, chosen: int, k: int, score: str, pre: bool) -> None:
    """Held against Megatron's rule in plain torch: a group's worth is the sum of its best ``topk // group_topk``."""
    torch.manual_seed(5)
    logits = torch.randn(64, E)
    ranking = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1) if pre else logits
    worth = ranking.view(64, groups, -1).topk(k // chosen, -1).values.sum(-1)
    inside = torch.zeros(64, groups).scatter(1, worth.topk(chosen, -1).indices, 1.0).repeat_interleave(E // groups, 1)
    expected = ranking.masked_fill(inside == 0, float("-inf")).topk(k, -1).indices
    config = MoEConfig(
        num_experts=E,
        moe_router_topk=k,
        moe_router_score=score,
        moe_router_pre_softmax=pre,
        moe_router_num_groups=groups,
        moe_router_group_topk=chosen,
        moe_router_group_score_topk=k // chosen,
    )
    assert not config.moe_problems()
    router = Router(E, config, ParallelMesh.single(), sequence_parallel=False, init_std=1.0)
    router.load_state_dict({"weight": torch.eye(E)})
    found = router(logits.view(64, 1, E)).experts
    assert torch.equal(found.sort(-1).values, expected.sort(-1).values)


def test_more_experts_than_a_group_has_cannot_be_summed() -> None:
    fields: dict[str, Any] = {"moe_router_num_groups": 6, "moe_router_group_topk": 2, "moe_router_group_score_topk": 3}
    (problem,) = MoEConfig(num_experts=E, **fields).moe_problems()
    assert (problem.argument, problem.nearest) == ("moe_router_group_score_topk", (2,))
