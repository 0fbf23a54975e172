"""Schedules of a module, from its arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_megatron import GPTModule
from lightning_megatron.errors import ConfigError
from lightning_megatron.lightning.modules.schedules import ModuleSchedules
from lightning_megatron.optim.lr_schedule import LRSchedule, MegatronLR, WDSchedule


def module(**given: Any) -> GPTModule:
    return GPTModule("gpt-tiny", **given)


def test_lengths_in_samples_make_schedules_that_count_samples() -> None:
    made = module(lr=6e-5, warmup_samples=183_105, decay_samples=126_953_125, min_lr=6e-6, lr_schedule="cosine")
    assert made.counts_samples
    schedule = made.schedules.learning_rate(0)
    assert schedule == LRSchedule(6e-5, 6e-6, 0.0, 183_105, 126_953_125)
    assert f"{schedule.learning_rate(52):.3E}" == "1.704E-08"
    assert not module(lr=1e-3, warmup_steps=5).counts_samples


def test_a_tail_of_wsd_and_a_growing_weight_decay() -> None:
    made = module(
        lr=1.0,
        min_lr=0.1,
        init_lr=0.5,
        lr_schedule="wsd",
        warmup_samples=10,
        tail_samples=20,
        tail_style="minus_sqrt",
        weight_decay=0.3,
        start_weight_decay=0.1,
        weight_decay_schedule="cosine",
    ).schedules
    rate = made.learning_rate(100)
    assert [rate.learning_rate(n) for n in (0, 5, 10, 80)] == [0.5, 0.75, 1.0, 1.0]
    assert rate.learning_rate(85) == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(5 / 20)))
    decay = made.decay_of_weights(100)
    assert decay.weight_decay(0) == pytest.approx(0.1)
    assert decay.weight_decay(25) == pytest.approx(0.1 + (1 + math.cos(math.pi * 0.75)) / 2 * 0.2)
    assert decay.weight_decay(101) == 0.3


FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"lr_schedule": "wsd"}, ["tail_steps=0: the tail of a wsd schedule takes"]),
    ({"lr_schedule": "wsd", "decay_samples": 10, "tail_samples": 11}, ["tail_samples=11: the tail"]),
    ({"lr_schedule": "cosine", "tail_steps": 3}, ["tail_steps=3: only a wsd schedule has a tail"]),
    ({"warmup_samples": 9, "decay_steps": 3}, ["decay_steps=3: other lengths of the schedule are numbers of samples"]),
    ({"lr": 1e-3, "init_lr": 1e-2, "warmup_steps": 2}, ["init_lr=0.01: must lie between 0 and max_lr=0.001"]),
    ({"start_weight_decay": 0.01}, ["weight_decay_schedule='constant': 0.01 and 0.1 differ"]),
    ({"start_weight_decay": 0.2, "weight_decay_schedule": "linear"}, ["weight_decay=0.1: the weight decay rises"]),
]


@pytest.mark.parametrize(("given", "texts"), FAULTS, ids=lambda value: " ".join(value))
def test_faults_have_the_names_of_the_arguments(given: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        module(**given)
    found = [str(problem) for problem in raised.value.problems]
    assert len(found) == len(texts)
    assert all(part in text for part, text in zip(texts, found, strict=True))


def test_nothing_that_changes_needs_no_scheduler() -> None:
    assert module().schedules.changes_nothing
    assert not module(warmup_samples=3).schedules.changes_nothing
    assert not module(start_weight_decay=0.0, weight_decay_schedule="linear").schedules.changes_nothing
    assert ModuleSchedules(1.0, 0.1, weight_decay=0.1, start_weight_decay=0.1).problems() == []


def test_steps_of_any_number_of_samples() -> None:
    """Megatron-LM's scheduler moves by the global batch of each step."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-3, weight_decay=0.1)
    rate, decay = LRSchedule(1e-3, 1e-4, warmup=10, decay=60), WDSchedule(0.0, 0.1, 60, "linear")
    scheduler = MegatronLR(optimizer, rate, decay)
    consumed = 0
    for size in (4, 4, 8, 0, 16, 16, 32):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate.learning_rate(consumed), rel=1e-12)
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(decay.weight_decay(consumed))
        optimizer.step()
        scheduler.step(units=size)
        consumed += size
    again = MegatronLR(optimizer, rate, decay)
    again.load_state_dict(scheduler.state_dict())
    assert again.position == 80


def test_a_state_of_an_earlier_version_is_a_number_of_steps() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    scheduler = MegatronLR(optimizer, LRSchedule(1e-3, warmup=10, decay=60), step_size=4)
    state = scheduler.state_dict() | {"last_epoch": 5}
    del state["position"]
    scheduler.load_state_dict(state)
    assert scheduler.position == 20
