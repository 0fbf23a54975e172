"""Checks 36-38: checkpoints that others read, wrote, or edit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import (
    DP2,
    LAYOUTS,
    LIGHTNING_2_6,
    ONE,
    PP2,
    STOCK,
    TP2,
    TP2PP2,
    VOCABULARY,
    Layout,
    Ranks,
    assert_close,
    fit,
    language_model,
    loader,
    on_all,
    trained,
    trainer_for,
)
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import GPTModule
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.testing.trainer import Recorder

# 36


def saved(layout: Layout, folder: str) -> dict[str, Any]:
    module = language_model()
    trainer, _ = fit(layout, module)
    trainer.save_checkpoint(f"{folder}/trained.ckpt")
    return trainer.validate(module, dataloaders=loader(layout, 16), verbose=False)[0]


def evaluated_from(layout: Layout, file: str) -> dict[str, Any]:
    module = GPTModule.load_from_checkpoint(file, map_location="cpu")
    return trainer_for(layout).validate(module, loader(layout, 16), verbose=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
def test_36_a_consolidated_checkpoint_loads_without_us(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    expected = on_all(ranks, layout, saved, str(tmp_path))
    command = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint"]
    subprocess.run([*command, str(tmp_path / "trained.ckpt")], env=own_environment(), check=True, timeout=300)
    (file,) = tmp_path.glob("trained.ckpt.consolidated")
    assert_close(on_all(ranks, STOCK, evaluated_from, str(file)), expected)


# 37


def one_device(layout: Layout, folder: str, tied: bool) -> Any:
    """Two epochs with a file after the first; losses of the second, and what each file evaluates to."""
    saver = ModelCheckpoint(Path(folder), filename="{epoch}", save_top_k=-1)
    _, recorder = trained(layout, saver, module=padded(tied), max_epochs=2)
    return recorder.series("train_loss")[4:], from_one_device(layout, folder, tied, fits=False)[1]


def padded(tied: bool) -> Any:
    """With a vocabulary that is padded, otherwise in the file than under most layouts."""
    return language_model(vocab_size=VOCABULARY + 1, vocab_multiple=4, tie_embeddings=tied, lr_schedule="cosine")


def from_one_device(layout: Layout, folder: str, tied: bool, fits: bool = True) -> Any:
    file, recorder = f"{folder}/epoch=0.ckpt", Recorder()
    trainer = trainer_for(layout, max_epochs=2, logger=recorder)
    if fits:
        trainer.fit(padded(tied), loader(layout), ckpt_path=file)
    found = trainer.validate(padded(tied), loader(layout, 16), ckpt_path=file, verbose=False)[0]["val_loss"]
    return recorder.series("train_loss"), found


@pytest.mark.slow
@pytest.mark.parametrize("tied", [pytest.param(False, id=""), pytest.param(True, id="tied")])
def test_37_a_checkpoint_of_one_device_loads_on_every_layout(ranks: Ranks, tmp_path: Path, tied: bool) -> None:
    # Hugging Face directories: tests/trainer/checkpointing/test_hugging_face.py.
    expected = on_all(ranks, STOCK, one_device, str(tmp_path), tied)
    assert (tmp_path / "epoch=0.ckpt").is_file()
    for layout in LAYOUTS:
        assert_close(on_all(ranks, layout, from_one_device, str(tmp_path), tied), expected)


# 38


class Remembers(GPTModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["of the module"] = sorted(checkpoint["state_dict"]) == sorted(self.state_dict())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = {name: checkpoint[name] for name in ("of the module", "of a callback")}
        for name, value in checkpoint["state_dict"].items():
            if "norm" in name:
                checkpoint["state_dict"][name] = value * 0.5


class Edits(Callback):
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["of a callback"] = [1, {"two": torch.ones(2)}]
        norms = {n: v + 1 for n, v in checkpoint["state_dict"].items() if "norm" in n}
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **norms}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.keys = set(checkpoint["state_dict"])


class Rows(LightningDataModule):
    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout

    def train_dataloader(self) -> Any:
        return loader(self.layout)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def edited(layout: Layout, folder: str) -> bool:
    """A value that a hook wrote into the checkpoint, and one that a hook changed on the way back."""
    first = language_model(Remembers, lr=3e-3)
    options: dict[str, Any] = {"enable_checkpointing": True}
    saver = ModelCheckpoint(Path(folder), filename="a", save_top_k=1)
    trainer = trainer_for(layout, callbacks=[Edits(), saver], **options)
    trainer.fit(first, datamodule=Rows(layout))
    norms = {n: p.detach().clone() for n, p in first.named_parameters() if "norm" in n}
    second, edits, rows = language_model(Remembers, lr=3e-3), Edits(), Rows(layout)
    trainer = trainer_for(layout, callbacks=[edits], max_epochs=1, enable_checkpointing=False)
    safe = {"weights_only": True} if LIGHTNING_2_6 else {}
    trainer.fit(second, datamodule=rows, ckpt_path=f"{folder}/a.ckpt", **safe)
    assert second.loaded["of the module"]
    assert second.loaded["of a callback"][1]["two"].tolist() == [1.0, 1.0]
    assert rows.loaded == {"rows": 3}
    assert edits.keys == set(second.state_dict())
    assert second.hparams["lr"] == 3e-3
    after = dict(second.named_parameters())
    for name, before in norms.items():
        torch.testing.assert_close(after[name].detach(), (before + 1) * 0.5, rtol=0, atol=1e-6)
    return True


@pytest.mark.slow
def test_38_hooks_see_and_edit_what_is_saved_and_loaded(ranks: Ranks, tmp_path: Path) -> None:
    for layout in (ONE, TP2PP2, DP2):
        assert on_all(ranks, layout, edited, str(tmp_path / str(layout)))
