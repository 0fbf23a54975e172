"""Examples train what they say, in every layout they name."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import seed_everything

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

CUSTOM_MODULE = Path(__file__).resolve().parents[3] / "examples" / "custom_module.py"


def custom_module(strategy: dict[str, int]) -> float:
    names = runpy.run_path(str(CUSTOM_MODULE))
    seed_everything(1234, verbose=False)
    trainer = quiet_trainer(MegatronStrategy(micro_batch_size=16, **strategy), max_epochs=1, gradient_clip_val=1.0)
    trainer.fit(names["Classifier"](width=32), names["loader"](1024, seed=1), names["loader"](256, seed=2))
    return float(trainer.callback_metrics["val_loss"])


def test_the_module_of_ones_own_learns_alike_over_tensor_parallel_ranks(ranks: Any) -> None:
    alone = custom_module({})
    assert alone < 1.386, "what guessing gives"
    assert ranks(2, custom_module, {"tp": 2}) == pytest.approx([alone, alone], rel=1e-5)
