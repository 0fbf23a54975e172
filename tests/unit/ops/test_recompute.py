"""Recomputation in one process: what may be asked for, what runs twice, and gradients bit for bit those without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import LayerGroup, RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.attention import KVCache
from lightning_megatron.models.generate import generate
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import preset
from lightning_megatron.moe.experts import RoutedExperts
from lightning_megatron.moe.first_runs import FirstRuns
from lightning_megatron.recompute import recomputed
from lightning_megatron.rng import RNGStreams

GPT = TransformerConfig(3, 16, 4, 37, 12, hidden_dropout=0.3, attention_dropout=0.3, init_std=0.3)
LLAMA = preset("llama-tiny").replace(
    num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=37,
    init_std=0.3, hidden_dropout=0.2, attention_dropout=0.2,
)  # fmt: skip
MIXTRAL = preset("mixtral-tiny").replace(
    num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=37,
    init_std=0.3, hidden_dropout=0.2, attention_dropout=0.2, moe_input_jitter_eps=0.1, moe_z_loss_coeff=0.01,
)  # fmt: skip
TOKENS = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(1))
EVERYTHING = ("attention_norm", "attention", "mlp_norm", "mlp")
PLANS: dict[str, RecomputePlan] = {
    "none": RecomputePlan(),
    "selective": RecomputePlan("selective"),
    "attention": RecomputePlan(["attention"]),
    "mlp": RecomputePlan("mlp"),
    "core and mlp": RecomputePlan(["core_attn", "mlp"]),
    "attention and mlp": RecomputePlan(["attention", "core_attn", "mlp"]),
    "each layer": RecomputePlan("full"),
    "pairs of layers": RecomputePlan("full", num_layers=2),
    "one group": RecomputePlan("full", num_layers=5),
    "first layer": RecomputePlan("full", "block", 1),
    "first two layers": RecomputePlan("full", "block", 2),
}
# The parts of each layer that run twice; a part that is not named runs once. "core" is core attention.
TWICE: dict[str, list[set[str]]] = {
    "none": [set(), set(), set()],
    "selective": [{"core"}] * 3,
    "attention": [{"attention_norm", "attention", "core"}] * 3,
    "mlp": [{"mlp_norm", "mlp"}] * 3,
    "core and mlp": [{"core", "mlp_norm", "mlp"}] * 3,
    "attention and mlp": [{"core", *EVERYTHING}] * 3,
    "each layer": [{"core", *EVERYTHING}] * 3,
    "pairs of layers": [{"core", *EVERYTHING}] * 3,
    "one group": [{"core", *EVERYTHING}] * 3,
    "first layer": [{"core", *EVERYTHING}, set(), set()],
    "first two layers": [{"core", *EVERYTHING}, {"core", *EVERYTHING}, set()],
}


def built(config: TransformerConfig, plan: RecomputePlan) -> GPTModel:
    torch.manual_seed(1)
    return GPTModel(config, recompute=plan)


def calls(model: GPTModel, parts: Sequence[str] = EVERYTHING) -> Counter[str]:
    """Count how often each part of each layer is begun, from now on."""
    counts: Counter[str] = Counter()

    def count(name: str) -> Callable[..., None]:
        return lambda *_: counts.update([name])

    for number, block in model.layers.items():
        for part in parts:
            block.get_submodule(part).register_forward_pre_hook(count(f"{number}.{part}"))
    return counts


def gradients(model: GPTModel) -> dict[str, Tensor]:
    """Of two micro-batches: the generator has moved on when the first recomputation begins."""
    torch.manual_seed(2)
    (model(TOKENS, TOKENS) + model(TOKENS.flip(1), TOKENS)).backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**named, "next random numbers": torch.rand(4)}


@pytest.mark.parametrize("name", PLANS)
def test_counters_prove_what_runs_twice(name):
    model = built(GPT.replace(attention_dropout=0.0), PLANS[name])
    counts = calls(model)
    with profile() as ran:
        model(TOKENS, TOKENS).backward()
    twice = TWICE[name]
    expected = {f"{i}.{part}": 2 if part in twice[i] else 1 for i in range(3) for part in EVERYTHING}
    assert counts == expected
    cores = sum(event.count for event in ran.key_averages() if event.key == "aten::scaled_dot_product_attention")
    assert cores == sum(2 if "core" in parts else 1 for parts in twice)


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("name", PLANS)
def test_gradients_with_dropout_are_bit_for_bit_those_without_recomputation(name, config):
    expected, found = gradients(built(config, RecomputePlan())), gradients(built(config, PLANS[name]))
    assert expected.keys() == found.keys()
    for parameter, gradient in expected.items():
        assert torch.equal(found[parameter], gradient), parameter


EXPERTS = {"experts": RecomputePlan("moe"), "experts inside another part": RecomputePlan(["moe", "mlp"])}


@pytest.mark.parametrize("name", [*PLANS, *EXPERTS])
def test_gradients_of_experts_too(name):
    expected, found = gradients(built(MIXTRAL, RecomputePlan())), gradients(built(MIXTRAL, (PLANS | EXPERTS)[name]))
    assert expected.keys() == found.keys()
    for parameter, gradient in expected.items():
        assert torch.equal(found[parameter], gradient), parameter


def test_experts_run_twice_and_their_router_once(monkeypatch):
    model, experts = built(MIXTRAL, RecomputePlan("moe")), Mock(wraps=RoutedExperts.grouped)
    monkeypatch.setattr(RoutedExperts, "grouped", lambda *args: experts(*args))
    counts = calls(model, ("mlp.router", "attention"))
    model(TOKENS, TOKENS).backward()
    assert set(counts.values()) == {1}
    assert len(counts) == experts.call_count == 6


@pytest.mark.parametrize("name", PLANS)
def test_evaluation_and_decoding_run_everything_once(name):
    model = built(GPT, PLANS[name]).eval()
    counts = calls(model)
    with torch.no_grad():
        model(TOKENS)
    assert set(counts.values()) == {1}
    counts.clear()
    caches = [KVCache() for _ in range(3)]
    model(TOKENS, caches=caches).sum().backward()  # with gradients too: a cache must not grow twice
    assert set(counts.values()) == {1}
    assert {cache.length for cache in caches} == {9}
    assert torch.equal(
        generate(model, TOKENS, 3, temperature=0.0), generate(built(GPT, PLANS["none"]), TOKENS, 3, temperature=0.0)
    )


def test_parameters_keep_their_names():
    names = {tuple(built(GPT, plan).state_dict()) for plan in PLANS.values()}
    assert len(names) == 1


def test_the_streams_say_that_they_are_replaying():
    rng, seen = RNGStreams(), []

    def watched(x: Tensor) -> Tensor:
        seen.append(rng.replaying)
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    recomputed(watched, recomputed(watched, x, rng=rng), rng=rng).sum().backward()
    assert seen == [False, False, True, True]
    assert not rng.replaying


def drawn_once(rng: RNGStreams, numbers: Iterator[float]) -> Callable[[Tensor], Tensor]:
    """A function that multiplies twice by numbers that only its first run takes."""
    inner, outer = FirstRuns(rng), FirstRuns(rng)

    def function(x: Tensor) -> Tensor:
        with inner.forward(learns=True):
            out = (x * inner.once(lambda: next(numbers))).exp()
        with outer.forward(learns=True):
            return out * outer.once(lambda: next(numbers))

    return function


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [0, 0, 1], [1, 0, 1]], ids=str)
@pytest.mark.parametrize("rest", [None, "ends inside", "goes on"])
def test_a_forward_has_its_own_results_again_in_any_order_of_backwards(order: list[int], rest: str | None) -> None:
    """Against the derivative of ``2 exp(x)`` and of ``4 exp(3 x)``; graphs are kept and differentiated again.

    ``rest`` is what follows the part inside another recomputed function, which ends where torch needs no more of it.
    """
    rng = RNGStreams()
    part = drawn_once(rng, iter([1.0, 2.0, 3.0, 4.0]))
    function = part
    if rest == "ends inside":
        function = lambda x: recomputed(part, x, rng=rng) + 0  # noqa: E731
    elif rest == "goes on":
        function = lambda x: recomputed(part, x, rng=rng).square().sqrt()  # noqa: E731
    x = torch.tensor(0.5, requires_grad=True)
    outs = [recomputed(function, x, rng=rng) for _ in range(2)]
    right = [2 * x.exp(), 12 * (3 * x).exp()]
    for number in order:
        (grad,) = torch.autograd.grad(outs[number], x, retain_graph=True)
        torch.testing.assert_close(grad, right[number].detach())


def test_without_recomputation_results_are_new_ones() -> None:
    numbers = iter([1.0, 2.0, 3.0, 4.0])
    part, x = drawn_once(RNGStreams(), numbers), torch.ones(())
    assert [part(x) for _ in range(2)] == [2 * x.exp(), 4 * (3 * x).exp()]


def test_tuples_pass_through():
    layer, rng = nn.Linear(3, 3), RNGStreams()

    def experts(x: Tensor) -> tuple[Tensor, Tensor]:
        out = layer(x).relu()
        return out, out.square().mean()

    x = torch.randn(2, 3, requires_grad=True)
    found = []
    for run in (experts, lambda x: recomputed(experts, x, rng=rng)):
        hidden, loss = run(x)
        found.append(torch.autograd.grad(hidden.sum() + loss, [x, *layer.parameters()]))
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize(
    ("plan", "layers", "expected"),
    [
        (RecomputePlan(), range(3), [((0, 1, 2), False)]),
        (RecomputePlan("selective"), range(3), [((0, 1, 2), False)]),
        (RecomputePlan("full"), range(2, 4), [((2,), True), ((3,), True)]),
        (RecomputePlan("full", num_layers=2), range(4, 9), [((4, 5), True), ((6, 7), True), ((8,), True)]),
        (RecomputePlan("full", "block", 1), range(4, 6), [((4,), True), ((5,), False)]),
        (RecomputePlan("full", "block", 9), range(4, 6), [((4,), True), ((5,), True)]),
        (RecomputePlan("full"), range(0), []),
    ],
)
def test_groups_of_a_stage(plan, layers, expected):
    assert plan.groups(layers) == [LayerGroup(*group) for group in expected]


def test_a_part_inside_another_is_not_recomputed_by_itself():
    plan = RecomputePlan(["core_attn", "attention", "moe"])
    assert [plan.wraps(name) for name in ("core_attn", "attention", "mlp", "moe")] == [False, True, False, True]
    assert hash(plan) == hash(RecomputePlan(("core_attn", "attention", "moe")))


WHOLE = "is about whole layers, and recompute={} is not: set recompute='full', or leave it out; nearest valid: {}"
FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown word": ({"recompute": "selectiv"}, ["recompute='selectiv': unknown; nearest valid: selective"]),
    "no word": (
        {"recompute": True},
        ["recompute=True: must be text or a list or None; nearest valid: None"],
    ),
    "unknown part": (
        {"recompute": ["mlp", "core_atn"]},
        ["recompute='core_atn': no part of a layer; nearest valid: core_attn"],
    ),
    "word in a list": (
        {"recompute": ["full"]},
        ["recompute='full': stands alone, not in a list; nearest valid: core_attn, attention, mlp, moe"],
    ),
    "empty list": ({"recompute": []}, ["recompute=[]: names no part of a layer: leave it out; nearest valid: None"]),
    "method": (
        {"recompute": "full", "recompute_method": "blocks"},
        ["recompute_method='blocks': unknown; nearest valid: block"],
    ),
    "method without layers": (
        {"recompute": "selective", "recompute_method": "block"},
        ["recompute_method='block': " + WHOLE.format("'selective'", "uniform")],
    ),
    "number without layers": ({"recompute_num_layers": 2}, ["recompute_num_layers=2: " + WHOLE.format("None", "1")]),
    "no layers": (
        {"recompute": "full", "recompute_num_layers": 0},
        ["recompute_num_layers=0: must be a whole number of at least 1; nearest valid: 1"],
    ),
    "sharding without ranks": (
        {"recompute": "full", "recompute_shard_saved": True},
        [
            "recompute_shard_saved=True: what is kept would be cut over tensor-parallel ranks and tp=1 has none: "
            "raise tp, or leave it out; nearest valid: False"
        ],
    ),
    "sharding of shards": (
        {"recompute": "full", "recompute_shard_saved": True, "tp": 2},
        [
            "recompute_shard_saved=True: under sequence parallelism what is kept is a shard already: leave it out; "
            "nearest valid: False"
        ],
    ),
    "sharding of parts": (
        {"recompute": ["mlp"], "recompute_shard_saved": True, "tp": 2, "sequence_parallel": False},
        ["recompute_shard_saved=True: " + WHOLE.format("['mlp']", "False")],
    ),
    "several, and others": (
        {"recompute": "ful", "recompute_method": "unifrom", "recompute_num_layers": -1, "bucket_size": 0},
        [
            "bucket_size=0: must be a whole number of at least 1 or None; nearest valid: 1, None",
            "recompute='ful': unknown; nearest valid: full",
            "recompute_method='unifrom': unknown; nearest valid: uniform",
            "recompute_num_layers=-1: must be a whole number of at least 1; nearest valid: 1",
        ],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told_at_once_and_before_any_process(fault):
    arguments, expected = FAULTS[fault]
    with pytest.raises(ConfigError) as caught:
        MegatronStrategy(**arguments)
    assert [str(problem) for problem in caught.value.problems] == expected


def test_experts_of_a_model_without_any_are_refused_before_any_process():
    strategy = MegatronStrategy(recompute="moe")
    strategy.parallel_devices = [torch.device("cpu")]
    expected = "recompute='moe': the model has no experts to recompute; nearest valid: mlp"
    with pytest.raises(ConfigError) as caught:
        strategy.check(GPTModule("gpt-tiny"))
    assert [str(problem) for problem in caught.value.problems] == [expected]
    with pytest.raises(ConfigError, match=expected):
        GPTModel(GPT, recompute=RecomputePlan("moe"))


def test_a_plan_alone_refuses_what_the_strategy_would():
    with pytest.raises(ConfigError, match="recompute_num_layers=2"):
        RecomputePlan("mlp", num_layers=2)
    flat = ParallelLayout(tp=2, sequence_parallel=False)
    assert not RecomputePlan("full", shard_saved=True).problems(flat)
