from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_megatron import MegatronPrecision
from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.core.bf16_sums import allows_bf16_sums
from lightning_megatron.optim.loss_scale import DynamicLossScale


def test_first_overflow_is_tolerated_and_each_later_one_halves() -> None:
    scaler = DynamicLossScale()
    seen = []
    for _ in range(3):
        scaler.update(found_inf=True)
        seen.append(scaler.scale)
    assert seen == [2.0**32, 2.0**31, 2.0**30]


def test_only_a_growth_gives_the_tolerance_back() -> None:
    scaler = DynamicLossScale(growth_interval=3)
    scaler.update(True)
    scaler.update(False)
    scaler.update(False)
    scaler.update(True)  # good steps do not restore it
    assert scaler.scale == 2.0**31
    for _ in range(3):
        scaler.update(False)
    assert scaler.scale == 2.0**32
    scaler.update(True)
    assert scaler.scale == 2.0**32


def test_grows_after_1000_good_steps_in_a_row() -> None:
    scaler = DynamicLossScale(scale=4.0)
    for _ in range(999):
        scaler.update(False)
    assert scaler.scale == 4.0
    scaler.update(False)
    assert scaler.scale == 8.0
    for _ in range(999):
        scaler.update(False)
    scaler.update(True)
    scaler.update(False)
    assert scaler.scale == 8.0  # an overflow starts the count anew


def test_never_below_the_minimum() -> None:
    scaler = DynamicLossScale(scale=2.0, hysteresis=1)
    for _ in range(5):
        scaler.update(True)
    assert scaler.scale == 1.0 == scaler.inverse


def test_state_continues_exactly() -> None:
    first = DynamicLossScale(growth_interval=4)
    pattern = [True, False, False, True, False, False, False, False, True]
    for found in pattern[:4]:
        first.update(found)
    second = DynamicLossScale(growth_interval=4)
    second.load_state_dict(first.state_dict())
    for found in pattern[4:]:
        first.update(found)
        second.update(found)
    assert first.state_dict() == second.state_dict()


def test_impossible_values_are_named_together() -> None:
    with pytest.raises(ConfigError) as error:
        DynamicLossScale(scale=0.5, growth_interval=0, growth_factor=1.0, backoff_factor=1.0, hysteresis=0)
    assert {p.argument for p in error.value.problems} == {
        "scale", "growth_interval", "growth_factor", "backoff_factor", "hysteresis",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("accumulation", "dp", "allowed"), [(1, 1, True), (32, 8, True), (256, 1, True), (257, 1, False), (33, 8, False)]
)
def test_bf16_sums_end_above_256_summands(accumulation: int, dp: int, allowed: bool) -> None:
    assert allows_bf16_sums(accumulation, dp) is allowed


def test_it_and_lightnings_go_on_from_each_other() -> None:
    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)

    def step(plugin: MegatronPrecision | MixedPrecision, overflow: bool) -> float:
        if isinstance(plugin, MegatronPrecision):
            assert plugin.loss_scale is not None
            plugin.loss_scale.update(overflow)
            return plugin.loss_scale.scale
        assert plugin.scaler is not None
        param = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([param], lr=0.1)
        plugin.scaler.scale(param.sum()).backward()
        assert param.grad is not None
        param.grad.fill_(torch.inf if overflow else 1.0)
        plugin.scaler.step(optimizer)
        plugin.scaler.update()
        return plugin.scaler.get_scale()

    def ours() -> MegatronPrecision:
        return MegatronPrecision("16-mixed", DynamicLossScale(16.0, growth_interval=3, hysteresis=1))

    overflows = [False, True, False, False, False, True, False, False, False, False]
    for made in (ours, lambda: MixedPrecision("16-mixed", "cpu", scaler())):
        first = made()
        expected = [step(first, overflow) for overflow in overflows[:5]]
        checkpoint: dict[str, Any] = {type(first).__qualname__: first.state_dict()}
        first.on_save_checkpoint(checkpoint)
        expected += [step(first, overflow) for overflow in overflows[5:]]
        assert len(set(expected)) == 2
        stock, own = MixedPrecision("16-mixed", "cpu", scaler()), ours()
        stock.load_state_dict(checkpoint["MixedPrecision"])
        own.on_load_checkpoint(checkpoint)
        if "MegatronPrecision" in checkpoint:
            own.load_state_dict(checkpoint["MegatronPrecision"])
        for plugin in (stock, own):
            assert [step(plugin, overflow) for overflow in overflows[5:]] == expected[5:]
