"""Random configurations: see ``configurations.py``, which also runs alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from configurations import Fuzz
from lightning.pytorch import seed_everything

from lightning_megatron import ConfigError, MegatronDataModule
from lightning_megatron.testing.trainer import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore")
FAST, ALL, TRAINED = 150, 2000, 200


def launched(folder: Path, seeds: range) -> int:
    fuzz = Fuzz(folder)
    passed = sum(fuzz.check(fuzz.draw(seed)) for seed in seeds)
    assert min(fuzz.answers["accepted"], fuzz.answers["refused"]) > len(seeds)
    return passed


def test_a_configuration_is_accepted_or_a_configuration_error(tmp_path: Path) -> None:
    assert 0 < launched(tmp_path, range(FAST)) < FAST


@pytest.mark.exhaustive
def test_so_are_many_more(tmp_path: Path) -> None:
    assert 0 < launched(tmp_path, range(FAST, ALL)) < ALL - FAST


def train(folder: Path, rank_folder: str, seeds: range) -> Counter[str]:
    """Two steps of whatever two ranks accept."""
    import torch.distributed as dist

    home = folder / f"{rank_folder}{dist.get_rank()}"
    home.mkdir()
    fuzz, answers = Fuzz(home), Counter[str]()
    for seed in seeds:
        seed_everything(seed, verbose=False)
        drawn = fuzz.draw(seed, wrong=0.0)
        if not isinstance(drawn.data, MegatronDataModule):
            continue
        options = {**drawn.trainer, "devices": 2, "callbacks": [], "default_root_dir": folder}
        try:
            trainer = quiet_trainer(drawn.strategy, max_steps=2, limit_val_batches=1, **options)
            trainer.fit(drawn.module, datamodule=drawn.data)
        except ConfigError:
            answers["refused"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        if trainer.num_training_batches == 0:  # no samples were asked for, and Lightning says so
            answers["nothing to train"] += 1
            continue
        metrics = trainer.callback_metrics
        assert "train_loss" in metrics, f"seed {seed}: {trainer.state}, step {trainer.global_step}"
        assert math.isfinite(float(metrics["train_loss"])), seed
        answers["trained"] += 1
    return answers


@pytest.mark.exhaustive
def test_what_is_accepted_trains(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    first, second = ranks(2, train, tmp_path, "rank", range(TRAINED))
    assert first == second
    assert first["trained"] >= 24, first
