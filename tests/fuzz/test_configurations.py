"""Random configurations: see ``configurations.py``, which also runs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from configurations import Drawn, Fuzz
from lightning.pytorch import seed_everything

from lightning_megatron import ConfigError, MegatronDataModule, MegatronStrategy
from lightning_megatron.data import DataError
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

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


@dataclass(frozen=True)
class Trained:
    """What came of a configuration.

    Attributes:
        answer: ``"trained"``, ``"refused"``, or ``"no samples"``, where none were asked for.
        losses: loss of each step.
        norms: norm of the gradient of each step.
    """

    answer: str
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()


def train(drawn: Drawn, strategy: MegatronStrategy, devices: int, folder: Path) -> Trained:
    """Two steps of a configuration on so many ranks."""
    options = {**drawn.trainer, "devices": devices, "callbacks": [], "default_root_dir": folder}
    recorder = Recorder()
    try:
        trainer = quiet_trainer(strategy, max_steps=2, limit_val_batches=1, logger=recorder, **options)
        trainer.fit(drawn.module, datamodule=drawn.data)
    except ConfigError:
        return Trained("refused")
    except DataError:
        if drawn.data.sample_plan.train_samples != 0:
            raise
        return Trained("no samples")
    return Trained("trained", tuple(recorder.series("train_loss")), tuple(recorder.series("grad_norm")))


def on_two_ranks(folder: Path, seeds: Iterable[int]) -> list[tuple[int, Trained]]:
    """What two ranks make of every configuration that has tokens."""
    home = folder / f"rank{dist.get_rank()}"
    home.mkdir()
    return [
        (seed, train(drawn, drawn.strategy, 2, folder))
        for seed in seeds
        if isinstance((drawn := right(home, seed)).data, MegatronDataModule)
    ]


def right(folder: Path, seed: int) -> Drawn:
    """A configuration without values that are wrong in every combination."""
    seed_everything(seed, verbose=False)
    return Fuzz(folder).draw(seed, wrong=0.0)


def on_one_rank(folder: Path, seed: int) -> Trained:
    """The same configuration with the defaults of the strategy, and as many samples in a step."""
    drawn = right(folder, seed)
    drawn.data.batch_size *= 2 // drawn.strategy.layout.model_parallel_size
    return train(drawn, MegatronStrategy(), 1, folder)


def depends_on_the_cut(drawn: Drawn) -> bool:
    """True for numbers that differ between layouts: masks of dropout, tokens that experts drop."""
    config = drawn.module.config
    dropped = config.moe_capacity_factor or config.moe_capacity_bins
    return bool(config.hidden_dropout or config.attention_dropout or dropped)


@pytest.mark.exhaustive
def test_what_is_accepted_trains_as_on_one_rank(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    first, second = ranks(2, on_two_ranks, tmp_path, range(TRAINED))
    answers, compared = Counter(found.answer for _, found in first), Counter[str]()
    assert answers["trained"] >= 24, answers
    for (seed, found), (_, other) in zip(first, second, strict=True):
        assert found.answer == other.answer, seed
        drawn = right(tmp_path, seed)
        if found.answer != "trained" or depends_on_the_cut(drawn):
            continue
        expected = on_one_rank(tmp_path, seed)
        assert len(found.losses) == 2, seed
        # Experts balance the tokens of a replica, which moves their weights in the first step.
        has_experts = bool(drawn.module.config.num_experts)
        steps = 1 if has_experts else 2
        near = 2e-5 if drawn.trainer["precision"] == "32-true" else 2e-2
        assert found.losses[:steps] == pytest.approx(expected.losses[:steps], rel=near), seed
        if not has_experts:  # AdamW hides the scale of a gradient from the losses
            assert found.norms[:1] == pytest.approx(expected.norms[:1], rel=5 * near), seed
        compared[drawn.trainer["precision"]] += 1
    assert min(compared.values()) >= 3, compared
