from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.lr_schedule import LRSchedule, MegatronLR, WDSchedule
from lightning_megatron.testing.trainer import quiet_trainer


def test_the_log_lines_of_the_bloom_recipe() -> None:
    schedule = LRSchedule(6e-5, warmup=183105, decay=126953125)
    assert f"{schedule.learning_rate(50):.3E}" == "1.638E-08"
    assert f"{schedule.learning_rate(52):.3E}" == "1.704E-08"


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        (LRSchedule(1.0, style="constant", warmup=4, init_lr=0.2), {0: 0.2, 2: 0.6, 4: 1.0, 99: 1.0}),
        (LRSchedule(1.0, 0.1, warmup=10, decay=110, style="linear"), {5: 0.5, 10: 1.0, 60: 0.55, 110: 0.1, 111: 0.1}),
        (LRSchedule(1.0, 0.1, warmup=10, decay=110), {10: 1.0, 35: 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 60: 0.55}),
        (LRSchedule(1.0, decay=100), {0: 1.0, 50: 0.5, 100: 0.0, 101: 0.0}),
        (LRSchedule(1.0, 0.3, warmup=4, decay=100, style="inverse-square-root"), {4: 1.0, 16: 0.5, 64: 0.3, 101: 0.3}),
        (LRSchedule(1.0, decay=100, style="inverse-square-root"), {0: 1.0, 1: 1.0, 25: 0.2}),
        (LRSchedule(1.0, decay=100, style="wsd", tail=20), {80: 1.0, 90: 2 * 0.5**0.5 - 1, 100: 0.0, 101: 0.0}),
        (LRSchedule(1.0, 0.2, decay=100, style="wsd", tail=20, tail_style="linear"), {80: 1.0, 85: 0.8, 100: 0.2}),
        (LRSchedule(1.0, decay=100, style="wsd", tail=20, tail_style="cosine"), {90: 0.5, 100: 0.0}),
        (LRSchedule(1.0, decay=100, style="wsd", tail=20, tail_style="minus_sqrt"), {85: 0.5, 100: 0.0}),
    ],
)
def test_learning_rate_by_hand(schedule: LRSchedule, points: dict[int, float]) -> None:
    for step, value in points.items():
        assert schedule.learning_rate(step) == pytest.approx(value, abs=1e-12), step


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        (WDSchedule(0.1, 0.1), {0: 0.1, 9: 0.1}),
        (WDSchedule(0.0, 0.1, 10, "linear"), {0: 0.0, 5: 0.05, 10: 0.1, 11: 0.1}),
        (WDSchedule(0.1, 0.3, 12, "cosine"), {0: 0.1, 4: 0.15, 6: 0.2, 12: 0.3, 13: 0.3}),
    ],
)
def test_weight_decay_by_hand(schedule: WDSchedule, points: dict[int, float]) -> None:
    for step, value in points.items():
        assert schedule.weight_decay(step) == pytest.approx(value, abs=1e-12), step


def test_scheduler_keeps_the_ratio_of_groups() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups = [{"params": [a], "weight_decay": 0.1}, {"params": [b], "weight_decay": 0.0, "lr": 2e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    lr = LRSchedule(1e-3, warmup=40, decay=80, style="linear")
    scheduler = MegatronLR(optimizer, lr, WDSchedule(0.0, 0.1, 40, "linear"), step_size=4)
    seen = []
    for _ in range(10):
        optimizer.step()
        scheduler.step()
        seen.append([optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"]])
    assert seen[4] == pytest.approx([5e-4, 1e-3])
    assert seen[9] == pytest.approx([1e-3, 2e-3])
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.1)
    assert optimizer.param_groups[1]["weight_decay"] == 0.0


def test_scheduler_resumes_from_plain_numbers(tmp_path: Path) -> None:
    def make() -> tuple[torch.optim.Optimizer, MegatronLR]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=1e-3, weight_decay=0.1)
        lr = LRSchedule(1e-3, warmup=4, decay=20)
        return optimizer, MegatronLR(optimizer, lr, WDSchedule(0.0, 0.1, 10, "cosine"))

    optimizer, scheduler = make()
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    torch.save([optimizer.state_dict(), scheduler.state_dict()], tmp_path / "state.pt")
    resumed, resumed_scheduler = make()
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed.load_state_dict(saved[0])
    resumed_scheduler.load_state_dict(saved[1])
    for o, s in ((optimizer, scheduler), (resumed, resumed_scheduler)):
        o.step()
        s.step()
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert resumed.param_groups[0]["weight_decay"] == optimizer.param_groups[0]["weight_decay"] > 0


@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_going_to_a_step_by_number_is_walking_there() -> None:
    """``step(epoch)`` counts optimizer steps, schedules count samples."""

    def after(walk: Callable[[MegatronLR], None]) -> dict[str, Any]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=1e-3, weight_decay=0.1)
        schedule = LRSchedule(1e-3, warmup=16, decay=160)
        scheduler = MegatronLR(optimizer, schedule, WDSchedule(0.0, 0.1, 100, "linear"), step_size=8)
        optimizer.step()
        walk(scheduler)
        group = optimizer.param_groups[0]
        assert group["lr"] == pytest.approx(schedule.learning_rate(40))
        return {"position": scheduler.position, "wd": group["weight_decay"]}

    def walk(scheduler: MegatronLR) -> None:
        for _ in range(5):
            scheduler.step()

    assert after(lambda scheduler: scheduler.step(5)) == after(walk) == {"position": 40, "wd": pytest.approx(0.04)}


def beyond(scheduler: MegatronLR) -> None:
    scheduler.step(40)


def back(scheduler: MegatronLR) -> None:
    for _ in range(9):
        scheduler.step()
    scheduler.step(3)


def to_the_start(scheduler: MegatronLR) -> None:
    scheduler.step(7)
    scheduler.step(0)


def on_from_there(scheduler: MegatronLR) -> None:
    scheduler.step(6)
    scheduler.step()
    scheduler.step(units=4)
    scheduler.step(units=4)


def of_a_state(scheduler: MegatronLR) -> None:
    """Into a scheduler that has walked elsewhere, and on by number."""
    state = scheduler.state_dict()
    for _ in range(12):
        scheduler.step()
    scheduler.load_state_dict(state)
    scheduler.step(2)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize(
    ("go", "steps"), [(beyond, 40), (back, 3), (to_the_start, 0), (on_from_there, 8), (of_a_state, 2)]
)
def test_wherever_a_number_leads_rate_and_decay_are_those_of_walking_there(
    go: Callable[[MegatronLR], None], steps: int
) -> None:
    def after(go: Callable[[MegatronLR], None]) -> tuple[int, float, float]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=1e-3, weight_decay=0.1)
        schedule = LRSchedule(1e-3, 1e-5, warmup=16, decay=160)
        scheduler = MegatronLR(optimizer, schedule, WDSchedule(0.0, 0.1, 100, "linear"), step_size=8)
        optimizer.step()
        go(scheduler)
        return scheduler.position, optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]

    def walk(scheduler: MegatronLR) -> None:
        for _ in range(steps):
            scheduler.step()

    assert after(go) == pytest.approx(after(walk))
    assert after(walk)[0] == 8 * steps


@pytest.mark.parametrize(
    ("arguments", "faulty"),
    [
        ({"max_lr": 0.0, "style": "constant"}, {"max_lr"}),
        ({"max_lr": 1.0, "min_lr": 2.0, "init_lr": -1.0, "decay": 10}, {"min_lr", "init_lr"}),
        ({"max_lr": 1.0, "warmup": 10, "decay": 10}, {"decay"}),
        ({"max_lr": 1.0, "warmup": -1, "decay": 10}, {"warmup"}),
        ({"max_lr": 1.0, "decay": 10, "style": "wsd"}, {"tail"}),
        ({"max_lr": 1.0, "decay": 10, "style": "wsd", "tail": 11}, {"tail"}),
        ({"max_lr": 1.0, "decay": 10, "tail": 5}, {"tail"}),
        ({"max_lr": 1.0, "decay": 10, "style": "cosinus", "tail_style": "log"}, {"style", "tail_style"}),
    ],
)
def test_impossible_learning_rates(arguments: dict, faulty: set[str]) -> None:
    with pytest.raises(ConfigError) as error:
        LRSchedule(**arguments)
    assert {problem.argument for problem in error.value.problems} == faulty


@pytest.mark.parametrize(
    ("arguments", "faulty"),
    [
        ({"start": -0.1, "end": 0.1, "length": 5, "style": "linear"}, {"start"}),
        ({"start": 0.2, "end": 0.1, "length": 5, "style": "linear"}, {"end"}),
        ({"start": 0.0, "end": 0.1}, {"style"}),
        ({"start": 0.0, "end": 0.1, "style": "cosine"}, {"length"}),
    ],
)
def test_impossible_weight_decays(arguments: dict, faulty: set[str]) -> None:
    with pytest.raises(ConfigError) as error:
        WDSchedule(**arguments)
    assert {problem.argument for problem in error.value.problems} == faulty


class Epochs(BoringModel):
    """Rates and weight decays of each epoch, of a schedule that moves between epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        schedule = LRSchedule(1e-3, 1e-5, warmup=16, decay=48)
        scheduler = MegatronLR(optimizer, schedule, WDSchedule(0.0, 0.1, 40, "linear"), step_size=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}

    def on_train_epoch_end(self) -> None:
        group = self.trainer.optimizers[0].param_groups[0]
        self.seen.append((group["lr"], group["weight_decay"]))


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_by_epochs_goes_on_in_a_resumed_run(tmp_path: Path) -> None:
    """Held against the formulas, beyond the end of the decay, and against a run that was not stopped."""

    def run(epochs: int, before: Path | None = None) -> tuple[list[tuple[float, float]], Path]:
        module, path = Epochs(), tmp_path / f"{epochs}-{before is None}.ckpt"
        trainer = quiet_trainer(MegatronStrategy(), max_epochs=epochs, max_steps=-1, limit_train_batches=2)
        trainer.fit(module, ckpt_path=before)
        trainer.save_checkpoint(path)
        return module.seen, path

    whole, _ = run(8)
    first, path = run(3)
    rest, _ = run(8, path)
    assert first + rest == whole
    lr, wd = LRSchedule(1e-3, 1e-5, warmup=16, decay=48), WDSchedule(0.0, 0.1, 40, "linear")
    assert whole == [
        (pytest.approx(lr.learning_rate(8 * n)), pytest.approx(wd.weight_decay(8 * n))) for n in range(1, 9)
    ]
