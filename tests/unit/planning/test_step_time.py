"""Predicted time of a step: causes, their sizes by hand, and how they answer to layout and device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.mesh import axis_groups
from lightning_megatron.models.presets import preset
from lightning_megatron.tools.planning.core.device_file import Efficiency, load_device
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.core.parameters import rank_parameters, rank_sizes
from lightning_megatron.tools.planning.plan import plan_of
from lightning_megatron.tools.planning.time.communication import (
    Group,
    Groups,
    layer_communication,
    repeated_communication,
)
from lightning_megatron.tools.planning.time.compute import joined_tokens, layer_work, output_layer
from lightning_megatron.tools.planning.time.optimizer import optimizer_seconds
from lightning_megatron.tools.planning.time.sizes import Sizes
from lightning_megatron.tools.planning.time.software import Software, software_of
from lightning_megatron.tools.planning.time.step import time_of

H100 = load_device("h100")
EAGER, COMPILED = software_of(H100), software_of(H100, compiled=True)


def job(model: str = "llama3.1-8b", devices: int = 8, m: int = 8, recompute: RecomputePlan | None = None, **layout):
    config = preset(model)
    split = ParallelLayout(**layout).resolve(devices)
    plan = RecomputePlan() if recompute is None else recompute
    return PlannedJob(config, split, 4096, 1, m, recompute=plan)


MODELS = {name: preset(name) for name in ("gpt3-7.5b", "llama3.1-8b", "mixtral-8x7b", "gpt2", "deepseek-v2")}
MODELS["further tokens"] = preset("deepseek-v3").replace(mtp_num_layers=2)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "gpt2"])
def test_matrix_products_and_attention_are_the_models_flops(model: str) -> None:
    """Layers and output layer together make ``flops_per_token``, attention at 3.5 / 3 of it for its recomputation."""
    config = MODELS[model]
    planned = PlannedJob(config, ParallelLayout().resolve(1), 2048, 2, 1)
    sizes = Sizes(planned)
    layers = [layer_work(sizes, EAGER, config.has_experts(n)) for n in sizes.layers_of(planned.stages[0])]
    matmul = sum(work.forward.matmul + work.backward.matmul for work in layers)
    attention = sum(work.forward.attention + work.backward.attention for work in layers)
    head, joined = output_layer(sizes, EAGER), joined_tokens(sizes, EAGER)
    further = config.mtp_num_layers
    matmul += (1 + further) * (head.forward.matmul + head.backward.matmul)
    matmul += further * (joined.forward.matmul + joined.backward.matmul)
    padded = 6.0 * config.hidden_size * (sizes.vocab_rows - config.vocab_size) * sizes.tokens * (1 + further)
    total = matmul + attention * 3 / 3.5 - padded
    assert total == pytest.approx(config.flops_per_token(2048) * sizes.tokens, rel=1e-6)


@pytest.mark.parametrize("layout", [{"tp": 2, "cp": 2, "pp": 2}, {"cp": 4, "pp": 4}, {"tp": 4, "pp": 2}, {"cp": 2}])
def test_groups_have_the_strides_of_the_mesh(layout: dict[str, int]) -> None:
    """Distances of neighbours, by the groups of ranks that a run makes on 16 devices."""
    planned = job(devices=16, **layout)
    groups, ranks = Groups(Sizes(planned)), axis_groups(planned.layout)
    for axis, group in {"tp": groups.tp, "cp": groups.cp, "dp_cp": groups.dp, "pp": groups.pp}.items():
        members = ranks[axis][0]
        assert group.size == len(members)
        assert len(members) == 1 or group.stride == members[1] - members[0], axis


@pytest.mark.parametrize("layout", [{"tp": 4}, {"cp": 2}, {"tp": 2, "cp": 2}, {"pp": 2, "tp": 2}])
def test_a_layout_shares_the_products_evenly(layout: dict[str, int]) -> None:
    """FLOPs of all ranks of a replica are those of one device."""
    whole, shared = Sizes(job(devices=1)), Sizes(job(**layout))
    one, part = layer_work(whole, EAGER, False), layer_work(shared, EAGER, False)
    ranks = shared.layout.tp * shared.layout.cp
    assert part.forward.matmul * ranks == pytest.approx(one.forward.matmul)
    assert part.backward.attention * ranks == pytest.approx(one.backward.attention)


@pytest.mark.parametrize("layout", [{"ep": 4}, {"ep": 2, "tp": 2}, {"ep": 2, "tp": 2, "etp": 1}])
def test_experts_of_all_ranks_do_the_work_of_one_device(layout: dict[str, int]) -> None:
    whole, shared = Sizes(job("mixtral-8x7b", 1)), Sizes(job("mixtral-8x7b", 8, **layout))
    one, part = layer_work(whole, EAGER, True), layer_work(shared, EAGER, True)
    assert part.feed_forward.forward.matmul * shared.layout.tp == pytest.approx(one.feed_forward.forward.matmul)


def test_causes_are_all_of_the_step_and_have_formulas() -> None:
    found = time_of(job(tp=2, pp=2, vpp=2), H100)
    assert sum(found.by_cause.values()) == pytest.approx(found.step)
    assert [term.name for term in found.terms] == list(found.by_cause)
    assert found.tokens_per_second == pytest.approx(4096 * 8 * 2 / found.step)
    assert min(found.by_cause.values()) >= 0


@pytest.mark.parametrize(
    ("layout", "cause"),
    [({"tp": 2}, "tp"), ({"cp": 2, "cp_comm_type": "a2a"}, "cp"), ({"pp": 2}, "bubble"), ({}, "dp")],
)
def test_an_axis_costs_where_it_is_used(layout: dict[str, int], cause: str) -> None:
    alone = time_of(job(devices=1), H100).by_cause
    assert alone[cause] == 0
    assert time_of(job(**layout), H100).by_cause[cause] > 0


def test_full_recomputation_is_another_forward() -> None:
    plain = time_of(job(devices=1), H100, COMPILED)
    again = time_of(job(devices=1, recompute=RecomputePlan("full")), H100, COMPILED)
    added = again.step - plain.step
    assert added == pytest.approx(again.by_cause["recompute"])
    assert 0.25 < added / plain.by_cause["compute"] < 0.34
    core = time_of(job(devices=1, recompute=RecomputePlan("selective")), H100, COMPILED).by_cause["recompute"]
    assert 0 < core < 0.2 * added


@pytest.mark.parametrize(
    ("model", "parts", "layout", "sent"),
    [
        ("mixtral-8x7b", ("moe",), {"ep": 4}, {"ep": 1.0}),
        ("mixtral-8x7b", ("mlp",), {"ep": 4}, {"ep": 1.0}),
        ("mixtral-8x7b", ("attention", "moe"), {"ep": 4, "tp": 2}, {"ep": 1.0, "tp": 0.5}),
        ("llama3.1-8b", ("attention",), {"tp": 2, "cp": 2}, {"cp": 1.0, "tp": 0.25}),
        ("llama3.1-8b", ("mlp",), {"tp": 2}, {"tp": 0.25}),
        ("llama3.1-8b", None, {"tp": 2, "cp": 2}, {}),
    ],
)
def test_parts_that_are_computed_again_communicate_again(
    model: str, parts: tuple[str, ...] | None, layout: dict[str, int], sent: dict[str, float]
) -> None:
    """Of four gathers and scatters over tp in a layer's forward a part does one again, of those of experts all."""
    planned = job(model, recompute=RecomputePlan(parts), **layout)
    sizes, has_experts = Sizes(planned), model == "mixtral-8x7b"
    exposed = layer_communication(sizes, H100, EAGER, layer_work(sizes, EAGER, has_experts), has_experts)
    expected = sum(exposed.forward[axis] * share for axis, share in sent.items())
    assert (expected > 0) == bool(parts)
    assert repeated_communication(sizes, exposed, has_experts) == pytest.approx(expected)


def test_a_larger_share_of_the_peak_is_a_shorter_step() -> None:
    faster = replace(H100, efficiency=dict.fromkeys(H100.flops, Efficiency(1.0, 1.0, 1.0)))
    assert time_of(job(), faster).step < time_of(job(), H100).step
    assert time_of(job(), faster).mfu < 1


def test_small_products_are_less_efficient_than_large_ones() -> None:
    """No constant says so: their bytes do."""

    def mfu(hidden: int) -> float:
        config = TransformerConfig(16, hidden, hidden // 128, 50304, 2048)
        return time_of(PlannedJob(config, ParallelLayout().resolve(1), 2048, 8, 4), H100).mfu

    assert mfu(1024) < mfu(2048) < mfu(4096) < mfu(8192)


def test_the_link_of_a_group_follows_from_its_place() -> None:
    fast, slow = H100.within_node.bandwidth, H100.between_nodes.bandwidth
    share = H100.link_efficiency
    assert Group(8, 1).rate(H100) == pytest.approx(fast * share)
    assert Group(4, 8).rate(H100) == pytest.approx(slow * share)  # one member a node
    assert Group(32, 2).rate(H100) == pytest.approx(4 * slow * share)  # four cards of a node
    assert Group(64, 1).rate(H100) == pytest.approx(8 * slow * share)
    assert Group(1, 1).gather(H100, 1e9) == 0


def test_data_parallel_waiting_without_overlap_is_all_of_it() -> None:
    hidden = time_of(job(), H100)
    shown = time_of(replace(job(), overlap_grad_reduce=False, overlap_param_gather=False), H100)
    assert hidden.hidden > 0
    assert shown.hidden == 0
    assert shown.by_cause["dp"] == pytest.approx(hidden.by_cause["dp"] + hidden.hidden)


@pytest.mark.parametrize("cp", [2, 8])
def test_ranks_of_cp_share_the_optimizers_work_like_replicas(cp: int) -> None:
    """Against ``dp_cp`` of the mesh: eight devices update an eighth each, however they are divided."""
    one, shared = Sizes(job()), Sizes(job(cp=cp))
    assert optimizer_seconds(shared, H100, 1e9, 0.0) == pytest.approx(optimizer_seconds(one, H100, 1e9, 0.0))


def test_an_uneven_load_of_experts_slows_their_layer() -> None:
    even = job("mixtral-8x7b", 8, ep=8)
    uneven = replace(even, expert_imbalance=1.5)
    before, after = time_of(even, H100).by_cause, time_of(uneven, H100).by_cause
    assert after["compute"] > before["compute"] * 1.2
    assert after["ep"] == pytest.approx(before["ep"] * 1.5, rel=0.1)


def test_sums_of_gradients_in_blocks_are_kernels_that_the_host_starts() -> None:
    """Blocks of 2**18 elements: as many kernels as the layer's weights have blocks, in bf16 and not in fp32."""
    plain, blocks = Software(), software_of(load_device("cpu"))
    for precision, more in (("bf16-mixed", True), ("32-true", False), ("bf16-true", False)):
        sizes = Sizes(replace(job(devices=1), precision=precision))
        one, other = (layer_work(sizes, each, False).backward.kernels for each in (plain, blocks))
        weights = sizes.config.mixer_matrices(0) + sizes.config.feed_forward_matrices(0)
        assert other - one == pytest.approx(weights / 2**18 if more else 0)


@pytest.mark.parametrize(
    ("model", "layers", "seq", "software", "measured"),
    [
        ("llama3.2-1b", 16, 8192, EAGER, 45_119),
        ("llama3.2-1b", 16, 8192, COMPILED, 51_869),
        ("mixtral-8x7b", 1, 4096, EAGER, 105_545),
    ],
)
def test_our_own_steps_on_an_h200(model: str, layers: int, seq: int, software: Software, measured: int) -> None:
    """Those of benchmarks/device_step_h200_202611.md, which no constant was fitted to, within a tenth."""
    planned = PlannedJob(preset(model).replace(num_layers=layers), ParallelLayout().resolve(1), seq, 1, 8)
    assert time_of(planned, load_device("h200"), software).tokens_per_second == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("model", "layers", "seq", "measured"), [("llama3.2-1b", 16, 8192, 32_122), ("mixtral-8x7b", 1, 4096, 31_384)]
)
def test_memory_of_our_own_steps_on_an_h200(model: str, layers: int, seq: int, measured: int) -> None:
    planned = PlannedJob(preset(model).replace(num_layers=layers), ParallelLayout().resolve(1), seq, 1, 8)
    assert plan_of(planned, None, load_device("h200")).memory.peak / 2**20 == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("model", MODELS)
def test_parameters_of_all_ranks_are_those_of_the_model(model: str) -> None:
    config = MODELS[model]
    planned = PlannedJob(config, ParallelLayout().resolve(1), 1024, 1, 1)
    sizes = Sizes(planned)
    padding = (sizes.vocab_rows - config.vocab_size) * config.hidden_size * (1 if config.tie_embeddings else 2)
    found = sum(rank_sizes(config, planned.layout, planned.stages)) - padding
    assert found == config.num_parameters()


def attention_weights(sizes: Sizes) -> int:
    """Elements of all matrices of attention on a rank."""
    parameters = rank_parameters(sizes.config, sizes.layout, sizes.job.stages)
    return sum(each.size for each in parameters if ".attention." in each.name and each.decay)


@pytest.mark.parametrize("layout", [{"tp": 4}, {"tp": 2, "cp": 2}])
def test_matrices_to_latents_are_whole_on_every_rank_and_their_rows_are_not(layout: dict[str, int]) -> None:
    """Under sequence parallelism each rank makes the latents of its own tokens: no product is made twice."""
    whole, shared = Sizes(job("deepseek-v2", 1)), Sizes(job("deepseek-v2", 8, **layout))
    one, part = layer_work(whole, EAGER, False), layer_work(shared, EAGER, False)
    ranks = shared.layout.tp * shared.layout.cp
    assert part.attention.forward.matmul * ranks == pytest.approx(one.attention.forward.matmul)
    assert part.core.forward.attention * ranks == pytest.approx(one.core.forward.attention)
    config = shared.config
    copied = config.hidden_size * (config.q_lora_rank + config.kv_lora_rank + config.rotary_dim)
    held, held_whole = (attention_weights(each) for each in (shared, whole))
    assert held * shared.layout.tp - held_whole == copied * (shared.layout.tp - 1) * config.num_layers
