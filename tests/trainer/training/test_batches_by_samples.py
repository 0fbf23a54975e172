"""Batches cut into micro-batches, against stock Lightning, which runs the whole batch at once."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from lightning_megatron import MegatronStrategy
from lightning_megatron.device import CPU
from lightning_megatron.lightning.step.micro_batches import join_outputs, split_batch
from lightning_megatron.lightning.validation.last_stage import warn_of_last_stage
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer

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
        loss = (self.weight * batch).mean()
        self.log("weighted", batch.sum(), on_step=False, on_epoch=True, batch_size=int(batch.sum()))
        return {"loss": loss, "num_tokens": 100}

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


class Collects(LightningModule):
    """Logs and collects in a method that a step calls."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", 1.0)
        self.keep(batch)

    def keep(self, batch: Any) -> None:
        self.kept.append(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.logger.log_metrics({"x": 1.0})  # type: ignore[union-attr]


def test_a_pipeline_warns_of_what_a_step_keeps_on_its_last_stage() -> None:
    with pytest.warns(UserWarning, match=r"pp=2: Collects\.training_step \(append\), validation_step \(logger\)"):
        warn_of_last_stage(Collects(), 2)


def test_and_is_silent_about_self_log_alone_and_without_a_pipeline(recwarn: pytest.WarningsRecorder) -> None:
    warn_of_last_stage(Counted(), 2)
    warn_of_last_stage(Collects(), 1)
    assert not recwarn.list


def test_a_batch_that_is_one_micro_batch_need_not_be_cut() -> None:
    """Two samples whose parts are by chance of length 2 could be two fields as well; with one more, they are three."""
    batch = {"x": torch.zeros(2, 3), "parts": [torch.zeros(2), torch.zeros(2)]}
    assert split_batch(batch, 2, batch_size=4) == [(batch, 1.0)]
    with pytest.raises(MisconfigurationException, match=r"parts.* has length 2"):
        split_batch(batch, 1)
