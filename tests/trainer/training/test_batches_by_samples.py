"""Batches cut into micro-batches, against stock Lightning, which runs the whole batch at once."""

from __future__ import annotations

import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.device import CPU
from lightning_megatron.lightning.step.micro_batches import join_outputs, split_batch
from lightning_megatron.lightning.validation.last_stage import warn_of_last_stage
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer
from tests.tiny import tiny_llama

pytestmark = pytest.mark.skipif(kind_in_tests() is not CPU, reason="Lightning's own strategies stay on the CPU")

Pair = namedtuple("Pair", ["x", "names"])


@dataclass
class Samples:
    x: Tensor
    names: list[str]
    scale: float = 2.0


class WithTo:
    def __init__(self, x: Tensor, names: list[str]) -> None:
        self.x, self.names = x, names

    def to(self, *args: Any, **kwargs: Any) -> WithTo:
        return self


def x_of(numbers: list[int]) -> Tensor:
    return torch.tensor([[float(n), 1.0] for n in numbers])


def names_of(numbers: list[int]) -> list[str]:
    return [str(n) for n in numbers]


BATCHES: dict[str, tuple[Any, Any]] = {  # how a loader collates, and how a step reads rows and names
    "texts": (lambda n: {"x": x_of(n), "names": names_of(n)}, lambda b: (b["x"], b["names"])),
    "tuple": (lambda n: (x_of(n), tuple(names_of(n))), lambda b: (b[0], b[1])),
    "array": (lambda n: [x_of(n), np.array(names_of(n))], lambda b: (b[0], b[1])),
    "dicts": (lambda n: {"x": x_of(n), "m": [{"n": i} for i in n]}, lambda b: (b["x"], [m["n"] for m in b["m"]])),
    "ragged": (
        lambda n: (x_of(n), [torch.full((i + 1,), i) for i in n]),
        lambda b: (b[0], [int(t[0]) for t in b[1]]),
    ),
    "dataclass": (lambda n: Samples(x_of(n), names_of(n)), lambda b: (b.x, b.names)),
    "namedtuple": (lambda n: Pair(x_of(n), names_of(n)), lambda b: (b.x, b.names)),
    "object": (lambda n: WithTo(x_of(n), names_of(n)), lambda b: (b.x, b.names)),
    "encoding": (lambda n: BatchEncoding({"x": x_of(n), "names": names_of(n)}), lambda b: (b["x"], b["names"])),
}


@dataclass
class Predicted:
    rows: Tensor
    names: list[str]
    mean: float


class Module(LightningModule):
    def __init__(self, read: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.read, self.seen = nn.Linear(2, 1), read, []

    def step(self, batch: Any) -> Tensor:
        x, names = self.read(batch)
        assert [int(n) for n in names] == x[:, 0].int().tolist()
        return self.layer(x) * torch.tensor([[1.0 + int(n)] for n in names])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.step(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.step(batch).detach()
        return {"mean": rows.mean(), "rows": rows, "count": len(rows), "names": list(self.read(batch)[1])}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(outputs)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.step(batch).detach()
        names = [str(n) for n in self.read(batch)[1]]
        record = Predicted(rows, names, float(rows.mean()))
        return record, Pair(rows.numpy(), names), names, np.float32(rows.mean()), {"correct": int((rows > 0).sum())}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def ran(strategy: Any, kind: str) -> tuple[Any, ...]:
    collate, read = BATCHES[kind]
    module, logged = Module(read), Recorder()
    trainer = quiet_trainer(strategy, max_epochs=1, logger=logged)
    loader = DataLoader(list(range(7)), batch_size=4, collate_fn=collate)  # type: ignore[arg-type,var-annotated]
    trainer.fit(module, loader, loader)
    weights = [p.detach().clone() for p in module.parameters()]
    return weights, logged.series("loss"), module.seen, trainer.predict(module, loader)


def assert_alike(ours: Any, stock: Any) -> None:
    """Values and types."""
    assert type(ours) is type(stock)
    if isinstance(stock, Tensor | np.ndarray | float | np.floating):
        np.testing.assert_allclose(ours, stock, rtol=1e-5)
        assert getattr(ours, "dtype", None) == getattr(stock, "dtype", None)
    elif isinstance(stock, dict):
        assert_alike(list(ours.items()), list(stock.items()))
    elif isinstance(stock, list | tuple):
        assert len(ours) == len(stock)
        for one, other in zip(ours, stock, strict=True):
            assert_alike(one, other)
    elif isinstance(stock, Predicted):
        assert_alike(vars(ours), vars(stock))
    else:
        assert ours == stock


@pytest.mark.parametrize("kind", BATCHES)
def test_weights_outputs_and_predictions_are_stock_lightnings(kind: str) -> None:
    assert_alike(ran(MegatronStrategy(micro_batch_size=2), kind), ran("auto", kind))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(4, 1), "names": ["a", "b", "c"]}, r"4 samples.* batch\['names'\] has length 3.*one item"),
        ((torch.zeros(4), np.zeros((5, 2))), r"batch\[1\] has length 5"),
        (Samples(torch.zeros(4), ["a"]), r"batch\.names has length 1"),
        ({"x": torch.zeros(8, 1)}, r"a batch of 4 samples, in which batch has length 8"),
        ({"x": torch.zeros(4), "y": [torch.zeros(4, 2)] * 4}, r"batch\['y'\] has length 4"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(batch: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        split_batch(batch, 2, 4)


def test_what_all_samples_share_goes_to_each_micro_batch() -> None:
    pieces = split_batch({"x": torch.arange(3), "scale": 0.5, "task": "sum", "t": torch.tensor(1), "none": None}, 2)
    assert [piece["x"].tolist() for piece, _ in pieces] == [[0, 1], [2]]
    assert all(piece["task"] == "sum" and piece["scale"] == 0.5 and piece["t"] == 1 for piece, _ in pieces)


def test_two_samples_of_two_fields_are_cut_by_the_fields() -> None:
    (first, _), (second, _) = split_batch([torch.zeros(2, 3), torch.ones(2)], 1, 2)
    assert [len(part) for part in (*first, *second)] == [1, 1, 1, 1]


def test_texts_alone_and_nested_tensors_are_cut() -> None:
    assert [piece for piece, _ in split_batch(["a", "b", "c"], 2, 4)] == [["a", "b"], ["c"]]
    nested = torch.nested.nested_tensor([torch.ones(i + 1) for i in range(3)], layout=torch.jagged)
    assert [[len(row) for row in piece.unbind()] for piece, _ in split_batch(nested, 2, 3)] == [[1, 2], [3]]


def test_numbers_are_means_over_samples_or_sums_of_counts() -> None:
    joined = join_outputs([(1.0, 3, torch.tensor(2.0), "a"), (4.0, 1, torch.tensor(5.0), "a")], [2 / 3, 1 / 3])
    assert joined == (pytest.approx(2.0), 4, pytest.approx(3.0), "a")


class Counted(LightningModule):
    """Returns a mean, and a number for a callback; plain LightningModules keep their loss unless they ask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log_sized("weighted", batch)
        return {"loss": (self.weight * batch).mean(), "num_tokens": 100}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log_sized("validated", batch)

    def log_sized(self, name: str, batch: Tensor) -> None:
        size = int(batch.sum())
        self.log(name, batch.sum(), on_step=False, on_epoch=True, sync_dist=True, batch_size=size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Asks(Counted):
    sums_over_tokens = True


@pytest.mark.parametrize("size", [None, 1])
def test_a_number_of_tokens_divides_a_loss_only_if_the_module_asks(size: int | None) -> None:
    rows = torch.tensor([1.0, 3.0])
    for kind, right in ((Counted, 2.0), (Asks, 2.0 / 100 if size is None else 4.0 / 200)):
        module, trainer = kind(), quiet_trainer(MegatronStrategy(micro_batch_size=size), max_epochs=1)
        trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
        assert -float(module.weight.detach()) == pytest.approx(right)
        # 1 with weight 1, 3 with weight 3; whole: one value
        assert float(trainer.callback_metrics["weighted"]) == pytest.approx(4.0 if size is None else 10 / 4)


class ByHand(Counted):
    """The same loss in manual optimization, where a batch is not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        out, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        self.manual_backward(out["loss"])
        optimizer.step()  # type: ignore[union-attr]
        return out


def counted(kind: type[Counted]) -> list[list[float]]:
    """Weight and epoch's means under ours, in micro-batches of one row, and under stock's, in batches of one row."""
    replicas = dist.get_world_size() if dist.is_initialized() else 1
    rows = torch.arange(1.0, 9)[dist.get_rank() if replicas > 1 else 0 :: replicas]
    cut, accumulated = (2, {}) if kind is ByHand else (1, {"accumulate_grad_batches": 4})
    found = []
    for strategy, batch_size, options in (
        (MegatronStrategy(micro_batch_size=1), 2, {"accumulate_grad_batches": 2} if accumulated else {}),
        ("ddp" if replicas > 1 else "auto", cut, accumulated),
    ):
        module, trainer = kind(), quiet_trainer(strategy, max_epochs=1, use_distributed_sampler=False, **options)
        trainer.fit(module, DataLoader(rows, batch_size), DataLoader(rows, 1 if isinstance(strategy, str) else 2))  # type: ignore[arg-type]
        means = trainer.callback_metrics
        found.append([float(module.weight.detach()), float(means["weighted"]), float(means["validated"])])
    return found


@pytest.mark.parametrize("kind", [Counted, ByHand])
@pytest.mark.parametrize("size", [1, 2])
def test_weights_and_means_by_given_sizes_are_those_of_stock(ranks: Any, size: int, kind: type[Counted]) -> None:
    """Accumulated batches and replicas; the loss of a plain module stays a mean, whatever number it returns beside."""
    for ours, stock in ranks(size, counted, kind):
        assert ours == pytest.approx(stock)


class Collects(LightningModule):
    """Logs and collects in a method that a step calls."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", 1.0)
        self.keep(batch)

    def keep(self, batch: Any) -> None:
        self.kept.append(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.logger.log_metrics({"x": 1.0})  # type: ignore[union-attr]

    def test_step(self, batch: Any, batch_idx: int) -> None:
        [self.kept.extend(each) for each in batch]

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        def keep(each: Any) -> None:
            (lambda: self.print(each))()

        keep(batch)


def test_a_pipeline_warns_of_what_a_step_keeps_on_its_last_stage() -> None:
    found = r"training_step \(append\), validation_step \(logger\), test_step \(extend\), predict_step \(print\)"
    with pytest.warns(UserWarning, match=rf"pp=2: Collects\.{found}:"):
        warn_of_last_stage(Collects(), 2)


def test_and_is_silent_about_self_log_alone_and_without_a_pipeline(recwarn: pytest.WarningsRecorder) -> None:
    warn_of_last_stage(Counted(), 2)
    warn_of_last_stage(Collects(), 1)
    assert not recwarn.list


ROWS = torch.arange(8 * 9).view(8, 9) % 40


class Tokens(LlamaModule):
    """Logs a value by the number of its tokens, which differs between micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log_sized("weighted", batch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log_sized("validated", batch)

    def log_sized(self, name: str, batch: Any) -> None:
        size = int(batch["tokens"].sum())
        self.log(name, float(size), on_step=False, on_epoch=True, batch_size=size)


class Keeps(Tokens):
    """Gives metrics to the logger and collects outputs, behind the model's call."""

    kept: list[Any]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"direct": 1.0})  # type: ignore[union-attr]
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept = [*getattr(self, "kept", ())]
        self.kept.append(batch)
        self.print("kept")
        return super().predict_step(batch, batch_idx)


class AtStart(Callback):
    """Number of warnings when training starts."""

    def __init__(self, told: list[Any]) -> None:
        self.told, self.count = told, 0

    def on_train_start(self, *_: Any) -> None:
        self.count = len(of_stages(self.told))


def of_stages(told: list[Any]) -> list[str]:
    return [str(each.message) for each in told if "last pipeline stage alone" in str(each.message)]


def warned(kind: type[Tokens], pp: int) -> tuple[list[str], int, list[float], list[str]]:
    """Warnings of a fit, their number at its start, what is logged, and the names that reach the logger."""
    seed_everything(1, verbose=False)
    batches = DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in ROWS], batch_size=4)  # type: ignore[arg-type]
    logged = Recorder()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        start = AtStart(told)
        strategy = MegatronStrategy(pp=pp, micro_batch_size=1)
        trainer = quiet_trainer(strategy, max_epochs=1, logger=logged, callbacks=[start])
        trainer.fit(kind(tiny_llama(), lr=1e-2), batches, batches)
        means = [float(trainer.callback_metrics[name]) for name in ("train_loss", "val_loss", "weighted", "validated")]
        return of_stages(told), start.count, means, sorted({name for row in logged.rows for name in row})


def test_a_run_on_two_stages_warns_once_and_logs_what_one_process_does(ranks: Any) -> None:
    """``self.log`` arrives with the weights that it was given, whether a step keeps other things or not."""
    ((_, _, right, names),) = ranks(1, warned, Tokens, 1)
    for kind in (Tokens, Keeps):
        first, second = ranks(2, warned, kind, 2)
        assert first[2] == second[2] == pytest.approx(right, rel=1e-5)
        assert first[3] == names
        assert (second[0], second[1]) == ([], 0)  # rank 0 says it
        if kind is Keeps:
            assert "Keeps.training_step (logger), predict_step (append, print)" in first[0][0]
        assert (len(first[0]), first[1]) == ((1, 1) if kind is Keeps else (0, 0))


def test_a_batch_that_is_one_micro_batch_need_not_be_cut() -> None:
    """Two samples whose parts are by chance of length 2 could be two fields as well; with one more, they are three."""
    batch = {"x": torch.zeros(2, 3), "parts": [torch.zeros(2), torch.zeros(2)]}
    assert split_batch(batch, 2, batch_size=4) == [(batch, 1.0)]
    with pytest.raises(MisconfigurationException, match=r"parts.* has length 2"):
        split_batch(batch, 1)


class OfParts(LightningModule):
    """Learns from parts of random lengths, a list for each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.predict_step(batch, batch_idx).square().mean()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        sums = torch.stack([part.sum() for part in batch["parts"]])
        return self.layer(batch["x"]) + sums[:, None]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def of_parts() -> list[Any]:
    """Weights and predictions; on rank 0 parts of each first batch and of the last, short ones have its length."""
    lengths = [2, 2, 4, 2, 1] if dist.get_rank() == 0 else [3, 1, 4, 2, 6]
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    samples = [(row, torch.ones(length)) for row, length in zip(rows, lengths, strict=True)]
    found = []
    for strategy in (MegatronStrategy(micro_batch_size=2), "ddp"):
        module = OfParts()
        trainer = quiet_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
        loaders = [DataLoader(samples, n, collate_fn=collated) for n in (2, 4)]  # type: ignore[arg-type]
        trainer.fit(module, loaders[0])
        found.append((dict(module.named_parameters()), trainer.predict(module, loaders[1])))
    return [({name: p.detach().clone() for name, p in weights.items()}, rows) for weights, rows in found]


def collated(samples: Any) -> dict[str, Any]:
    rows, parts = zip(*samples, strict=True)
    return {"x": torch.stack(rows), "parts": list(parts)}


def test_no_replica_waits_for_one_whose_parts_have_the_length_of_the_batch(ranks: Any) -> None:
    """Held against DDP, in a fit and in predictions whose last batch is short."""
    for ours, theirs in ranks(2, of_parts):
        torch.testing.assert_close(ours, theirs)
