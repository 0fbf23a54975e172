"""What hooks write into a checkpoint: the stages of a pipeline save together what one process of stock saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer

Ranks = Callable[..., list[Any]]
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 8}
TOKENS = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(2))
pytestmark = pytest.mark.skipif(kind_in_tests() is not CPU, reason="Lightning's own strategies stay on the CPU")


class Remembers(GPTModule):
    """Keeps values that every stage has, that the last one has alone, and one for each of its parameters."""

    def __init__(self) -> None:
        seed_everything(5, verbose=False)
        super().__init__(lr=1e-2, hidden_dropout=0.0, attention_dropout=0.0, **SIZES)
        self.begun, self.ended, self.best, self.told = 0, 0, None, list[int]()
        self.loaded: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.begun += 1
        loss = super().training_step(batch, batch_idx)
        self.ended += 1
        self.best = min(float(loss.detach()), self.best or float("inf"))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero:
            self.told.append(self.trainer.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counts"] = {"begun": self.begun, "ended": self.ended}
        checkpoint["norms"] = {name: float(param.detach().norm()) for name, param in self.named_parameters()}
        checkpoint["best"], checkpoint["told"] = self.best, self.told
        if self.best is not None:
            checkpoint["behind the model"] = torch.tensor([self.best])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        names = ("counts", "norms", "best", "told", "behind the model")
        self.loaded = {name: checkpoint.get(name) for name in names}


def run(strategy: dict[str, Any] | None, file: Path) -> dict[str, Any]:
    """Train two steps, and go on from the checkpoint: what the hook is given there."""
    for path in (None, file):
        module = Remembers()
        chosen = SingleDeviceStrategy(torch.device("cpu")) if strategy is None else MegatronStrategy(**strategy)
        trainer = quiet_trainer(chosen, max_epochs=1 if path is None else 2)
        rows = [{"tokens": row[:-1], "labels": row[1:]} for row in TOKENS]
        trainer.fit(module, DataLoader(rows, batch_size=4), ckpt_path=path)  # type: ignore[arg-type]
        if path is None:
            trainer.save_checkpoint(file)
    return module.loaded


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"save_distributed_checkpoint": False}, marks=SLOW),
        pytest.param({"async_save": True}, marks=SLOW),
    ],
    ids=["directory", "file", "async"],
)
def test_every_stage_is_given_what_one_process_saves(ranks: Ranks, tmp_path: Path, how: dict[str, Any]) -> None:
    expected = run(None, tmp_path / "stock.ckpt")
    for loaded in (run(how, tmp_path / "one.ckpt"), *ranks(2, run, {"pp": 2, **how}, tmp_path / "two.ckpt")):
        assert (loaded["counts"], loaded["told"]) == (expected["counts"], expected["told"])
        assert loaded["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert loaded["best"] == pytest.approx(expected["best"], rel=1e-5)
        torch.testing.assert_close(loaded["behind the model"], expected["behind the model"])
