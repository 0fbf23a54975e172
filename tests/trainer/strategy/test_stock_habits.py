"""What users of stock Lightning do to a Trainer: copy it, hear of its errors, search its messages."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.errors import CheckpointError, ConfigError, MissingCheckpointError
from lightning_megatron.testing.trainer import quiet_trainer
from tests.tiny import tiny_llama


def rows() -> DataLoader[Any]:
    tokens = torch.arange(64).view(8, 8) % 32
    return DataLoader([{"tokens": row, "labels": row} for row in tokens], batch_size=2)  # type: ignore[arg-type]


class Fails(BoringModel):
    def on_fit_start(self) -> None:
        raise RuntimeError("in a hook")


def test_an_exception_reaches_lightnings_own_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(Strategy, "on_exception", lambda strategy, exception: seen.append(exception))
    with pytest.raises(RuntimeError, match="in a hook") as caught:
        quiet_trainer(MegatronStrategy(), max_steps=1, default_root_dir=tmp_path).fit(Fails())
    assert seen == [caught.value]


@pytest.mark.parametrize("fault", ["layout", "feature", "checkpoint", "checkpoint of two processes"])
def test_a_run_that_fails_before_its_processes_have_started_leaves_no_record(fault: str, tmp_path: Path) -> None:
    layout: dict[str, Any] = {"layout": {"tp": 3}, "feature": {"micro_batch_size": 1}}.get(fault, {})
    options: dict[str, Any] = {"accelerator": "cpu", "default_root_dir": tmp_path, "logger": False}
    options |= {"callbacks": [BatchSizeFinder()]} if fault == "feature" else {}

    def fit() -> None:
        trainer = Trainer(strategy=MegatronStrategy(**layout), devices=2 if "two" in fault else 1, **options)
        trainer.fit(BoringModel(), ckpt_path=tmp_path / "none.ckpt" if "checkpoint" in fault else None)

    with pytest.raises((ConfigError, MissingCheckpointError)):
        fit()
    assert list(tmp_path.iterdir()) == []


class Copies(Callback):
    """Knows its Trainer, and copies itself, the other callbacks and the optimizers at one hook."""

    def __init__(self, hook: str) -> None:
        self.hook, self.copied = hook, 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.trainer = trainer
        self.copy("setup")

    def copy(self, hook: str) -> None:
        if hook == self.hook:
            self.copied += copy.deepcopy(self) is not self
            copy.deepcopy(self.trainer.callbacks)  # type: ignore[attr-defined]
            copy.deepcopy(self.trainer.lightning_module.optimizers() if self.trainer.optimizers else None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.copy("on_train_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.copy("on_train_batch_end")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.copy("on_train_end")


HOOKS = ("setup", "on_train_start", "on_train_batch_end", "on_train_end")


def weights_after(strategy: Any, hook: str, folder: Path) -> list[float]:
    torch.manual_seed(1)
    module, copies = BoringModel(), Copies(hook)
    options: dict[str, Any] = {"accelerator": "cpu", "callbacks": [copies], "enable_checkpointing": True}
    trainer = quiet_trainer(strategy, max_steps=3, default_root_dir=folder, **options)
    trainer.fit(module)
    copy.deepcopy(trainer)
    assert copies.copied == (0 if hook == "none" else 3 if hook == "on_train_batch_end" else 1)
    return [value for param in module.parameters() for value in param.flatten().tolist()]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_deep_copy_of_a_callback_that_knows_its_trainer_changes_nothing(hook: str, tmp_path: Path) -> None:
    stock = weights_after(SingleDeviceStrategy(torch.device("cpu")), "none", tmp_path / "stock")
    assert weights_after(MegatronStrategy(), hook, tmp_path) == pytest.approx(stock, rel=1e-6)


def losses(folder: Path, layout: dict[str, Any], hook: str) -> float:
    torch.manual_seed(3)
    copies, options = Copies(hook), {"use_distributed_sampler": False, "enable_checkpointing": True}
    trainer = quiet_trainer(
        MegatronStrategy(**layout), max_steps=3, callbacks=[copies], default_root_dir=folder / hook, **options
    )
    trainer.fit(LlamaModule(tiny_llama(), lr=1e-2), rows())
    copy.deepcopy(trainer)
    assert copies.copied == (0 if hook == "none" else 3)
    return float(trainer.callback_metrics["train_loss"])


def compared(folder: Path, layout: dict[str, Any]) -> list[float]:
    return [losses(folder, layout, hook) for hook in ("none", "on_train_batch_end")]


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "async_save": True}, {"pp": 2, "micro_batch_size": 1}], ids=str)
def test_a_deep_copy_on_several_ranks(ranks: Callable[..., list[Any]], tmp_path: Path, layout: dict[str, Any]) -> None:
    for untouched, copied in ranks(2, compared, tmp_path, layout):
        assert copied == untouched


def test_a_copy_before_the_run_is_a_trainer_of_its_own(tmp_path: Path) -> None:
    given = quiet_trainer(MegatronStrategy(), max_steps=1, default_root_dir=tmp_path)
    copied = copy.deepcopy(given)
    first, second = BoringModel(), BoringModel()
    copied.fit(first)
    given.fit(second)
    assert (copied.lightning_module, given.lightning_module) == (first, second)
    assert copied.strategy is not given.strategy


def advice(layout: dict[str, Any], reduction: str) -> list[str]:
    """Warnings of a fit with validation, of ``validate`` and of ``test`` that ask for ``sync_dist``."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        module = LlamaModule(tiny_llama(), loss_reduction=reduction)
        trainer = quiet_trainer(MegatronStrategy(**layout), max_steps=2, use_distributed_sampler=False)
        trainer.fit(module, rows(), rows())
        trainer.validate(module, rows(), verbose=False)
        trainer.test(module, rows(), verbose=False)
    return [str(warning.message) for warning in seen if "sync_dist" in str(warning.message)]


@pytest.mark.parametrize("reduction", ["sample", "token"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"cp": 2}, {"pp": 2, "micro_batch_size": 1}], ids=str)
def test_our_steps_bring_no_advice_about_sync_dist(
    ranks: Callable[..., list[Any]], layout: dict[str, Any], reduction: str
) -> None:
    assert ranks(2, advice, layout, reduction) == [[], []]


class Wider(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(2, 2)


def test_messages_have_the_words_that_lightnings_users_search_for(tmp_path: Path) -> None:
    def trainer() -> Trainer:
        return quiet_trainer(MegatronStrategy(), max_steps=1, default_root_dir=tmp_path)

    narrow, wide = trainer(), trainer()
    narrow.fit(BoringModel())
    wide.fit(Wider())
    narrow.save_checkpoint(tmp_path / "narrow.ckpt", weights_only=False)
    narrow.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    wide.save_checkpoint(tmp_path / "wide.ckpt", weights_only=False)
    with pytest.raises(MissingCheckpointError, match="Checkpoint file not found"):
        trainer().fit(BoringModel(), ckpt_path=tmp_path / "none.ckpt")
    with pytest.raises(CheckpointError, match="checkpoint contains only the model"):
        trainer().fit(BoringModel(), ckpt_path=tmp_path / "weights.ckpt")
    with pytest.raises(CheckpointError, match=r"(?s)Missing key\(s\) in state_dict.*more\.weight"):
        trainer().test(Wider(), ckpt_path=tmp_path / "narrow.ckpt")
    with pytest.raises(CheckpointError, match=r"(?s)Unexpected key\(s\) in state_dict.*more\.weight"):
        trainer().test(BoringModel(), ckpt_path=tmp_path / "wide.ckpt")
    asked = r"`Trainer.save_checkpoint\(..., storage_options=...\)` with `storage_options` arg is not supported"
    with pytest.raises(TypeError, match=asked):
        narrow.save_checkpoint(tmp_path / "more.ckpt", storage_options={"a": 1})
