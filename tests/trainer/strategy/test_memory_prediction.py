"""The strategy tells what memory it predicts, refuses what cannot fit, and explains an error for want of memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, LlamaModule, MegatronStrategy
from lightning_megatron import device as devices
from lightning_megatron.config.layout import BatchShape
from lightning_megatron.lightning.validation.memory import UNKNOWN, MemoryLimit
from lightning_megatron.machine.byte_size import told_bytes
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.tools.forecast import Forecast, device_called
from lightning_megatron.tools.planning.core.device_file import load_device
from lightning_megatron.tools.planning.plan import plan_of
from lightning_megatron.tools.planning.settings import Feed, job_of

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 512}
LENGTH, BATCH = 64, 4


class Data(LightningDataModule):
    """Random tokens whose shape is known before they are read."""

    batch_shape = BatchShape(BATCH, seq_length=LENGTH)

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.arange(LENGTH + 1)
        row = {"tokens": tokens[:-1], "labels": tokens[1:]}
        return DataLoader([row] * 16, batch_size=BATCH)  # type: ignore[arg-type]


class OfItsOwn(LlamaModule):
    """A subclass that builds its model itself."""

    def configure_model(self) -> None:
        super().configure_model()


class Failing(LlamaModule):
    """A module whose second step raises an error."""

    error: BaseException = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx:
            raise self.error
        return super().training_step(batch, batch_idx)


class Freezing(BaseFinetuning):
    """A callback after which not all parameters are trained."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        pass

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        pass


def peak(**arguments: Any) -> int:
    """Predicted bytes of the job below."""
    feed = Feed(1, LENGTH, BATCH, precision="32-true")
    return plan_of(
        job_of(LlamaModule("llama-tiny", **SIZES).config, feed, arguments), None, load_device("cpu")
    ).memory.peak


def fit(module: LightningModule, *callbacks: Any, **arguments: Any) -> Any:
    trainer = quiet_trainer(MegatronStrategy(**arguments), max_steps=2, callbacks=[*callbacks])
    trainer.fit(module, datamodule=Data())
    return trainer


def test_a_layout_that_cannot_fit_is_refused_with_one_that_does() -> None:
    needed = peak()
    limit = int(0.97 * needed)  # a user's own limit has no tolerance
    with pytest.raises(ConfigError) as raised:
        fit(LlamaModule("llama-tiny", **SIZES), max_memory=limit)
    (problem,) = raised.value.problems
    assert problem.argument == "max_memory"
    assert f"needs {told_bytes(needed)} a rank" in problem.reason
    assert problem.nearest
    changes = dict(re.findall(r"(\w+)=('\w+'|\d+)", str(problem.nearest[0])))
    changes.pop("batch_size", None)
    arguments = {name: value.strip("'") if "'" in value else int(value) for name, value in changes.items()}
    assert arguments
    assert peak(**arguments) <= limit < needed
    fit(LlamaModule("llama-tiny", **SIZES), max_memory=limit, **arguments)


@pytest.mark.parametrize("given", ["1GiB", 2**30])
def test_a_layout_that_fits_runs(given: Any) -> None:
    assert fit(LlamaModule("llama-tiny", **SIZES), max_memory=given).global_step == 2


@pytest.mark.parametrize("given", ["80 Gb/s", "much", 0, -1, True, 1.5])
def test_what_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="max_memory"):
        MegatronStrategy(max_memory=given)


@pytest.mark.parametrize("module", [OfItsOwn("llama-tiny", **SIZES), BoringModel()])
def test_nothing_is_predicted_for_a_model_that_is_not_known(
    module: LightningModule, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet_trainer(MegatronStrategy(max_memory=1), max_steps=1)
    with caplog.at_level(logging.INFO):
        if isinstance(module, BoringModel):
            trainer.fit(module)
        else:
            trainer.fit(module, datamodule=Data())
    assert "predicted memory" not in caplog.text


def test_nothing_is_refused_where_parameters_may_be_frozen() -> None:
    assert fit(LlamaModule("llama-tiny", **SIZES), Freezing(), max_memory=1).global_step == 2


def test_nothing_is_refused_outside_of_training() -> None:
    trainer = quiet_trainer(MegatronStrategy(max_memory=1), max_steps=1)
    data = Data()
    data.predict_dataloader = data.train_dataloader  # type: ignore[method-assign]
    assert len(trainer.predict(LlamaModule("llama-tiny", **SIZES), datamodule=data) or []) == 4


def test_the_prediction_is_logged_in_one_line_and_by_cause_on_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        fit(LlamaModule("llama-tiny", **SIZES))
    lines = [record.getMessage() for record in caplog.records if "predicted memory of a rank" in record.getMessage()]
    assert len(lines) == 1
    assert told_bytes(peak()) in lines[0]
    causes = [record for record in caplog.records if record.getMessage().startswith("predicted memory: ")]
    assert len(causes) > 3
    assert {record.levelno for record in causes} == {logging.DEBUG}


def test_what_a_device_has_measured_is_logged_once_beside_the_prediction(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaModule("llama-tiny", **SIZES).config
    job = job_of(config, Feed(1, LENGTH, BATCH), {})
    predicted = plan_of(job, None).memory.peak
    monkeypatch.setattr(devices, "peak_memory_bytes", lambda device: int(1.25 * predicted))
    monkeypatch.setattr(devices, "memory_beside_tensors", lambda device: None)
    prediction = Forecast(job, MemoryLimit(2**40))
    with caplog.at_level(logging.INFO):
        Forecast(None, UNKNOWN).measure("Mine", 9, torch.device("cuda"), 0)
        for step in (0, 1, 2, 3):
            prediction.measure("Mine", step, torch.device("cpu"), 0)
        assert "peak memory" not in caplog.text
        for step in (0, 1, 2, 3):
            prediction.measure("Mine", step, torch.device("cuda"), 0)
    told = [record.getMessage() for record in caplog.records if "peak memory" in record.getMessage()]
    measured = f"after 2 steps {told_bytes(1.25 * predicted)}, predicted {told_bytes(predicted)} (+25.0%)"
    assert told == [f"Mine: peak memory of rank 0 {measured}"]


@pytest.mark.parametrize(
    ("name", "device"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("GAUDI2", "gaudi2"), ("NVIDIA B200", "b200"), ("CPU", "cpu"), ("", None)],
)
def test_the_device_is_known_by_its_name(name: str, device: str | None) -> None:
    found = device_called(name)
    assert (None if found is None else found.name) == device


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::939524096 (896)MB"),
    ],
)
def test_too_little_memory_is_explained(error: RuntimeError, caplog: pytest.LogCaptureFixture) -> None:
    module = Failing("llama-tiny", **SIZES)
    module.error = error
    with pytest.raises(RuntimeError) as raised:
        fit(module)
    told = "\n".join(getattr(raised.value, "__notes__", [])) or caplog.text
    assert f"predicted memory of a rank {told_bytes(peak())}" in told
    assert "optimizer state" in told
    ways = told.split("the cheapest ways out:\n")[1].splitlines()
    assert 1 <= len(ways) <= 3
    assert all(re.match(r"  - .*\(\d+\.\d+ [GM]iB\)", way) for way in ways)


def test_another_error_stays_as_it_is() -> None:
    module = Failing("llama-tiny", **SIZES)
    module.error = RuntimeError("the loss is too large")
    with pytest.raises(RuntimeError) as raised:
        fit(module)
    assert not getattr(raised.value, "__notes__", [])


def refused() -> str:
    with pytest.raises(ConfigError) as raised:
        fit(LlamaModule("llama-tiny", **SIZES), tp=2, max_memory=1000)
    return str(raised.value)


def test_all_ranks_refuse(ranks: Callable[..., list[Any]]) -> None:
    first, second = ranks(2, refused)
    assert first == second
    assert "tp=2" in first
