"""The search for layouts, held against a look at every candidate; and ways out of too little memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.models.presets import preset
from lightning_megatron.tools.planning.bound import Bound
from lightning_megatron.tools.planning.candidates import job_of_candidate, layout_candidates, with_fewer_layers
from lightning_megatron.tools.planning.core.device_file import load_device
from lightning_megatron.tools.planning.plan import plan_of
from lightning_megatron.tools.planning.request import PlanRequest
from lightning_megatron.tools.planning.search import search, step_seconds
from lightning_megatron.tools.planning.settings import Feed, job_of
from lightning_megatron.tools.planning.time.step import time_of
from lightning_megatron.tools.planning.ways_out import ways_out

GIB = 2**30


def request(model: str, device: str, devices: int, seq_length: int, batch: int, **other: Any) -> PlanRequest:
    return PlanRequest(preset(model), load_device(device), devices, seq_length, batch, **other)


REQUESTS = {
    "dense": request("llama2-7b", "a100-80", 8, 4096, 64),
    "short of memory": request("llama2-7b", "a100-40", 8, 4096, 64, max_memory=20 * GIB),
    "long": request("llama3.1-8b", "h100", 8, 32768, 16),
    "two nodes": request("gpt3-7.5b", "h100", 16, 2048, 64),
    "experts": request("mixtral-8x7b", "gaudi2", 16, 4096, 32, fixed={"micro_batch_size": 1}),
    "scores kept": request("gpt3-1.7b", "a100-40", 4, 2048, 16, attention="reference"),
    "fixed": request("llama2-13b", "h100", 16, 4096, 64, fixed={"tp": 4, "recompute": "full"}),
}


SLOW = ("dense", "long", "short of memory")
LONG = ("two nodes", "experts")


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in REQUESTS if name not in (*SLOW, *LONG)),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in LONG),
    ],
)
def test_the_search_finds_the_fastest_of_all_candidates(name: str) -> None:
    asked = REQUESTS[name]
    found = search(asked, 3)
    best: dict[tuple[int, ...], float] = {}
    every = list(chain.from_iterable(layout_candidates(asked, Bound(asked).comm_type)))
    for candidate in (choice for each in every for choice in (each, *with_fewer_layers(asked, each))):
        try:
            plan = plan_of(job_of_candidate(asked, candidate), asked.limit, asked.device)
        except ConfigError:
            continue
        if plan.fits:
            best[candidate.ranks] = min(best.get(candidate.ranks, float("inf")), step_seconds(plan))
    times = [step_seconds(plan) for plan in found.plans]
    assert times == pytest.approx(sorted(best.values())[: len(times)], rel=1e-9)
    assert found.looked_at < len(every)


@pytest.mark.parametrize(
    "asked",
    [
        REQUESTS["scores kept"],
        REQUESTS["short of memory"],
        request("llama3.1-70b", "h200", 32, 8192, 256),
        *(
            pytest.param(request("llama3.1-70b", "h100", devices, 8192, 512, max_memory=limit), marks=pytest.mark.slow)
            for devices, limit in ((128, 70 * 10**9), (64, None))
        ),
        pytest.param(request("llama3.1-70b", "gaudi3", 64, 8192, 512), marks=pytest.mark.slow),
    ],
)
def test_the_best_layouts_do_not_depend_on_how_many_are_asked_for(asked: PlanRequest) -> None:
    """Held against the search for more layouts; three of these jobs got layouts 16 to 19 % slower for one alone."""
    most = search(asked, 6).plans
    for top in (1, 3):
        assert [plan.job for plan in search(asked, top).plans] == [plan.job for plan in most[:top]]


@pytest.mark.parametrize("name", REQUESTS)
def test_no_candidate_is_faster_than_its_bound(name: str) -> None:
    """Held against the predicted time, which the search trusts a bound to be below."""
    asked = REQUESTS[name]
    bound, device = Bound(asked), asked.device
    groups = list(layout_candidates(asked, bound.comm_type))
    for group in groups[:: max(1, len(groups) // 40)]:
        for candidate in (each for whole in group for each in (whole, *with_fewer_layers(asked, whole)[:1])):
            with suppress(ConfigError):
                job = job_of_candidate(asked, candidate)
                assert bound.seconds(candidate) <= time_of(job, device).step * (1 + 1e-9), candidate


@pytest.mark.parametrize("name", REQUESTS)
def test_the_bound_of_a_group_is_not_above_that_of_any_candidate(name: str) -> None:
    asked = REQUESTS[name]
    bound = Bound(asked)
    groups = list(layout_candidates(asked, bound.comm_type))
    assert len(groups) > 1
    for group in groups:
        least = [bound.seconds(candidate) for candidate in group]
        assert len(least) == len(group)
        assert 0.0 < bound.least(group) <= min(least) * (1 + 1e-9)


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_found_fits_and_trains_the_batch(name: str) -> None:
    asked = REQUESTS[name]
    found = search(asked, 4)
    ranks = set()
    for plan in found.plans:
        job, layout = plan.job, plan.job.layout
        assert plan.memory.peak <= asked.limit
        assert job.global_batch_size == asked.global_batch_size
        assert layout.world_size == asked.num_devices
        assert layout.tp <= asked.device.devices_per_node
        ranks.add((layout.tp, layout.pp, layout.cp, layout.ep, layout.etp))
        for argument, value in asked.fixed.items():
            known = {"tp": layout.tp, "recompute": job.recompute.granularity, "micro_batch_size": job.micro_batch_size}
            assert known[argument] == value
    assert len(ranks) == len(found.plans) == (4 if name != "fixed" else len(found.plans))


def test_too_few_devices_get_the_layout_that_needs_least() -> None:
    found = search(request("llama3.1-405b", "h100", 8, 8192, 64))
    assert not found.plans
    assert found.closest is not None
    assert not found.closest.fits
    assert found.closest.job.recompute.granularity == "full"


def test_a_number_of_devices_that_is_impossible_gets_every_reason() -> None:
    with pytest.raises(ConfigError) as raised:
        search(request("llama2-7b", "h100", 7, 4096, 64, fixed={"pp": 1}))
    reasons = {problem.argument: problem for problem in raised.value.problems}
    assert {"tp", "seq_length", "global_batch_size"} <= reasons.keys()
    assert reasons["tp"].nearest == (8, 4, 2)
    assert reasons["global_batch_size"].nearest == (63, 70)


def test_faults_of_a_request_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        request("llama2-7b", "h100", 12, 5000, 64, fixed={"tpp": 2})
    assert {problem.argument for problem in raised.value.problems} == {"devices", "seq_length", "tpp"}
    with pytest.raises(ConfigError) as raised:
        request("llama2-7b", "h100", 0, -1, 64)
    assert {problem.argument for problem in raised.value.problems} == {"num_devices", "seq_length"}


TOO_LARGE = {
    "plain": ("llama3.1-8b", {"micro_batch_size": 4}, 50),
    "nothing sharded": ("llama2-7b", {"micro_batch_size": 1, "distributed_optimizer": False}, 60),
    "recomputed already": ("llama3.1-8b", {"micro_batch_size": 1, "recompute": "full"}, 30),
    "experts": ("mixtral-8x7b", {"tp": 2, "micro_batch_size": 1}, 90),
    "interleaved": ("llama3.1-8b", {"pp": 4, "vpp": 4, "micro_batch_size": 2}, 40),
}


@pytest.mark.parametrize(("name", "device"), [*product(TOO_LARGE, ["h100", None])])
def test_ways_out_fit_and_keep_the_global_batch(name: str, device: str | None) -> None:
    model, arguments, room = TOO_LARGE[name]
    job = job_of(preset(model), Feed(16, 4096, 32), arguments)
    limit = int(room * GIB)
    assert plan_of(job, limit).memory.peak > limit
    ways = ways_out(job, limit, None if device is None else load_device(device))
    assert 1 <= len(ways) <= 3
    costs = [way.number if way.plan.time is None else way.plan.time.step for way in ways]
    assert costs == sorted(costs)
    for way in ways:
        assert way.plan.memory.peak <= limit
        assert way.plan.job.global_batch_size == job.global_batch_size
        assert way.plan.job.world_size == job.world_size
        assert way.changes
        # The changes alone, given to the strategy and the data, are the job.
        changed = {**arguments, **way.changes}
        batch = changed.pop("batch_size", 32)
        assert job_of(preset(model), Feed(16, 4096, batch), changed) == way.plan.job


def test_ways_out_of_a_job_that_no_change_can_save() -> None:
    job = job_of(preset("llama3.1-405b"), Feed(1, 4096, 1), {"recompute": "full"})
    assert ways_out(job, 10 * GIB) == []


def test_more_devices_are_never_slower_in_all() -> None:
    base = REQUESTS["dense"]
    rates = [search(replace(base, num_devices=n), 1).plans[0] for n in (8, 16, 32, 64)]
    speeds = [plan.time.tokens_per_second for plan in rates if plan.time]
    assert speeds == sorted(speeds)
