"""A run that goes on with other settings than its checkpoint's: these hold, one line says so, or it is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.testing.trainer import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
SIZES = dict(num_layers=1, hidden_size=16, num_attention_heads=2, num_query_groups=2, ffn_hidden_size=32, vocab_size=64)
ROWS = [
    {name: (torch.arange(16) * row + shift) % 64 for shift, name in enumerate(("tokens", "labels"))} for row in range(8)
]


class Model(LlamaModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        group = optimizer.param_groups[0]
        self.used = [*getattr(self, "used", []), (group["lr"], group["weight_decay"], tuple(group["betas"]))]


def used(folder: Path, resumes: bool = False, **settings: Any) -> tuple[list[Any], list[str]]:
    """Learning rate, weight decay and betas of each step, and what was told."""
    saves = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    options = {"enable_checkpointing": True, "callbacks": [saves]} if not resumes else {}
    trainer = quiet_trainer(MegatronStrategy(), max_steps=8, limit_val_batches=0, **options)
    model = Model("llama-tiny", **SIZES, **settings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(model, DataLoader(ROWS), ckpt_path=folder / "step=4.ckpt" if resumes else None)  # type: ignore[arg-type]
    return model.used, [str(one.message) for one in told if "settings replace" in str(one.message)]


COSINE = {"lr": 3e-4, "min_lr": 3e-5, "lr_schedule": "cosine", "decay_steps": 8}
RISING = {"start_weight_decay": 0.01, "weight_decay_schedule": "linear"}


@pytest.mark.parametrize(("old", "new", "names"), [
    (COSINE, {"lr": 3e-5, "min_lr": 2e-5}, ["lr.max_lr 0.0003 (this run: 3e-05)", "lr.min_lr 3e-05 (this run: 2e"]),
    (COSINE, {"decay_steps": 6, "betas": (0.5, 0.6)}, ["lr.decay 8 (this run: 6)", "betas (0.9, 0.95) (this run: ("]),
    (COSINE | RISING, {"weight_decay": 0.2}, ["wd.end 0.1 (this run: 0.2)"]),
    ({"lr": 1e-3}, {"lr": 1e-2, "weight_decay": 0.3}, ["lr 0.001 (this run: 0.01)", "weight_decay 0.1 (this run: 0"]),
    (COSINE, {}, []),
])  # fmt: skip
def test_the_checkpoints_settings_hold_and_one_line_says_where_they_differ(
    tmp_path: Path, old: dict[str, Any], new: dict[str, Any], names: list[str]
) -> None:
    whole, told = used(tmp_path, **old)
    assert told == []
    resumed, told = used(tmp_path, resumes=True, **old | new)
    assert resumed == whole[4:]
    assert len(told) == bool(names)
    assert all(name in told[0] for name in names), told


@pytest.mark.parametrize(("old", "new"), [(COSINE, {"lr_schedule": "constant"}), ({}, COSINE)])
def test_schedules_of_one_side_alone_are_refused(tmp_path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    used(tmp_path, **old)
    with pytest.raises(CheckpointError, match=r"it has \d learning-rate schedulers, and this run \d"):
        used(tmp_path, resumes=True, **old | new)


class Plain(BoringModel):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        made = self.make(self.parameters())
        return made if isinstance(made, torch.optim.Optimizer) else ([made.optimizer], [made])


def weights(make: Any, strategy: Any, path: Path, ckpt_path: Path | None = None) -> torch.Tensor:
    seed_everything(1, verbose=False)
    rows = torch.randn(2, 32, generator=torch.Generator().manual_seed(2))  # a run stops at an epoch's end
    trainer = quiet_trainer(strategy, max_steps=2 if ckpt_path is None else 4, limit_val_batches=0)
    model = Plain(make)
    trainer.fit(model, DataLoader(rows), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    trainer.save_checkpoint(path)
    return model.layer.weight.detach().cpu().clone()


MADE: dict[str, Any] = {
    "adam": lambda p: Adam(p, 1e-2),
    "amsgrad": lambda p: Adam(p, 1e-2, amsgrad=True),
    "betas": lambda p: Adam(p, 3e-2, betas=(0.5, 0.6)),
    "decoupled": lambda p: AdamW(p, 1e-2, weight_decay=0.3),
    "sgd": lambda p: SGD(p, 1e-2),
    "momentum": lambda p: SGD(p, 1e-2, momentum=0.9, nesterov=True),
    "rms": lambda p: RMSprop(p, 1e-2),
    "centered": lambda p: RMSprop(p, 1e-2, centered=True, momentum=0.5),
    "steps": lambda p: StepLR(SGD(p, 1e-2), 1, 0.5),
    "other steps": lambda p: StepLR(SGD(p, 1e-1), 2, 0.1),
    "cosine": lambda p: CosineAnnealingLR(SGD(p, 1e-2), 9),
}


@pytest.mark.parametrize("pair", [
    ("adam", "amsgrad"), ("adam", "betas"), ("adam", "decoupled"), ("sgd", "momentum"), ("rms", "centered"),
    ("steps", "other steps"),
])  # fmt: skip
def test_settings_that_change_the_state_go_on_as_in_stock_lightning_both_ways(tmp_path: Path, pair: Any) -> None:
    for old, new in (pair, pair[::-1]):
        for number, strategy in enumerate(("auto", MegatronStrategy())):
            weights(MADE[old], strategy, tmp_path / f"{number}.ckpt")
        stock = weights(MADE[new], "auto", tmp_path / "end", tmp_path / "0.ckpt")
        with pytest.warns(UserWarning, match="its settings replace"):
            ours = weights(MADE[new], MegatronStrategy(), tmp_path / "end", tmp_path / "1.ckpt")
        torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("pair", [("adam", "sgd"), ("adam", "momentum"), ("adam", "rms"), ("steps", "cosine")])
def test_what_cannot_go_on_is_refused_by_name_both_ways(tmp_path: Path, pair: Any) -> None:
    for old, new in (pair, pair[::-1]):
        weights(MADE[old], MegatronStrategy(), tmp_path / "1.ckpt")
        with pytest.raises(CheckpointError, match=r"exp_avg|no T_max|no gamma, step_size"):
            weights(MADE[new], MegatronStrategy(), tmp_path / "end", tmp_path / "1.ckpt")
