"""Weights that a callback puts in place of the model's when it saves: a resumed run goes on as stock Lightning's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch import callbacks as stock_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
Ranks = Callable[..., list[Any]]
STEPS, MORE = 3, 4
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.body(x).float(), y.float())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-4)  # a gradient of zero makes no step

    def train_dataloader(self) -> Any:
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader([(row, row.sum().reshape(1)) for row in rows], batch_size=8)  # type: ignore[arg-type]


def fit(
    callback: Callback, steps: int, folder: Path, resume: Path | None = None, *, directory: bool | None, precision: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a run that saves ``middle.ckpt`` after ``STEPS`` steps, and its weights at the end.

    ``directory`` says whether the checkpoint is one, and ``None`` that stock Lightning runs.
    """
    seed_everything(3, verbose=False)
    recorder = Recorder()
    saver = ModelCheckpoint(folder, filename="middle", every_n_train_steps=STEPS, save_top_k=-1)
    options: dict[str, Any] = {"max_steps": steps, "limit_val_batches": 0, "logger": recorder, "log_every_n_steps": 1}
    options |= {"callbacks": [callback, saver], "enable_checkpointing": True, "precision": precision}
    strategy: Any = "auto" if directory is None else MegatronStrategy(save_distributed_checkpoint=directory)
    module = Plain()
    quiet_trainer(strategy, **options).fit(module, ckpt_path=resume and str(resume))
    return recorder.series("train_loss"), {name: value.cpu() for name, value in module.state_dict().items()}


def both_parts(folder: Path, callback: Callable[[], Callback], **options: Any) -> Any:
    """What ``fit`` returns of a run of ``STEPS`` steps and of one that goes on from its checkpoint."""
    before = fit(callback(), STEPS, folder, **options)
    return before, fit(callback(), STEPS + MORE, folder / "resumed", folder / "middle.ckpt", **options)


def pruning() -> ModelPruning:
    return ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=False)


@pytest.mark.parametrize("directory", [True, False])
def test_pruned_weights_go_on_as_in_stock_lightning(tmp_path: Path, directory: bool) -> None:
    stock = both_parts(tmp_path / "stock", pruning, directory=None, precision="32-true")
    ours = both_parts(tmp_path / "ours", pruning, directory=directory, precision="32-true")
    for own, others in zip(ours, stock, strict=True):
        assert own[0] == pytest.approx(others[0], rel=1e-5)
        torch.testing.assert_close(own[1], others[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_pruned_weights_go_on_alike_from_a_directory_and_from_a_file(tmp_path: Path, precision: str) -> None:
    found = []
    for directory in (True, False):
        found.append(both_parts(tmp_path / str(directory), pruning, directory=directory, precision=precision)[1])
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)


@pytest.mark.skipif(not hasattr(stock_callbacks, "EMAWeightAveraging"), reason="Lightning has it from 2.6 on")
@pytest.mark.parametrize("directory", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_averages_go_on_in_their_own_precision(tmp_path: Path, precision: str, directory: bool) -> None:
    """Lightning averages in fp32, also if the model is in bf16."""
    options: dict[str, Any] = {"directory": directory, "precision": precision}

    def averaging() -> Callback:
        average: Callback = stock_callbacks.EMAWeightAveraging(decay=0.9)
        return average

    straight = fit(averaging(), STEPS + MORE, tmp_path / "straight", **options)
    _, resumed = both_parts(tmp_path / "parts", averaging, **options)
    assert resumed[0] == straight[0][STEPS:]
    torch.testing.assert_close(resumed[1], straight[1], rtol=0, atol=0)


class Copies(Callback):
    """Saves copies of all tensors, in fp32 if asked."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["state_dict"]
        checkpoint["state_dict"] = {
            name: value.to(self.dtype or value.dtype, copy=True) for name, value in saved.items()
        }


@pytest.mark.parametrize("directory", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_copies_are_no_edits(tmp_path: Path, dtype: torch.dtype | None, directory: bool) -> None:
    """Training goes on with fp32 main values, not with copies of the model in bf16."""
    options: dict[str, Any] = {"directory": directory, "precision": "bf16-mixed"}
    straight = fit(Copies(dtype), STEPS + MORE, tmp_path / "straight", **options)
    _, resumed = both_parts(tmp_path / "parts", lambda: Copies(dtype), **options)
    assert resumed[0] == straight[0][STEPS:]
    torch.testing.assert_close(resumed[1], straight[1], rtol=0, atol=0)


class HalvesLastNorm(Callback):
    """Saves the last norm with half its weights; keeps what the resumed run starts with, and has after a step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["state_dict"]
        saved |= {
            name: value / 2 for name, value in saved.items() if name.endswith("norm.weight") and "layers" not in name
        }

    def _note(self, pl_module: LightningModule) -> None:
        norms = (
            value
            for name, value in pl_module.state_dict().items()
            if name.endswith("norm.weight") and "layers" not in name
        )
        self.seen += [value.detach().float().cpu().clone() for value in norms]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(pl_module)


def halved(path: str, layout: dict[str, Any], precision: Any) -> tuple[Tensor, ...]:
    """The last norm before the save, at the start of the resumed run, and after one step of it (on the last stage)."""
    tokens = torch.arange(8) % 5
    data = DataLoader([{"tokens": tokens, "labels": tokens}] * 8, batch_size=4)  # type: ignore[arg-type]
    tiny: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2}
    seen = []
    for steps, resume in ((1, None), (2, path)):
        module = LlamaModule("llama-tiny", **tiny, num_query_groups=2, vocab_size=64, lr=1e-9, weight_decay=0.0)
        callback = HalvesLastNorm()
        options: dict[str, Any] = {"max_steps": steps, "limit_val_batches": 0, "precision": precision}
        trainer = quiet_trainer(MegatronStrategy(**layout), callbacks=[callback], **options)
        trainer.fit(module, data, ckpt_path=resume)
        trainer.save_checkpoint(path)
        seen += callback.seen[-1:] if resume is None else callback.seen
    return tuple(seen)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_only_what_was_edited_loses_its_main_values_on_any_stage(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    layout = {"pp": 2, "micro_batch_size": 2}
    first, last = ranks(2, halved, str(tmp_path / "halved.ckpt"), layout, precision)
    assert first == ()
    before, start, after = last
    torch.testing.assert_close(start, before / 2, rtol=0, atol=0)
    torch.testing.assert_close(after, start, rtol=1e-4, atol=0)
