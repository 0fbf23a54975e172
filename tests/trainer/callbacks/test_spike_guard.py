"""SpikeGuard: steps that are not taken, against runs that never saw their samples; and the way back to a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from fp16 import a_device_that_trains_fp16
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from lightning_megatron import ConfigError, GPTModule, MegatronPrecision, MegatronStrategy, SpikeGuard
from lightning_megatron.data import MegatronSampler, ResumableDataLoader
from lightning_megatron.lightning.callbacks.recent import Recent
from lightning_megatron.lightning.callbacks.spike_guard import SpikeError
from lightning_megatron.optim.loss_scale import DynamicLossScale
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

Ranks = Callable[..., list[Any]]
Leg = dict[str, Any]

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "vocab_multiple": 2,
}
SIZES |= {"num_query_groups": 2, "ffn_hidden_size": 24, "head_dim": 8}
STEPS, BATCH = 24, 4
GUARD: dict[str, Any] = {"window": 16, "warmup": 8, "in_a_row": 3, "margin": 2}


class Boosted(GPTModule):
    """Multiplies the loss of a batch by what its samples say: 1 leaves every bit as it is."""

    extra_batch_keys = ("boost",)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * batch["boost"].amax()
        self.log("train_loss", loss, sync_dist=True)
        return loss


def rows(bad: dict[int, float], without: bool = False) -> list[dict[str, Tensor]]:
    """Texts, ``BATCH`` of them a step; of a bad step the second last one is wrong. Or texts without those steps."""
    tokens = torch.randint(32, (STEPS * BATCH, 9), generator=torch.Generator().manual_seed(2))
    found = []
    for number, text in enumerate(tokens):
        step = number // BATCH
        boost = bad.get(step, 1.0) if number % BATCH == BATCH - 2 else 1.0
        if step not in bad or not without:
            found.append({"tokens": text[:-1], "labels": text[1:], "boost": torch.tensor(boost)})
    return found


def train(
    data: list[dict[str, Tensor]],
    leg: Leg,
    *callbacks: Callback,
    ckpt_path: str | None = None,
    stop: int = -1,
    accumulate: int = 1,
    kind: type[Boosted] = Boosted,
) -> dict[str, Any]:
    """Losses, and all of parameters and optimizer state that this rank holds when the run is over."""
    seed_everything(7, verbose=False)
    leg = dict(leg)
    scale = DynamicLossScale(scale=2.0**4, hysteresis=1, growth_interval=5)
    plugin, clip = MegatronPrecision(leg.pop("precision", "32-true"), scale), leg.pop("clip", {})
    recorder = Recorder()
    with a_device_that_trains_fp16():
        strategy = MegatronStrategy(**leg)
        trainer = quiet_trainer(
            strategy,
            plugins=[plugin],
            max_epochs=1,
            max_steps=stop,
            logger=recorder,
            accumulate_grad_batches=accumulate,
            callbacks=list(callbacks),
            enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
            **clip,
        )
    layout = strategy._job.layout.resolve(dist.get_world_size() if dist.is_initialized() else 1)
    dp = layout.data_parallel_size
    rank = (dist.get_rank() if dp > 1 else 0) % max(dp, 1)
    batches = MegatronSampler(len(data), batch_size=BATCH // dp // accumulate, dp_rank=rank, dp_size=dp)
    loader = ResumableDataLoader(data, batch_sampler=batches)  # type: ignore[arg-type]
    held: dict[str, Any] = {}

    class Look(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            strategy.finish_param_gather()
            held["params"] = {n: p.detach().float().cpu().clone() for n, p in module.named_parameters()}
            held["state"] = [
                value.detach().cpu().clone() if isinstance(value, Tensor) else value
                for sharded in strategy.sharded_optimizers
                for param in sharded.main_params
                for value in sharded.state[param].values()
            ]

    trainer.callbacks.append(Look())  # type: ignore[attr-defined]
    with a_device_that_trains_fp16():
        trainer.fit(kind("llama-tiny", lr=1e-3, **SIZES), loader, ckpt_path=ckpt_path)
    return {"losses": recorder.series("train_loss"), "steps": trainer.global_step, "recorder": recorder, **held}


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one["params"].items():
        assert torch.equal(value, other["params"][name]), name
    assert len(one["state"]) == len(other["state"])
    for a, b in zip(one["state"], other["state"], strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def same(one: list[float], other: list[float]) -> bool:
    return one == other and len(one) > 0


LEGS: dict[str, Leg] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "micro_batch_size": 1},
    "cp2": {"cp": 2, "precision": "bf16-mixed"},
    "dp2": {"precision": "bf16-mixed", "micro_batch_size": 1},
    "dp2-whole": {"distributed_optimizer": False, "clip": {"gradient_clip_val": 0.5}},
    "dp2-fp16": {"precision": "16-mixed", "clip": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}},
}
# Not one of all layouts at a time: NaN, a loss that is 1000 times too large, and an infinite one.
BAD = {10: 1000.0, 14: math.nan, 15: math.inf}


def check_skipping(name: str, accumulate: int) -> None:
    leg = LEGS[name]
    guard = SpikeGuard(**GUARD)
    guarded = train(rows(BAD), leg, guard, accumulate=accumulate)
    plain = train(rows(BAD, without=True), leg, accumulate=accumulate)
    steps = [step.step for step in guard.skipped]
    assert steps == list(BAD), guard.skipped
    assert not guard.returns
    for step in guard.skipped:
        assert step.batches == (step.step * accumulate, (step.step + 1) * accumulate - 1)
        assert step.samples == list(range(step.step * BATCH, (step.step + 1) * BATCH))
        assert step.places == (step.step * BATCH, (step.step + 1) * BATCH - 1)
    assert guarded["steps"] == STEPS
    if dist.get_rank() == 0:
        assert [row["skipped_steps"] for row in guarded["recorder"].rows if "skipped_steps" in row] == [
            *range(1, len(guard.skipped) + 1)
        ]
    if accumulate == 1:
        kept = [loss for step, loss in enumerate(guarded["losses"]) if step not in BAD]
        assert same(kept, plain["losses"])
    assert_same_state(guarded, plain)


# The gate takes one of them.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gate if name == "dp2" else pytest.mark.slow) for name in LEGS]
)
def test_a_skipped_step_leaves_the_run_as_if_its_samples_had_not_been_there(ranks: Ranks, name: str) -> None:
    ranks(2, check_skipping, name, 2 if name in ("dp2-whole", "tp2") else 1)


def test_overflows_are_the_loss_scales_and_spikes_are_not() -> None:
    scales = []

    class Scales(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            scales.append(trainer.strategy.precision_plugin.state_dict())

    guard = SpikeGuard(**GUARD)
    train(rows({20: math.nan, 21: 6e4}), {"precision": "16-mixed"}, guard, Scales())
    assert [step.step for step in guard.skipped] == [20]
    assert scales[20] == scales[19]
    assert scales[21]["scale"] == scales[20]["scale"] / 2


# The way back

STREAK = {12: math.nan, 13: 1000.0, 14: math.nan}


def check_going_back(name: str, folder: str, async_save: bool) -> dict[str, Any]:
    leg = {**LEGS[name], "async_save": async_save}
    path = Path(folder) / name

    def saver(part: str) -> ModelCheckpoint:
        return ModelCheckpoint(path / part, filename="{step}", every_n_train_steps=5, save_top_k=-1)

    guard = SpikeGuard(**GUARD)
    whole = train(rows(STREAK), leg, guard, saver("whole"))
    assert [step.step for step in guard.skipped] == list(STREAK)
    assert [(back.step, back.to) for back in guard.returns] == [(14, 10)]
    assert Path(guard.returns[0].path).name == "step=10.ckpt"
    # Steps 10 and 11 are unlearned, and their samples not read again.
    left_out = rows({step: 1.0 for step in range(10, 15)}, without=True)
    plain = train(left_out, leg)
    assert same(whole["losses"][15:], plain["losses"][10:])
    assert_same_state(whole, plain)
    # The same again, and resumed from before the spikes, from among what was unlearned, and from after the return.
    again = SpikeGuard(**GUARD)
    assert str(train(rows(STREAK), leg, again, saver("again"))["losses"]) == str(whole["losses"])
    for step in (5, 10, 15, 20):
        resumed = SpikeGuard(**GUARD)
        ckpt = str(path / "whole" / f"step={step}.ckpt")
        rest = train(rows(STREAK), leg, resumed, saver(f"rest-{step}"), ckpt_path=ckpt)
        assert str(rest["losses"]) == str(whole["losses"][step:]), step
        assert_same_state(rest, whole)
        assert [s.step for s in resumed.skipped] == list(STREAK)
        assert [(back.step, back.to) for back in resumed.returns] == [(14, 10)]
    return {"losses": whole["losses"]}


@pytest.mark.parametrize("name", ["tp2", "pp2", pytest.param("dp2", marks=pytest.mark.gate)])
@pytest.mark.slow
def test_weights_go_back_and_the_run_goes_on_the_same_each_time(ranks: Ranks, name: str, tmp_path: Path) -> None:
    ranks(2, check_going_back, name, str(tmp_path), name == "dp2")


class Decayed(Boosted):
    """Learning rates that are products of those before; and what each step was taken with."""

    rates: ClassVar[list[float]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def test_learning_rates_do_not_go_back(tmp_path: Path) -> None:
    guard, saver = SpikeGuard(**GUARD), ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    Decayed.rates.clear()
    train(rows(STREAK), {}, guard, saver, kind=Decayed)
    assert [(back.step, back.to) for back in guard.returns] == [(14, 10)]
    assert Decayed.rates[-9:] == pytest.approx([1e-3 * 0.9**step for step in range(15, STEPS)])


def check_checkpoints_near_the_spike_are_passed_over(folder: str) -> None:
    """With a margin of 4, the checkpoint of step 10 is too near; a damaged one is passed over, too."""
    guard = SpikeGuard(**GUARD | {"margin": 4})
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)

    class Damage(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 11:
                next(Path(folder, "step=8.ckpt").glob("*.distcp")).write_bytes(b"")

    train(rows(STREAK), {}, guard, Damage(), saver)
    assert [back.to for back in guard.returns] == [6]
    # A later row of spikes does not go back to what lies between, nor does one go back twice for one row.
    saver = ModelCheckpoint(Path(folder) / "b", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    later = SpikeGuard(**GUARD | {"warmup": 4})
    bad = dict.fromkeys((8, 9, 10, 11, 13, 14, 15), math.nan)
    train(rows(bad), {}, later, saver)
    assert [(back.step, back.to) for back in later.returns] == [(10, 6), (15, 6)], later.returns


def test_checkpoints_that_are_no_good_are_passed_over(tmp_path: Path) -> None:
    check_checkpoints_near_the_spike_are_passed_over(str(tmp_path))


def test_a_run_without_checkpoints_skips_until_it_ends() -> None:
    guard = SpikeGuard(**GUARD | {"stop_after": 6})
    with (
        pytest.warns(UserWarning, match="no checkpoint of this run"),
        pytest.raises(SpikeError, match=r"6 steps in a row were skipped, the last at step 15 because the loss is nan"),
    ):
        train(rows(dict.fromkeys(range(10, 20), math.nan)), {}, guard)


def test_returns_are_limited(tmp_path: Path) -> None:
    guard = SpikeGuard(**GUARD | {"max_returns": 0})
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5)
    with pytest.raises(SpikeError, match="gone back to a checkpoint 0 times"):
        train(rows(STREAK), {}, guard, saver)


def test_the_warning_names_step_reason_and_samples() -> None:
    guard = SpikeGuard(**GUARD)
    said = r"step 10 is skipped: the loss is \d+, .* deviations above the median 3\.\d+ of recent steps; 1 in a row, "
    with pytest.warns(UserWarning, match=rf"{said}samples 40, 41, 42, 43 \(places 40 to 43 of epoch 0\)"):
        train(rows({10: 1000.0}), {}, guard)


# What it does not go together with


class ByHand(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class WeightAveraging(Callback):
    """Lightning has one from 2.6 on."""


@pytest.mark.parametrize(
    ("strategy", "module", "others", "text"),
    [
        (MegatronStrategy, ByHand, (), "under manual optimization they are yours to skip"),
        (MegatronStrategy, BoringModel, (WeightAveraging,), "averaged cannot go back: use in_a_row=None"),
        (lambda: "auto", BoringModel, (), "use that strategy, or Lightning's SpikeDetection"),
    ],
)
def test_what_cannot_work_is_refused(
    strategy: Callable[[], Any], module: type[LightningModule], others: tuple[type[Callback], ...], text: str
) -> None:
    trainer = quiet_trainer(strategy(), max_steps=1, callbacks=[SpikeGuard(), *(other() for other in others)])
    with pytest.raises(ConfigError, match=text):
        trainer.fit(module())


def test_a_window_knows_its_median_and_what_is_far_above() -> None:
    recent = Recent(5, floor=0.1)
    for value in (100.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        recent.add(value)
    assert recent.state() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (recent.median, recent.deviation) == (3.0, pytest.approx(1.4826))
    assert recent.deviations_above(3.0 + 2 * 1.4826) == pytest.approx(2.0)
    assert recent.is_near(3.0 + 6 * 0.3, 6.0)
    assert not recent.is_near(3.1 + 6 * 0.3, 6.0)
    recent.load([0.0, 0.0, 0.0])
    assert recent.deviations_above(1e-9) == math.inf
    assert recent.deviations_above(0.0) == 0.0
