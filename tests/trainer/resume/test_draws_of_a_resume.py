"""Random numbers for weights that a checkpoint replaces: a resume draws none, and ends as a run without a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draws import Draws
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import tiny_llama
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.testing.trainer import quiet_trainer


class WithHead(LlamaModule):
    """A head that the checkpoint lacks, unless the run with this head has written it."""

    strict_loading = False

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "extra"):
            self.extra = ColumnParallelLinear(8, 4, self.mesh, init_std=0.02)


def fitted(
    kind: type[LlamaModule], folder: str, layout: dict[str, Any], steps: int, ckpt_path: str | None
) -> tuple[dict[str, Tensor], int]:
    """A rank's weights after a fit, and the normal numbers that it has drawn."""
    seed_everything(7, verbose=False)
    module = kind(tiny_llama(), lr=1e-2, lr_schedule="constant")
    rows = torch.randint(40, (4, 17), generator=torch.Generator().manual_seed(1))
    loader: Any = DataLoader([{"tokens": row[:16], "labels": row[1:]} for row in rows], batch_size=2)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(
        MegatronStrategy(**layout), max_steps=steps, enable_checkpointing=True, callbacks=[saver], limit_val_batches=0
    )
    with Draws() as draws:
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return {name: value.detach().clone() for name, value in module.named_parameters()}, draws.number


def resumed(folder: str, layout: dict[str, Any], steps: int, ckpt_path: str) -> tuple[int, int, bool]:
    """Numbers that a run and its resume have drawn, and True if both end with the same weights."""
    right, first = fitted(LlamaModule, folder, layout, 4, None)
    weights, second = fitted(LlamaModule, folder, layout, steps, ckpt_path)
    return first, second, all(torch.equal(weights[name], right[name]) for name in right)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("named", [True, False], ids=["path", "last"])
def test_a_resume_draws_no_weights_that_the_checkpoint_holds(tmp_path: Path, named: bool) -> None:
    steps, path = (4, str(tmp_path / "step=2.ckpt")) if named else (6, "last")
    first, second, is_equal = resumed(str(tmp_path), {}, steps, path)
    assert (first > 0, second, is_equal) == (True, 0, named)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "micro_batch_size": 1}], ids=["tp2", "pp2"])
def test_no_rank_draws_them(ranks: Any, tmp_path: Path, layout: dict[str, Any]) -> None:
    for first, second, is_equal in ranks(2, resumed, str(tmp_path), layout, 4, str(tmp_path / "step=2.ckpt")):
        assert (first > 0, second, is_equal) == (True, 0, True)


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:.*was not")
def test_what_the_checkpoint_lacks_is_drawn_as_without_it(tmp_path: Path) -> None:
    fitted(LlamaModule, str(tmp_path), {}, 2, None)
    weights, drawn = fitted(WithHead, str(tmp_path), {}, 2, str(tmp_path / "step=2.ckpt"))
    right, number = fitted(WithHead, str(tmp_path / "fresh"), {}, 2, None)
    assert drawn == number
    assert torch.equal(weights["extra.weight"], right["extra.weight"])
