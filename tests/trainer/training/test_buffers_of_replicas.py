"""Buffers and metrics of a user's modules on several ranks, against ``DistributedDataParallel`` bit by bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as stock_callbacks
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_megatron import LlamaModule, MegatronStrategy, VerifyCheckpoint
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer

pytestmark = pytest.mark.skipif(kind_in_tests() is not CPU, reason="Lightning's own strategies stay on the CPU")

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(3))
X[::2] += 3.0  # replicas see different samples, as of other speakers
ROWS = TensorDataset(X, (X.sum(1) > 6).long())
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32, "vocab_size": 64}
TOKENS = [{"tokens": torch.arange(n, n + 16), "labels": torch.arange(n + 1, n + 17)} for n in range(16)]


class Net(L.LightningModule):
    """Batch statistics, an own statistic that the loss depends on, and a random buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(torch.distributed.get_rank())  # a script that seeds nothing
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.register_buffer("projection", torch.randn(4, 4), persistent=False)
        self.register_buffer("largest", torch.zeros(()))
        self.trace: list[dict[str, Tensor]] = []

    def configure_model(self) -> None:
        self.register_buffer("columns", torch.randint(4, (4,)))
        self.register_buffer("mask", torch.rand(4) > 0.5)

    def step(self, batch: Any) -> Tensor:
        self.trace.append({name: buffer.clone() for name, buffer in self.named_buffers()})
        x = torch.where(self.mask, batch[0], batch[0][:, self.columns]) @ self.projection / (1 + self.largest)
        return nn.functional.cross_entropy(self.net(x), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.step(batch)
        self.largest = torch.maximum(self.largest, batch[0].abs().max())  # a new tensor each time
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.step(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.step(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(strategy: Any, batch_size: int = 4, **options: Any) -> dict[str, Any]:
    """Buffers before each step, validations, and weights and buffers at the end, of this rank."""
    recorder, module = Recorder(), Net()
    trainer = quiet_trainer(strategy, logger=[recorder], max_epochs=2, **options)
    trainer.fit(module, DataLoader(ROWS, batch_size), DataLoader(ROWS, batch_size))
    return {"trace": module.trace, "val": recorder.series("val"), "end": {**module.state_dict()}}


def against_ddp(options: dict[str, Any]) -> tuple[Any, Any]:
    return trained(MegatronStrategy(), **options), trained(DDPStrategy(), **options)


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    "options",
    [{"val_check_interval": 4}, {"accumulate_grad_batches": 3, "val_check_interval": 2}],
    ids=str,
)
def test_buffers_have_ddps_values_before_every_step_and_validation(ranks: Any, options: dict[str, Any]) -> None:
    for ours, theirs in ranks(2, against_ddp, options):
        assert_same(ours, theirs)


class Noisy(LlamaModule):
    """Noise that each rank draws for itself, in its constructor and with its layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(torch.distributed.get_rank())
        self.register_buffer("early", torch.randn(3), persistent=False)

    def configure_model(self) -> None:
        super().configure_model()
        draws = torch.Generator().manual_seed(torch.distributed.get_rank())
        self.register_buffer("late", torch.randn(3, generator=draws))

    def on_train_start(self) -> None:
        self.at_start = self.early.clone(), self.late.clone()


def noise(axes: dict[str, int]) -> Any:
    module = Noisy("llama-tiny", **SIZES, num_query_groups=2)
    quiet_trainer(MegatronStrategy(**axes), max_steps=1).fit(module, DataLoader(TOKENS, 2))  # type: ignore[arg-type]
    return module.at_start


@pytest.mark.parametrize(("size", "axes"), [(4, {"tp": 2}), (2, {"pp": 2})], ids=["tp2-dp2", "pp2"])
def test_random_buffers_of_a_parallel_model_are_those_of_rank_0(ranks: Any, size: int, axes: dict[str, int]) -> None:
    """Held against what the first rank drew."""
    drawn = torch.randn(3, generator=torch.Generator().manual_seed(0))
    for found in ranks(size, noise, axes):
        assert_same(found, (drawn, drawn))


class Exchanges(L.Callback):
    """Validates with other buffers, as averaging of weights and buffers does, and takes them back."""

    def __init__(self) -> None:
        self.other = torch.ones(()) + torch.distributed.get_rank()

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        before = module.largest.clone()
        module.largest.copy_(self.other)
        self.other = before

    on_validation_epoch_end = on_validation_epoch_start


def exchanged() -> tuple[Any, Any]:
    ours, theirs = Exchanges(), Exchanges()
    found = trained(MegatronStrategy(), callbacks=[ours]), trained(DDPStrategy(), callbacks=[theirs])
    return (found[0], ours.other), (found[1], theirs.other)


def test_buffers_that_a_callback_exchanges_for_a_validation_are_those_that_ddp_sends(ranks: Any) -> None:
    for ours, theirs in ranks(2, exchanged):
        assert_same(ours, theirs)


class ExchangesInTests(Exchanges):
    """Does so in a test."""

    def on_test_epoch_start(self, trainer: Any, module: Any) -> None:
        super().on_validation_epoch_start(trainer, module)

    on_test_epoch_end = on_test_epoch_start


def averaged(evaluates: str) -> list[Any]:
    """Buffers seen, evaluations and weights with averages of weights and buffers, under ours and under DDP."""

    def run(strategy: Any) -> Any:
        recorder, module = Recorder(), Net()
        averages = stock_callbacks.EMAWeightAveraging(decay=0.5, use_buffers=True) if evaluates == "averages" else None
        callbacks = [averages or ExchangesInTests()]
        options = {"max_epochs": 2, "val_check_interval": 2, "accumulate_grad_batches": 2, "callbacks": callbacks}
        trainer = quiet_trainer(strategy, logger=[recorder], **options)
        trainer.fit(module, DataLoader(ROWS, 4), [DataLoader(ROWS, 4), DataLoader(ROWS, 8)])
        trainer.test(module, DataLoader(ROWS, 4), verbose=False)
        logged = [row for row in recorder.rows if any(name.startswith(("val", "test")) for name in row)]
        return module.trace, logged, {**module.state_dict()}

    return [run(MegatronStrategy()), run(DDPStrategy())]


HAS_AVERAGES = hasattr(stock_callbacks, "EMAWeightAveraging")  # Lightning has it from 2.6 on


@pytest.mark.parametrize("evaluates", ["exchanged", *["averages"] * HAS_AVERAGES])
def test_averages_of_buffers_are_evaluated_as_under_ddp(ranks: Any, evaluates: str) -> None:
    """Two loaders of a validation in mid-accumulation, and a test."""
    for ours, theirs in ranks(2, averaged, evaluates):
        assert_same(ours, theirs)


def micro_batches() -> tuple[Any, Any]:
    ours = trained(MegatronStrategy(micro_batch_size=2), limit_val_batches=0)
    return ours, trained(DDPStrategy(), 2, accumulate_grad_batches=2, limit_val_batches=0)


def test_micro_batches_see_the_buffers_of_accumulated_batches(ranks: Any) -> None:
    for ours, theirs in ranks(2, micro_batches):
        assert_same(ours, theirs)


class Measured(L.LightningModule):
    """A classifier with metrics, which hash their states."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.where = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), where
        self.accuracy, self.mean = MulticlassAccuracy(num_classes=2), MeanMetric()
        self.mean.register_buffer("of_this_rank", torch.zeros(()))

    def step(self, batch: Any, where: str) -> Tensor:
        out = self.net(batch[0])
        loss = nn.functional.cross_entropy(out, batch[1])
        if where == self.where:
            self.accuracy(out, batch[1])
            self.mean(loss.detach())
            self.log_dict({"accuracy": self.accuracy, "mean": self.mean}, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "val")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def measured(where: str) -> list[Any]:
    def run(strategy: Any) -> Any:
        recorder, module = Recorder(), Measured(where)
        trainer = quiet_trainer(strategy, logger=[recorder], max_epochs=2)
        trainer.fit(module, DataLoader(ROWS, 4), DataLoader(ROWS, 4))
        return module.state_dict(), recorder.series("accuracy"), recorder.series("mean")

    return [run(MegatronStrategy()), run(DDPStrategy())]


@pytest.mark.parametrize("where", ["train", "val"])
def test_metrics_of_a_module_train_with_overlapped_gathers(ranks: Any, where: str) -> None:
    for ours, theirs in ranks(2, measured, where):
        assert_same(ours, theirs)


class Counts(L.Callback):
    """Metrics that no module holds, in a list, updated on every rank."""

    def __init__(self) -> None:
        self.counts = [SumMetric()]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.counts[0].update(batch["tokens"].sum())

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("of_callback", self.counts[0].compute())


class Plain(LlamaModule):
    """Metrics in a dictionary, updated behind the model's call, so on the last stage of a pipeline alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plain = {"sum": SumMetric(), "mean": MeanMetric()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for metric in self.plain.values():
            metric.update(batch["labels"].float())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict({name: metric.compute() for name, metric in self.plain.items()})
        for metric in self.plain.values():
            metric.reset()


def counted_outside(axes: dict[str, int], before: dict[str, int] | None = None) -> tuple[Any, list[str]]:
    """Logs of an epoch, and warnings of torchmetrics; if wanted, behind a run of the module in another layout."""
    module = Plain("llama-tiny", **SIZES, num_query_groups=2)
    return [count(module, each) for each in (before, axes) if each is not None][-1]


def count(module: Plain, axes: dict[str, int]) -> tuple[Any, list[str]]:
    replicas = 1 if axes else 2
    first = torch.distributed.get_rank() if replicas > 1 else 0
    loader = DataLoader(TOKENS[first::replicas], 4 // replicas)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        strategy = MegatronStrategy(**axes, micro_batch_size=2)
        options = {"max_epochs": 1, "callbacks": [Counts()], "use_distributed_sampler": False}
        trainer = quiet_trainer(strategy, **options)
        trainer.fit(module, loader)
    found = {name: float(trainer.callback_metrics[name]) for name in ("sum", "mean", "of_callback")}
    return found, [str(each.message) for each in told if "``compute``" in str(each.message)]


@pytest.mark.parametrize(
    ("axes", "before"), [({}, None), ({"tp": 2}, None), ({"pp": 2}, None), ({}, {"tp": 2}), ({"tp": 2}, {})], ids=str
)
def test_metrics_that_no_module_holds_count_every_sample_once(
    ranks: Any, axes: dict[str, int], before: dict[str, int] | None
) -> None:
    """Held against what the loader gives."""
    labels, tokens = (torch.stack([row[key] for row in TOKENS]).double() for key in ("labels", "tokens"))
    right = {"sum": float(labels.sum()), "mean": float(labels.mean()), "of_callback": float(tokens.sum())}
    for found in ranks(2, counted_outside, axes, before):
        assert found == (pytest.approx(right), [])


# Checkpoints


class Counting(LlamaModule):
    """Counts where only some ranks come: behind the model's call, or on the first rank alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.kept = 0
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(int(self.steps))
        loss = super().training_step(batch, batch_idx)
        if self.strategy.mesh.pp.size > 1 or self.global_rank == 0:
            self.steps += 1
            self.kept += 1
        return loss

    @property
    def strategy(self) -> Any:
        return self.trainer.strategy

    def get_extra_state(self) -> int:
        return self.kept

    def set_extra_state(self, state: int) -> None:
        self.kept = state


def counted(axes: dict[str, int], path: Path, fmt: dict[str, Any]) -> list[int]:
    module = Counting("llama-tiny", **SIZES, num_query_groups=2)
    callbacks = [VerifyCheckpoint()]  # which compares replicas
    trainer = quiet_trainer(MegatronStrategy(**axes, **fmt), max_steps=3, callbacks=callbacks, limit_val_batches=0)
    trainer.fit(module, DataLoader(TOKENS, 2))  # type: ignore[arg-type]
    trainer.save_checkpoint(path)
    return module.seen


def of_checkpoint(path: Path) -> tuple[int, int]:
    module = Counting("llama-tiny", **SIZES, num_query_groups=2)
    quiet_trainer(MegatronStrategy(), max_steps=3).fit(module, DataLoader(TOKENS, 2), ckpt_path=path)  # type: ignore[arg-type]
    return int(module.steps), module.kept


@pytest.mark.parametrize("form", ["directory", "file"])
@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_checkpoint_has_the_values_of_the_rank_that_runs_the_code(
    ranks: Any, tmp_path: Path, axes: dict[str, int], form: str
) -> None:
    path, fmt = tmp_path / "a.ckpt", {"save_distributed_checkpoint": False} if form == "file" else {}
    assert ranks(2, counted, axes, path, fmt) == [[0, 1, 2]] * 2
    assert ranks(1, of_checkpoint, path) == [(3, 3)]


def fit_and_load(path: Path) -> tuple[list[float], Any]:
    recorder, module = Recorder(), Net()
    trainer = quiet_trainer(MegatronStrategy(), logger=[recorder], max_epochs=2)
    trainer.fit(module, DataLoader(ROWS, 4), DataLoader(ROWS, 24))
    trainer.save_checkpoint(path)
    return recorder.series("val")[-1:], module.projection


def validated(path: Path, projection: Tensor) -> float:
    module = Net()
    module.projection.copy_(projection)
    found = quiet_trainer(MegatronStrategy()).validate(module, DataLoader(ROWS, 48), ckpt_path=path, verbose=False)
    return found[0]["val"]


def test_one_process_validates_a_checkpoint_as_the_fit_on_two_replicas(ranks: Any, tmp_path: Path) -> None:
    (val, projection), _ = ranks(2, fit_and_load, tmp_path / "a.ckpt")
    assert ranks(1, validated, tmp_path / "a.ckpt", projection) == pytest.approx(val, rel=1e-6)
