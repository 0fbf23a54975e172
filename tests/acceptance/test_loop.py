"""Checks 1-10 and 16-17: the training loop does on every layout what stock Lightning does on one device."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import (
    LAYOUTS,
    LIGHTNING_2_6,
    ONE,
    PP2,
    SPREAD,
    STOCK,
    TP2PP2,
    Layout,
    Ranks,
    assert_close,
    fit,
    language_model,
    loader,
    on_all,
    series,
    trainer_for,
)
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from lightning_megatron import ConfigError, GPTModule
from lightning_megatron import device as devices
from lightning_megatron.testing.trainer import kind_in_tests

# 1, 2


def test_01_one_rank_is_stock_lightning_bit_for_bit(ranks: Ranks) -> None:
    stock, ours = on_all(ranks, STOCK, series), on_all(ranks, ONE, series)
    if kind_in_tests() is not devices.CPU:  # whose attention and optimizer are not those of the CPU of the stock run
        assert_close(ours, stock)
    else:
        assert ours == stock
    assert len(stock["train_loss"]) == 4


def ten_steps(layout: Layout, preset: str) -> dict[str, list[float]]:
    return series(layout, module=language_model(preset=preset), max_epochs=3, max_steps=10)


@pytest.mark.parametrize(
    "preset", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-tiny", "llama-tiny")), "mixtral-tiny"]
)
def test_02_ten_steps_are_equal_on_all_layouts(ranks: Ranks, preset: str) -> None:
    expected = on_all(ranks, ONE, ten_steps, preset)
    assert len(expected["train_loss"]) == 10
    for layout in SPREAD:
        if layout.ep == 1 or preset.startswith("mixtral"):  # without experts there is nothing to share out
            assert_close(on_all(ranks, layout, ten_steps, preset), expected)


# 3


class Plain(GPTModule):
    """A step as anybody writes it for one device: the model's logits, a loss, and numbers made of both."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch["tokens"])
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        with torch.no_grad():
            right = (logits.argmax(-1) == batch["labels"]).float().mean()
        self.log("train_loss", loss, sync_dist=True)
        self.log("right", right, sync_dist=True)
        return loss


def plain(layout: Layout) -> dict[str, list[float]]:
    return series(layout, ("train_loss", "right"), module=language_model(Plain, lr=1e-2))


def test_03_plain_training_step_runs_on_every_layout(ranks: Ranks) -> None:
    expected = on_all(ranks, STOCK, plain)
    assert len(set(expected["right"])) > 1
    for layout in LAYOUTS:
        assert_close(on_all(ranks, layout, plain), expected)


# 4


class Scheduled(GPTModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


_HOOKS = ("setup", "teardown", "configure_optimizers", "configure_gradient_clipping", "optimizer_step")
_HOOKS += ("optimizer_zero_grad", "lr_scheduler_step", "transfer_batch_to_device")


def recording(base: type[Any], owner: str, trace: list[str]) -> type[Any]:
    """A subclass that notes the name of every hook that is called, and does what ``base`` does.

    No step methods: those run once per micro-batch. Nor ``backward``: the schedule does it. Nor ``prepare_data``, which
    runs on one rank of a node.
    """

    def noting(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            trace.append(f"{owner}.{name}")
            return getattr(base, name)(self, *args, **kwargs)

        return hook

    hooks = [name for name in dir(base) if name.startswith("on_") or name in _HOOKS]
    return type(f"Recording{base.__name__}", (base,), {n: noting(n) for n in hooks if callable(getattr(base, n))})


def hooks_of_a_life(layout: Layout) -> list[str]:
    trace: list[str] = []
    module = language_model(recording(Scheduled, "module", trace))
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "num_sanity_val_steps": 1}
    callback = recording(Callback, "callback", trace)()
    trainer = trainer_for(layout, max_epochs=2, callbacks=[callback], **options)
    trainer.fit(module, loader(layout), loader(layout, 12))
    trainer.validate(module, loader(layout, 12), verbose=False)
    trainer.test(module, loader(layout, 12), verbose=False)
    trainer.predict(module, loader(layout, 12))
    return trace


def test_04_hooks_come_in_the_order_of_a_single_device(ranks: Ranks) -> None:
    expected = on_all(ranks, STOCK, hooks_of_a_life)
    assert len(expected) > 290
    assert len(set(expected)) > 50
    for layout in (ONE, PP2):
        assert on_all(ranks, layout, hooks_of_a_life) == expected


# 5, 6


class Counter(Callback):
    """Values that a callback sees at the end of every batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, float]] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((trainer.global_step, batch_idx, lr))


def accumulated(layout: Layout, **options: Any) -> tuple[Any, Any, Any]:
    counter = Counter()
    extra = options.pop("callbacks", [])
    module = language_model(Scheduled)
    _, recorder = fit(layout, module, callbacks=[counter, *extra], max_epochs=2, **options)
    return counter.seen, recorder.series("train_loss"), recorder.series("grad_norm")


def accumulated_two(layout: Layout) -> tuple[Any, Any, Any]:
    return accumulated(layout, accumulate_grad_batches=2)


def twice_the_batch(layout: Layout) -> tuple[Any, Any, Any]:
    return accumulated(layout, batches=loader(layout, batch_size=2 * layout.batch_size))


@pytest.mark.slow
def test_05_accumulation_equals_a_larger_batch_and_counts_as_stock(ranks: Ranks) -> None:
    (counts, losses, norms) = on_all(ranks, STOCK, accumulated_two)
    (_, _, norms_of_large_batches) = on_all(ranks, ONE, twice_the_batch)
    assert [step for step, _, _ in counts] == [0, 1, 1, 2, 2, 3, 3, 4]
    for layout in LAYOUTS:
        our_counts, our_losses, our_norms = on_all(ranks, layout, accumulated_two)
        assert our_counts == counts
        assert_close(our_losses, losses)
        assert_close(our_norms, norms_of_large_batches)
    assert norms == []  # stock has nothing to log it from


def growing(layout: Layout) -> tuple[Any, Any, Any]:
    return accumulated(layout, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])


def test_06_accumulation_changes_at_the_epoch_boundary(ranks: Ranks) -> None:
    counts, losses, _ = on_all(ranks, STOCK, growing)
    assert [step for step, _, _ in counts] == [1, 2, 3, 4, 4, 5, 5, 6]
    our_counts, our_losses, _ = on_all(ranks, PP2, growing)
    assert our_counts == counts
    assert_close(our_losses, losses)


# 7


class ClipsItself(GPTModule):
    """Clips as the Trainer says, and looks at what it was given."""

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        assert all(param.grad is not None and param.grad.shape == param.shape for param in params)
        assert {id(param) for param in params} == {id(param) for param in self.parameters()}
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)


def clipped(layout: Layout, algorithm: str, value: float) -> list[float]:
    # SGD, since AdamW hardly minds how long a gradient is.
    class WithSGD(GPTModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    options = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
    return series(layout, module=language_model(WithSGD), **options)["train_loss"]


@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.1), pytest.param("value", 0.01, marks=pytest.mark.slow)])
def test_07_clipping_is_equal_on_all_layouts(ranks: Ranks, algorithm: str, value: float) -> None:
    expected, unclipped = on_all(ranks, STOCK, clipped, algorithm, value), on_all(ranks, STOCK, clipped, "norm", 1e6)
    assert expected[-1] != pytest.approx(unclipped[-1], rel=1e-3)
    for layout in LAYOUTS:
        assert_close(on_all(ranks, layout, clipped, algorithm, value), expected)


def clips_itself(layout: Layout) -> list[float]:
    module = language_model(ClipsItself)
    return series(layout, ("grad_norm",), module=module, gradient_clip_val=0.1)["grad_norm"]


def test_07_an_overridden_clipping_sees_the_parameters_and_their_gradients(ranks: Ranks) -> None:
    for layout in LAYOUTS:
        assert all(min(norms) > 0.1 for norms in ranks(layout.world_size, clips_itself, layout))


# 8

STOPS: dict[str, dict[str, Any]] = {
    "max_steps": {"max_steps": 3, "max_epochs": -1},
    "max_steps while accumulating": {"max_steps": 3, "max_epochs": -1, "accumulate_grad_batches": 2},
    "max_epochs": {"max_epochs": 2},
    "max_time": {"max_time": {"microseconds": 1}, "max_epochs": -1},
    "min_steps": {"max_time": {"microseconds": 1}, "min_steps": 6, "max_epochs": -1},
    "limit_*_batches": {"limit_train_batches": 2, "limit_val_batches": 0.5},
    "limit_train_batches as a share": {"limit_train_batches": 0.75},
    "val_check_interval": {"val_check_interval": 3},
    "val_check_interval as a share": {"val_check_interval": 0.5},
    "val_check_interval as a time": {"val_check_interval": "00:01:00:00", "max_epochs": 1},
    "val_check_interval across epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 2},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3},
    "overfit_batches": {"overfit_batches": 2, "max_epochs": 2},
    "fast_dev_run": {"fast_dev_run": 2},
    "num_sanity_val_steps": {"num_sanity_val_steps": 2},
}


class Calendar(Callback):
    """Optimizer steps at which each event happened."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.events.append(("batch", trainer.global_step))

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.events.append(("sanity" if trainer.sanity_checking else "validation", trainer.global_step))


def calendar(layout: Layout, case: str) -> tuple[Any, ...]:
    entries = Calendar()
    options = {"callbacks": [entries], "enable_checkpointing": False} | STOPS[case]
    trainer, _ = fit(layout, validation=loader(layout, 2 * 8), **options)
    return entries.events, trainer.global_step, trainer.current_epoch


def calendars(layout: Layout) -> dict[str, tuple[Any, ...]]:
    return {case: calendar(layout, case) for case in STOPS if LIGHTNING_2_6 or case != "val_check_interval as a time"}


@pytest.mark.slow
def test_08_everything_that_stops_a_run_stops_it_where_stock_does(ranks: Ranks) -> None:
    expected, ours = on_all(ranks, STOCK, calendars), on_all(ranks, PP2, calendars)
    for case in expected:
        assert ours[case] == expected[case], case
    assert expected["max_steps while accumulating"][1] == 3
    assert expected["min_steps"][1] == 6


# 9


def test_09_sanity_checks_run_with_a_pipeline(ranks: Ranks) -> None:
    for layout in (PP2, TP2PP2):
        events, _, _ = on_all(ranks, layout, calendar, "num_sanity_val_steps")
        assert events[:3] == [("sanity", 0), ("sanity", 0), ("batch", 1)]


# 10


class Poisoned(GPTModule):
    """One stage's activations pass an operation whose gradient is not a number."""

    stage = 0

    def configure_model(self) -> None:
        super().configure_model()
        if self.mesh.pp.rank == self.stage and not hasattr(self, "poisoned"):
            self.poisoned = True
            part = next(module for name, module in self.model.named_modules() if name.endswith("norm"))
            part.register_forward_hook(lambda module, args, out: out + (out * 0).abs().sqrt())


class PoisonedLast(Poisoned):
    stage = 1


def with_anomalies(layout: Layout, module: type[GPTModule]) -> str:
    text = "no error"
    try:
        fit(layout, language_model(module), detect_anomaly=True, max_steps=1)
    except Exception as error:
        text = str(error)
    # A rank of a job would end here, and its peers with it; a worker of a pool only lets go of its connections.
    gc.collect()
    dist.destroy_process_group()
    return text


@pytest.mark.skipif(devices.hpu_available(), reason="a Gaudi's group is left by all, and here one waits")
@pytest.mark.parametrize("owner", [0, 1])
def test_10_an_anomaly_is_reported_by_the_stage_that_owns_the_operation(ranks: Ranks, owner: int) -> None:
    texts = ranks(2, with_anomalies, PP2, PoisonedLast if owner else Poisoned)
    # The other stage's error quotes this one's, if it has been seen by then.
    named = [re.match(r"Function '\w+Backward0' returned nan values", text) is not None for text in texts]
    assert named == [owner == 0, owner == 1], texts


def barebones(layout: Layout) -> tuple[int, bool]:
    module = language_model()
    trainer = trainer_for(layout, barebones=True, logger=None, **BARE)
    trainer.fit(module, loader(layout))
    return trainer.global_step, all(bool(p.isfinite().all()) for p in module.parameters())


# What barebones=True itself sets.
BARE: dict[str, Any] = dict.fromkeys(
    ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "log_every_n_steps", "num_sanity_val_steps")
)


def test_10_barebones_trains(ranks: Ranks) -> None:
    for layout in LAYOUTS:
        assert on_all(ranks, layout, barebones) == (4, True)


# 16


class Estimates(GPTModule):
    estimate: float

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def estimated(layout: Layout, **options: Any) -> tuple[float, int]:
    module = language_model(Estimates)
    trainer, _ = fit(layout, module, **options)
    return module.estimate, trainer.global_step


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 2}, 8),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 4),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": 1, "limit_train_batches": 3}, 3),
    ],
)
def test_16_estimated_stepping_batches_are_the_steps_done(ranks: Ranks, options: Any, steps: int) -> None:
    for layout in (TP2PP2, *((STOCK, ONE, LAYOUTS[-1]) if "accumulate_grad_batches" in options else ())):
        assert on_all(ranks, layout, estimated, **options) == (steps, steps)


# 17


class Manual(GPTModule):
    """Two backwards a step, clipped and stepped by hand."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(0.25 * loss)
        self.manual_backward(0.75 * self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("train_loss", loss, sync_dist=True)


def manual(layout: Layout) -> list[float]:
    return series(layout, module=language_model(Manual))["train_loss"]


def test_17_manual_optimization_works_without_a_pipeline(ranks: Ranks) -> None:
    expected = on_all(ranks, STOCK, manual)
    assert len(set(expected)) == 4
    for layout in (layout for layout in LAYOUTS if layout.pp == 1):
        assert_close(on_all(ranks, layout, manual), expected)


def refused(layout: Layout) -> str:
    with pytest.raises(ConfigError) as error:
        fit(layout, language_model(Manual))
    return str(error.value)


def test_17_manual_optimization_is_refused_with_a_pipeline(ranks: Ranks) -> None:
    text = on_all(ranks, PP2, refused)
    assert "automatic_optimization=False: a pipeline runs forward and backward of all micro-batches itself" in text
