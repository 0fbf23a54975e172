"""Hooks of a resumed run see what they see under Lightning's strategy for one device, and what they write stays."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, Timer
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Be aware that", "ignore:Checkpoint directory", "ignore:You defined a", "ignore:You're resuming",
    "ignore:Found keys", "ignore:Swapping scheduler", "ignore:The `srun`",
)  # fmt: skip


class Data(LightningDataModule):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
        return DataLoader(list(rows), batch_size=2)

    def state_dict(self) -> dict[str, Any]:
        return {"place": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen.append(("data module", state_dict["place"]))


class Module(LightningModule):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen
        self.layer = torch.nn.Linear(3, 1)

    def _see(self, hook: str) -> None:
        self.seen.append((hook, self.layer.weight.detach().tolist()))

    def configure_optimizers(self) -> Any:
        self._see("configure_optimizers")
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append(("on_load_checkpoint", checkpoint["state_dict"]["layer.weight"].tolist()))

    def on_fit_start(self) -> None:
        self._see("on_fit_start")

    def on_train_start(self) -> None:
        self._see("on_train_start")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()


class Watch(Callback):
    def __init__(self, seen: list[Any]) -> None:
        self.seen, self.state = seen, 0

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state + 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["state"]
        self.seen.append(("callback", self.state))

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.seen.append(("callback.on_load_checkpoint", module.layer.weight.tolist()))

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.seen.append(("callback.on_fit_start", self.state))


class Write(Callback):
    """Writes weights in one hook of a resumed run, once they are restored."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self._write("on_load_checkpoint", module)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._write("on_fit_start", module)
        if self.hook == "on_fit_start":
            trainer.optimizers[0].param_groups[0]["lr"] = 9.0  # the checkpoint's comes later
            torch.rand(3)

    def _write(self, hook: str, module: Any) -> None:
        if hook == self.hook:
            with torch.no_grad():
                module.layer.weight.fill_(0.5)


def fit(strategy: Any, *callbacks: Callback, seen: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    seed_everything(3, verbose=False)
    module = options.pop("module", Module)([] if seen is None else seen)
    own = MegatronStrategy() if strategy == "ours" else strategy
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = quiet_trainer(own, callbacks=list(callbacks), enable_checkpointing=saves, **options)
    trainer.fit(module, Data(module.seen), ckpt_path=ckpt_path)
    return trainer


def resumed(strategy: str, folder: Path, *callbacks: Callback, seen: Any = None, **options: Any) -> Any:
    """Two epochs, the second of them in a run of its own."""
    saver = ModelCheckpoint(folder / strategy, save_last=True, save_top_k=0)
    fit(strategy, *options.pop("before", ()), saver, max_epochs=1)
    return fit(strategy, *callbacks, seen=seen, ckpt_path=str(folder / strategy / "last.ckpt"), max_epochs=2, **options)


def weights(trainer: Any) -> torch.Tensor:
    return trainer.lightning_module.layer.weight.detach().cpu().clone()


def test_hooks_of_a_resumed_run_see_in_stocks_order_what_they_see_there(tmp_path: Path) -> None:
    seen: dict[str, list[Any]] = {"auto": [], "ours": []}
    for strategy, here in seen.items():
        resumed(strategy, tmp_path, Watch(here), seen=here, before=[Watch([])])
    assert seen["ours"] == seen["auto"]
    assert [name for name, _ in seen["ours"]][-1] == "on_train_start"
    assert len(seen["ours"]) == 8


def test_a_timer_whose_time_is_used_up_trains_no_further_step(tmp_path: Path) -> None:
    trainer = resumed("ours", tmp_path, Timer(timedelta(microseconds=1)), before=[Timer(timedelta(hours=1))])
    assert trainer.global_step == 2


@pytest.mark.parametrize("hook", ["on_load_checkpoint", "on_fit_start"])
def test_weights_that_a_hook_writes_are_trained_from_there_with_the_restored_optimizer(
    hook: str, tmp_path: Path
) -> None:
    ours, stock = (weights(resumed(strategy, tmp_path, Write(hook))) for strategy in ("ours", "auto"))
    assert torch.equal(ours, stock)
    assert not torch.equal(ours, weights(resumed("ours", tmp_path)))


def test_main_values_of_higher_precision_follow_a_write(tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "bf16-mixed"}
    trainer = resumed("ours", tmp_path, Write("on_load_checkpoint"), limit_train_batches=0, **options)
    main = trainer.strategy.main_state_dict()["layer.weight"]
    assert torch.equal(main, torch.full((1, 3), 0.5))


def test_averaging_of_weights_resumes_with_its_own_schedule_as_in_stock(tmp_path: Path) -> None:
    runs = {}
    for strategy in ("ours", "auto"):
        saver = ModelCheckpoint(tmp_path / strategy, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
        fit(strategy, StochasticWeightAveraging(0.05, 1, 3), saver, max_epochs=5, module=Scheduled)
        path = str(tmp_path / strategy / "epoch=2.ckpt")
        runs[strategy] = fit(
            strategy, StochasticWeightAveraging(0.05, 1, 3), ckpt_path=path, max_epochs=5, module=Scheduled
        )
    assert torch.equal(weights(runs["ours"]), weights(runs["auto"]))


class Scheduled(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
