"""What Lightning asks each rank for is decided once: by the metric and the clock of rank 0."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loops import training_epoch_loop
from lightning.pytorch.tuner import Tuner
from lightning_utilities.core.imports import RequirementCache
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32, "vocab_size": 64}
ROWS = [{"tokens": torch.arange(n, n + 16), "labels": torch.arange(n + 1, n + 17)} for n in range(8)]


class OwnMetric(LlamaModule):
    """Logs values of this rank: on rank 0 they fall in the first three validations, on rank 1 they rise."""

    def on_validation_epoch_end(self) -> None:
        count = min(self.trainer.current_epoch, 2)
        self.log("own", torch.tensor(1.0 + (count if torch.distributed.get_rank() else -count) * 1e-7))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.plateau, "monitor": "own"}}


def rates(axes: dict[str, int]) -> list[float]:
    """Learning rates of a rank after each of five epochs."""
    module, seen = OwnMetric("llama-tiny", **SIZES, num_query_groups=2), []

    def note() -> None:
        (group,) = module.optimizers().param_groups  # type: ignore[union-attr]
        assert isinstance(module.lr_schedulers(), ReduceLROnPlateau)
        assert module.plateau.state_dict() == module.lr_schedulers().state_dict()  # type: ignore[union-attr]
        seen.append(group["lr"])

    module.on_train_epoch_start = note  # type: ignore[method-assign]
    trainer = quiet_trainer(MegatronStrategy(**axes), max_epochs=6, limit_train_batches=1, limit_val_batches=1)
    trainer.fit(module, DataLoader(ROWS), DataLoader(ROWS))  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, {}], ids=str)
def test_a_plateau_of_rank_0_lowers_the_learning_rate_of_all(ranks: Any, axes: dict[str, int]) -> None:
    assert ranks(2, rates, axes) == [[1.0, 1.0, 1.0, 1.0, 0.5, 0.25]] * 2


def found_rates(folder: Path) -> int:
    """Number of steps of a search for a learning rate; in the eyes of Lightning, an hour has passed on rank 1."""
    ahead = 3600.0 * torch.distributed.get_rank()
    module = LlamaModule("llama-tiny", **SIZES, num_query_groups=2)
    module.learning_rate = 0.1
    how: dict[str, Any] = {"check_val_every_n_epoch": None, "val_check_interval": timedelta(minutes=30)}
    with pytest.MonkeyPatch.context() as patch:
        strategy, now = MegatronStrategy(tp=2, timeout=timedelta(minutes=1)), training_epoch_loop.time.monotonic
        patch.setattr(training_epoch_loop, "time", SimpleNamespace(monotonic=lambda: now() + ahead))
        trainer = quiet_trainer(strategy, default_root_dir=folder, max_epochs=1, **how)
        finder = Tuner(trainer).lr_find(module, DataLoader(ROWS), DataLoader(ROWS), num_training=3)  # type: ignore[arg-type]
    assert finder is not None
    return len(finder.results["loss"])


@pytest.mark.skipif(not RequirementCache("lightning>=2.6"), reason="Lightning has this from 2.6 on")
def test_the_clock_of_rank_0_decides_in_a_search_for_a_learning_rate(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, found_rates, tmp_path) == [3, 3]
