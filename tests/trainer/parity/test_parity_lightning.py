"""One rank of our strategy against Lightning's own single device: what a user's module may do, it may do unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.device import CPU, CUDA
from lightning_megatron.ops.registry import SELECTABLE
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer

SAMPLES, BATCH = 24, 4
# Learning rates are 0.01 and more: a ten-thousandth of a step is what sums in another order may make of a parameter.
ROUNDING = 1e-6


def single_device() -> SingleDeviceStrategy:
    return SingleDeviceStrategy(torch.device("cpu"))


def megatron(**options: Any) -> MegatronStrategy:
    # Strategies are compared here, not ops: on a Gaudi ours computes with the reference, as the stock run on the CPU.
    ops = {} if kind_in_tests() is CPU else {"ops": dict.fromkeys(SELECTABLE, "off")}
    return MegatronStrategy(**ops | options)


class Toy(LightningModule):
    """A user's module that knows nothing of us."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.body(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def rows(samples: int = SAMPLES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator)
    return [(row, row.sum().reshape(1).sin()) for row in x]


def loader(batch_size: int = BATCH, samples: int = SAMPLES, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(rows(samples), batch_size=batch_size, shuffle=shuffle)  # type: ignore[arg-type]


def fit(
    strategy: Any, module: LightningModule, batches: Any = None, **options: Any
) -> tuple[Recorder, dict[str, Tensor]]:
    """Train and return what was logged and the final parameters; the loader's own order, no sampler injected."""
    recorder = Recorder()
    quiet: dict[str, Any] = {"max_epochs": 2, "logger": recorder, "use_distributed_sampler": False}
    trainer = quiet_trainer(strategy, **quiet | options)
    trainer.fit(module, loader() if batches is None else batches)
    return recorder, {name: p.detach().cpu().clone() for name, p in module.named_parameters()}


def ready_made(batches: DataLoader[Any]) -> DataLoader[Any]:
    """The same batches from a loader that does not say their size: 4 samples in micro-batches of 3 are refused else."""
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


def assert_equal_runs(ours: Any, theirs: Any) -> None:
    assert ours[0].rows == theirs[0].rows
    assert len(theirs[0].rows) > 0
    assert ours[1].keys() == theirs[1].keys()
    assert all(torch.equal(ours[1][name], theirs[1][name]) for name in theirs[1])


def assert_close_runs(ours: Any, theirs: Any, rtol: float = 1e-5) -> None:
    assert len(ours[0].rows) == len(theirs[0].rows) > 0
    for mine, its in zip(ours[0].rows, theirs[0].rows, strict=True):
        assert mine == pytest.approx(its, rel=rtol, abs=1e-7)
    for name in theirs[1]:
        torch.testing.assert_close(ours[1][name], theirs[1][name], rtol=rtol, atol=ROUNDING)


# The same numbers as stock


def language_model() -> GPTModule:
    seed_everything(3, verbose=False)
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50, "vocab_multiple": 1}
    # With an eps as small as usual Adam makes whole steps of the rounding of a gradient that is nearly zero.
    return GPTModule("llama-tiny", lr=1e-2, eps=1e-3, num_query_groups=2, ffn_hidden_size=48, head_dim=8, **shape)


def texts(batch_size: int = 4) -> DataLoader[Any]:
    tokens = torch.randint(50, (24, 9), generator=torch.Generator().manual_seed(2))
    return DataLoader([{"tokens": t[:-1], "labels": t[1:]} for t in tokens], batch_size=batch_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_a_language_model_trains_bit_for_bit_as_on_a_single_device(distributed_optimizer: bool) -> None:
    ours, weights = fit(megatron(distributed_optimizer=distributed_optimizer), language_model(), texts())
    theirs, their_weights = fit(single_device(), language_model(), texts())
    assert len(theirs.series("train_loss")) == 12
    assert theirs.series("train_loss")[-1] < theirs.series("train_loss")[0]
    if kind_in_tests() is not CPU:  # the stock run has the CPU's own attention and AdamW, which round otherwise
        assert ours.series("train_loss") == pytest.approx(theirs.series("train_loss"), rel=1e-6)
        torch.testing.assert_close(weights, their_weights, rtol=1e-6, atol=ROUNDING)
        return
    assert ours.series("train_loss") == theirs.series("train_loss")
    assert all(torch.equal(weights[name], their_weights[name]) for name in their_weights)


def test_with_clipping_it_differs_by_the_rounding_of_the_norm() -> None:
    # torch adds norms of parameters, we norms of rows of a flat buffer: the last bit of the factor may differ.
    ours, weights = fit(megatron(), language_model(), texts(), gradient_clip_val=0.5)
    theirs, their_weights = fit(single_device(), language_model(), texts(), gradient_clip_val=0.5)
    assert min(ours.series("grad_norm")) > 0.5
    assert ours.series("train_loss") == pytest.approx(theirs.series("train_loss"), rel=1e-6)
    for name, value in their_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=ROUNDING)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_micro_batches_equal_the_whole_batch(micro_batch_size: int) -> None:
    batches = ready_made(texts())
    ours = fit(megatron(micro_batch_size=micro_batch_size), language_model(), batches, gradient_clip_val=0.5)
    whole = fit(megatron(), language_model(), batches, gradient_clip_val=0.5)
    assert_close_runs(ours, whole)


def test_accumulating_two_batches_equals_one_of_twice_the_size() -> None:
    ours, weights = fit(megatron(micro_batch_size=2), language_model(), texts(4), accumulate_grad_batches=2)
    whole, expected = fit(megatron(), language_model(), texts(8))
    # Lightning logs the loss of the batch that ends a window, so compare what each update did.
    assert len(whole.series("grad_norm")) == 6
    assert ours.series("grad_norm") == pytest.approx(whole.series("grad_norm"), rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=ROUNDING)


# Hooks and options of the user's


class ClipsItself(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.asked.append((gradient_clip_val, gradient_clip_algorithm))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")


class Schedules(Toy):
    interval = "step"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("lr", optimizer.param_groups[0]["lr"])


class SchedulesByEpoch(Schedules):
    interval = "epoch"


class ReturnsDict(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "first": batch[0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.equal(outputs["first"], batch[0])
        self.log("seen", outputs["loss"])


class SkipsBatches(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (0, 3) else super().training_step(batch, batch_idx)


class Manual(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(0.25 * loss)
        self.manual_backward(0.75 * self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")
        optimizer.step()
        self.log("train_loss", loss)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Toy, {}),
        (Toy, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
        (Toy, {"accumulate_grad_batches": 2}),
        (Toy, {"accumulate_grad_batches": 4}),  # six batches: the epoch ends in a window of two
        (ClipsItself, {}),
        (Schedules, {}),
        (Schedules, {"accumulate_grad_batches": 2}),
        (SchedulesByEpoch, {"max_epochs": 4}),
        (ReturnsDict, {}),
        (SkipsBatches, {}),
        (SkipsBatches, {"accumulate_grad_batches": 2}),
        (Manual, {}),
    ],
)
def test_a_users_module_runs_bit_for_bit_as_on_a_single_device(module: type[Toy], options: dict[str, Any]) -> None:
    mine, its = module(), module()
    # On CUDA the products round otherwise than the stock run's, on the CPU.
    same = assert_close_runs if kind_in_tests() is CUDA else assert_equal_runs
    same(fit(megatron(), mine, **options), fit(single_device(), its, **options))
    if isinstance(mine, ClipsItself) and isinstance(its, ClipsItself):
        assert mine.asked == its.asked != []


@pytest.mark.parametrize("module", [Toy, ClipsItself, Schedules, ReturnsDict, SkipsBatches])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_and_with_micro_batches_to_rounding(module: type[Toy], accumulate: int) -> None:
    ours = fit(megatron(micro_batch_size=1), module(), accumulate_grad_batches=accumulate)
    assert_close_runs(ours, fit(single_device(), module(), accumulate_grad_batches=accumulate))


# Logging


class Logs(Toy):
    """Logs in every way that Lightning knows."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_of_x = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        x, _ = batch
        self.mean_of_x(x.mean(1))
        self.log("mean", loss, on_step=True, on_epoch=True)
        self.log("sum", float(len(x)), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("max", x.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("min", x.min(), reduce_fx=torch.min)
        self.log_dict({"a": x.mean(), "b": x.square().mean()}, on_epoch=True)
        self.log("metric", self.mean_of_x, on_step=False, on_epoch=True)
        self.log("sized", loss, batch_size=len(x), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


@pytest.mark.parametrize(
    "strategy", [megatron, lambda: megatron(micro_batch_size=1), lambda: megatron(micro_batch_size=3)]
)
def test_logged_values_are_those_of_the_whole_batch(strategy: Callable[[], Any]) -> None:
    # 22 samples: the last batch of an epoch has two, and counts for two
    batches = ready_made(loader(4, 22))
    assert_close_runs(fit(strategy(), Logs(), batches), fit(single_device(), Logs(), batches))


# Everything after fit


class Evaluates(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("val_seen", float(len(batch[0])), reduce_fx="sum")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.body(batch[0])


def after_fit(strategy: Any) -> Iterator[Any]:
    trainer = quiet_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    module, uneven = Evaluates(), loader(4, 11)
    trainer.fit(module, loader(), uneven)
    yield dict(trainer.callback_metrics)
    yield trainer.validate(module, uneven, verbose=False)
    yield trainer.test(module, uneven, verbose=False)
    yield torch.cat(trainer.predict(module, uneven))
    # Fit again on the same Trainer: epochs go on, and the optimizer begins anew as in stock Lightning.
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(), uneven)
    yield dict(trainer.callback_metrics)
    yield trainer.global_step, trainer.current_epoch
    yield {name: p.detach().cpu().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_validate_test_predict_and_a_second_fit(micro_batch_size: int | None) -> None:
    ours, theirs = after_fit(megatron(micro_batch_size=micro_batch_size)), after_fit(single_device())
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def train_over_dp(size: int, micro_batch_size: int | None) -> tuple[Recorder, dict[str, Tensor]]:
    batches = loader(size, shuffle=True)
    return fit(megatron(micro_batch_size=micro_batch_size), Toy(), batches, use_distributed_sampler=True)


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_a_users_module_over_two_replicas_equals_one_with_the_whole_batch(
    ranks: Callable[..., list[Any]], micro_batch_size: int | None
) -> None:
    ((_, whole),) = ranks(1, train_over_dp, 4, None)
    for _, params in ranks(2, train_over_dp, 2, micro_batch_size):
        for name, value in whole.items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-6)
