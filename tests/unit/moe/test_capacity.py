"""Queues, drops and bins."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.config.capacity import expert_capacity, first_edges, lowest_capacity
from lightning_megatron.config.moe import MoEConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.moe.capacity import drop_overflow, permute_by_expert
from lightning_megatron.moe.capacity_bins import CapacityBins, expected_waste, optimized_edges


@pytest.mark.parametrize(("tokens", "topk", "experts", "factor", "right"), [(10, 2, 4, 1.0, 5), (10, 2, 3, 1.25, 9)])
def test_capacity_is_the_ceiling_of_an_even_share(tokens, topk, experts, factor, right):
    assert expert_capacity(tokens, topk, experts, factor) == right


@given(st.integers(1, 5), st.integers(0, 9), st.integers(1, 3), st.integers(0, 4), st.booleans(), st.integers(0, 99))
def test_exactly_the_overflow_is_dropped_by_either_policy(experts, tokens, topk, capacity, by_weight, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(experts + 1, (tokens, topk), generator=generator)  # some were sent nowhere before
    weights = torch.rand(tokens, topk, generator=generator)
    kept = drop_overflow(ids, experts, capacity, weights if by_weight else None)
    for e in range(experts):
        wanted = [(t, j) for t, j in itertools.product(range(tokens), range(topk)) if ids[t, j] == e]
        if by_weight:
            wanted.sort(key=lambda choice: -weights[choice].item())
        stays = {(t, j) for t, j in itertools.product(range(tokens), range(topk)) if kept[t, j] == e}
        assert stays == set(wanted[:capacity])
        assert len(wanted) - len(stays) == max(0, len(wanted) - capacity)
    assert ((kept == ids) | (kept == experts)).all()


@given(st.integers(1, 5), st.integers(0, 9), st.integers(0, 99))
def test_a_queue_is_in_the_order_of_tokens(experts, tokens, seed):
    ids = torch.randint(experts + 1, (tokens, 2), generator=torch.Generator().manual_seed(seed))
    order, counts, place = permute_by_expert(ids, experts)
    flat = ids.flatten().tolist()
    assert order.tolist() == sorted(range(len(flat)), key=lambda i: flat[i])
    assert counts.tolist() == [flat.count(e) for e in range(experts)]
    for i, position in zip(order.tolist(), place.tolist(), strict=True):
        assert position == flat[:i].count(flat[i])


def test_the_first_edges_are_intels():
    low = lowest_capacity(4096, 2, 8)
    assert low == 1024
    right = [1088, 1152, 1216, 1280, 1408, 1600, 1920, 2368, 3072, 4096]
    assert first_edges(low, 4096, 10, 1.5, 64) == right


def test_too_few_tokens_for_so_many_bins_are_refused_with_the_number_that_works():
    assert len(first_edges(128, 512, 10, 1.5, 64)) < 10
    bins = CapacityBins(MoEConfig(num_experts=8, moe_capacity_bins=10), ParallelMesh.single())
    with pytest.raises(ConfigError, match=r"moe_capacity_bins=10: between the 128 .*512.*nearest valid: "):
        bins.choose(torch.tensor([512] + [0] * 7), 512)


def trained_bins(requests, **fields):
    config = MoEConfig(num_experts=4, moe_capacity_bins=6, moe_capacity_bins_alignment=8, **fields)
    bins = CapacityBins(config, ParallelMesh.single())
    used = []
    for step in requests:
        for request in step:
            used.append(bins.choose(torch.tensor([request, 0, 0, 0]), 512))
        bins.after_optimizer_step()
    return bins, used


def test_a_capacity_is_the_smallest_bin_that_holds_the_fullest_expert():
    bins, used = trained_bins([[257, 300, 512, 600]], moe_capacity_bins_interval=0)
    edges = bins.edges.tolist()
    assert used[:3] == [min(e for e in edges if e >= r) for r in (257, 300, 512)]
    assert used[3] == 600, "nothing is dropped, even beyond the last bin"
    assert bins.usage.sum() == 4
    assert bins.rows.tolist() == [257 + 300 + 512 + 600, sum(used)]
    bins.eval()
    bins.choose(torch.tensor([300, 0, 0, 0]), 512)
    bins.after_optimizer_step()
    assert bins.usage.sum() == 4, "validation does not count"


class Waits(TorchDispatchMode):
    """Counts reads of single numbers, for each of which the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **kwargs or {})


def test_a_choice_waits_for_the_device_once():
    bins, _ = trained_bins([[300]], moe_capacity_bins_interval=0)
    with Waits() as waits:
        bins.choose(torch.tensor([300, 0, 0, 0]), 512)
    assert waits.number == 0, "beside the one list of numbers that is read at the end"


def test_sums_stay_within_the_32_bits_in_which_a_gaudi_keeps_integers():
    bins, _ = trained_bins([[300]], moe_capacity_bins_interval=0)
    bins.rows.copy_(torch.tensor([2**30, 2**30 + 2**29]))
    bins.usage.copy_(torch.tensor([2**20, 2**24, 0, 1, 2, 4]))
    bins.after_optimizer_step()
    assert bins.rows.tolist() == [2**29, 2**29 + 2**28]
    assert bins.usage.tolist() == [2**19, 2**23, 0, 0, 1, 2]
    bins.after_optimizer_step()
    assert bins.rows.tolist() == [2**29, 2**29 + 2**28], "and small ones as they are"


def test_bins_are_cut_anew_where_they_are_used_and_waste_less():
    generator = random.Random(0)
    requests = [[generator.choice((430, 440, 450, 280))] for _ in range(40)]
    bins, _ = trained_bins(requests[:20], moe_capacity_bins_interval=20)
    fixed, _ = trained_bins(requests[:20], moe_capacity_bins_interval=0)
    assert bins.edges.tolist() != fixed.edges.tolist()
    assert bins.edges[-1] == fixed.edges[-1], "the worst case still fits"
    assert bins.usage.sum() == 0, "counting begins anew"
    assert (bins.edges % 8 == 0).all()
    assert (bins.edges.diff() > 0).all()
    waste = {
        name: sum(b.choose(torch.tensor([r, 0, 0, 0]), 512) - r for (r,) in requests[20:])
        for name, b in {"anew": bins, "fixed": fixed}.items()
    }
    assert waste["anew"] < 0.5 * waste["fixed"]


def test_bins_that_waste_little_are_left_alone():
    requests = [[300, 500] for _ in range(5)]
    bins, _ = trained_bins(requests, moe_capacity_bins_interval=5, moe_capacity_bins_max_overhead=10.0)
    fixed, _ = trained_bins(requests, moe_capacity_bins_interval=0)
    assert bins.edges.tolist() == fixed.edges.tolist()


@given(st.lists(st.integers(0, 50), min_size=3, max_size=6), st.integers(1, 4))
@example([29, 31, 0], 3)  # joining twice, and forgetting in between where requests were, wastes more
def test_new_edges_waste_no_more_than_old_ones_in_expectation(usage, alignment):
    edges = [20 * alignment * (i + 1) for i in range(len(usage))]
    found = optimized_edges(edges, usage, 8, alignment)
    assert len(found) == len(edges)
    assert found == sorted(set(found))
    assert found[-1] == edges[-1]
    spread = [0.0] * len(found)  # the same requests, spread evenly over their old bins
    for low, high, times in zip([8, *edges], edges, usage, strict=False):
        for i, edge in enumerate(found):
            begin = found[i - 1] if i else 8
            spread[i] += times * max(0, min(high, edge) - max(low, begin)) / (high - low)
    assert expected_waste(found, spread, 8) <= expected_waste(edges, usage, 8) + 1e-6


def test_bins_come_back_with_the_state_of_a_module():
    bins, _ = trained_bins([[300], [400]], moe_capacity_bins_interval=0)
    other = CapacityBins(bins.config, ParallelMesh.single())
    other.load_state_dict(bins.state_dict())
    assert other.choose(torch.tensor([300, 0, 0, 0]), 512) == bins.choose(torch.tensor([300, 0, 0, 0]), 512)
    assert (other.usage.tolist(), int(other.steps)) == (bins.usage.tolist(), 2)
