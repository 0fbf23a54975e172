"""Rows of experts with capacities, weights in fp8, and the names that formula and rehearsal have in common."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.config.capacity import padded_rows
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.moe import MoEConfig
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.presets import preset
from lightning_megatron.moe.capacity_bins import CapacityBins
from lightning_megatron.tools.planning.core.device_file import load_device
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.memory.causes import COMMON, REST, WORK, by_common_cause
from lightning_megatron.tools.planning.memory.formulas import FP8
from lightning_megatron.tools.planning.memory.peak import memory_of
from lightning_megatron.tools.planning.time.step import time_of


@pytest.mark.parametrize("imbalance", [1.0, 1.3, 4.0])
def test_padded_rows_are_those_that_the_bins_choose(imbalance: float) -> None:
    config = MoEConfig(num_experts=8, moe_router_topk=2, moe_capacity_bins=6)
    tokens = 4096
    fullest = min(tokens, int(tokens * 2 / 8 * imbalance))
    counts = torch.full((8,), (tokens * 2 - fullest) // 7)
    counts[0] = fullest
    chosen = CapacityBins(config, ParallelMesh.single()).choose(counts, tokens)
    assert padded_rows(config, tokens, imbalance) == chosen


def test_without_padding_there_is_no_number_of_rows() -> None:
    assert padded_rows(MoEConfig(num_experts=8, moe_capacity_factor=1.5), 4096) is None
    padded = MoEConfig(num_experts=8, moe_capacity_factor=1.5, moe_pad_to_capacity=True)
    assert padded_rows(padded, 4096) == 1536


def _mixtral(**experts: object) -> PlannedJob:
    config = preset("mixtral-8x7b").replace(**experts)
    return PlannedJob(config, ParallelLayout(tp=1, pp=4, ep=8).resolve(32), 4096, 1, 8)


def test_capacities_cost_memory_and_time() -> None:
    even, binned = _mixtral(), _mixtral(moe_capacity_bins=10)
    half_more = _mixtral(moe_capacity_factor=1.5, moe_pad_to_capacity=True)
    device = load_device("h100")
    peaks = [memory_of(job, 0).peak for job in (even, binned, half_more)]
    assert peaks == sorted(peaks)
    times = [time_of(job, device).by_cause["ep"] for job in (even, binned, half_more)]
    assert times == sorted(times)
    assert times[2] == pytest.approx(1.5 * times[0], rel=0.02)


def test_weights_in_fp8_are_those_of_the_inner_layers() -> None:
    layout = ParallelLayout(tp=4, pp=2).resolve(8)
    wide, narrow = (PlannedJob(preset("llama3.1-8b"), layout, 4096, 1, 8, fp8=fp8) for fp8 in (False, True))
    layer = 4096 * (4096 * 2 + 1024 * 2 + 3 * 14336) // 4
    for rank in (0, 1):
        found = memory_of(narrow, rank)
        assert found.by_cause[FP8] == 2 * 15 * layer  # of 16 layers; the first and the last one of all are not in fp8
        assert found.peak - memory_of(wide, rank).peak == found.by_cause[FP8]
        assert found.after_step == memory_of(wide, rank).after_step


def test_causes_of_formula_and_rehearsal_have_common_names() -> None:
    estimate = memory_of(_mixtral(), 0)
    common = by_common_cause(estimate.by_cause)
    assert set(common) <= set(COMMON)
    assert sum(common.values()) == estimate.peak
    rehearsed = {"parameters": 5, "activations: attention": 3, "logits": 2, "activation gradients": 1, "other": 4}
    assert by_common_cause(rehearsed) == {"parameters": 5, WORK: 6, REST: 4}
