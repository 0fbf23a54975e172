"""BERT on every kind of layout against one process: loss and gradient norm over ten steps.

The number of tokens to guess is the same in all samples, so that the mean of the micro-batches is that of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from parity import Curve, check_runs
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import BertModule, MegatronStrategy
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

BOUND = 1e-5
ADAM_EPSILON = 1e-5  # steps of gradients that are rounding alone stay small, see test_parity_pipeline.py
STEPS, BATCH, LENGTH, GUESSED, VOCABULARY, SEED = 10, 8, 13, 3, 61, 5


@dataclass(frozen=True)
class Training:
    """Training run that must give the same numbers on every layout."""

    norm_position: str = "after"
    tied: bool = True

    def module(self) -> BertModule:
        sizes: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_multiple": 4}
        sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "init_std": 0.2}
        sizes |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "norm_position": self.norm_position}
        return BertModule("bert-tiny", lr=1e-3, eps=ADAM_EPSILON, tie_embeddings=self.tied, **sizes)


@dataclass(frozen=True)
class Run:
    """A layout to train it on."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    micro_batches: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    training: Training = field(default=Training())

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def strategy(self) -> MegatronStrategy:
        size = BATCH // self.dp // self.micro_batches
        sizes: dict[str, Any] = {"tp": self.tp, "pp": self.pp, "cp": self.cp}
        return MegatronStrategy(**sizes, micro_batch_size=size, bucket_size=5000, **dict(self.options))

    def __str__(self) -> str:
        given = [f"{name}={value}" for name, value in self.options]
        sizes = f"tp{self.tp} pp{self.pp} cp{self.cp} dp{self.dp} m{self.micro_batches}"
        return " ".join([sizes, str(self.training), *given])


def run(*sizes: int, training: Training | None = None, **options: Any) -> Run:
    """A run with tp, pp, cp, dp and micro-batches, and arguments of the strategy."""
    names = ("tp", "pp", "cp", "dp", "micro_batches")
    given = dict(zip(names, sizes, strict=False))
    return Run(**given, options=tuple(options.items()), training=training or Training())


def samples(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        length = LENGTH - number % 5
        guessed = torch.randperm(length, generator=generator)[:GUESSED]
        labels = torch.full((LENGTH,), -100)
        labels[guessed] = torch.randint(VOCABULARY, (GUESSED,), generator=generator)
        types = (torch.arange(LENGTH) >= length // 2).long()
        mask = (torch.arange(LENGTH) < length).long()
        found.append({"tokens": tokens, "labels": labels, "token_types": types, "padding_mask": mask})
        found[-1]["is_random"] = torch.tensor(number % 2)
    return found


def curve(training: Training, strategy: MegatronStrategy, batch_size: int) -> Curve:
    seed_everything(SEED, verbose=False)
    recorder = Recorder()
    trainer = quiet_trainer(strategy, max_epochs=1, gradient_clip_val=1.0, logger=recorder)
    loader = DataLoader(samples(STEPS * BATCH), batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]
    trainer.fit(training.module(), loader)
    parts = zip(recorder.series("train_token_loss"), recorder.series("train_next_sentence_loss"), strict=True)
    losses = recorder.series("train_loss")
    assert torch.allclose(torch.tensor([a + b for a, b in parts]), torch.tensor(losses), rtol=1e-5)
    return Curve(losses, recorder.series("grad_norm"))


def one_process(training: Training) -> Curve:
    return curve(training, MegatronStrategy(), BATCH)


def curves(runs: Sequence[Run]) -> list[Curve]:
    """Train once for each run, in a worker."""
    return [curve(run.training, run.strategy(), BATCH // run.dp) for run in runs]


@cache
def _expected(ranks: Callable[..., list[Any]], training: Training) -> Curve:
    (found,) = ranks(1, one_process, training)
    assert min(found.norms) > 1.0, "clipping is meant to happen"
    return found  # type: ignore[no-any-return]


BEFORE, UNTIED = Training("before"), Training(tied=False)
FEW = [run(2, sequence_parallel=True), run(1, 2, 1, 1, 4), run(1, 1, 1, 2, distributed_optimizer=True)]
GRID = [
    run(1, 1, 1, 1, 4),
    run(1, 1, 1, 1, 2, recompute="full"),
    run(1, training=BEFORE, recompute="selective"),
    run(2),
    run(2, 1, 1, 1, 2),
    run(2, sequence_parallel=True, recompute="full"),
    run(2, sequence_parallel=True, recompute="selective"),
    run(2, sequence_parallel=True, training=BEFORE),
    run(2, sequence_parallel=True, training=UNTIED),
    run(4),
    run(4, sequence_parallel=True),
    run(1, 1, 1, 2),
    run(1, 1, 1, 4, 2, distributed_optimizer=True),
    run(2, 1, 1, 2, sequence_parallel=True, distributed_optimizer=True),
    run(1, 2, 1, 1, 4, training=UNTIED),
    run(1, 2, 1, 1, 4, training=BEFORE, recompute="full"),
    run(1, 2, 1, 1, 4, pipeline_schedule="gpipe"),
    run(1, 2, 1, 1, 4, pipeline_schedule="zero-bubble"),
    run(1, 2, 1, 1, 4, pipeline_schedule="interleaved", vpp=2),
    run(1, 4, 1, 1, 4),
    run(2, 2, 1, 1, 4, sequence_parallel=True),
    run(2, 2, 1, 1, 4, sequence_parallel=True, pipeline_schedule="interleaved", vpp=2, training=UNTIED),
    run(1, 2, 1, 2, 4, distributed_optimizer=True),
    run(1, 1, 2),
    run(1, 1, 2, cp_comm_type="a2a"),
    run(1, 1, 2, cp_comm_type="all_gather"),
    run(1, 1, 2, 1, 2, training=BEFORE, cp_comm_type="a2a"),
    run(2, 1, 2, sequence_parallel=True),
    run(2, 1, 2, sequence_parallel=True, cp_comm_type="all_gather"),
    run(1, 2, 2, 1, 4),
    run(1, 1, 2, 2, distributed_optimizer=True, recompute="full", cp_comm_type="a2a"),
]


@pytest.mark.slow
def test_there_are_as_many_layouts_as_docs_say() -> None:
    (told,) = re.findall(r"BERT in (\d+) layouts", (Path(__file__).parents[3] / "docs" / "evidence.yaml").read_text())
    assert len({str(each) for each in (*FEW, *GRID)}) == int(told)


@pytest.mark.slow
def test_some_layouts_equal_one_process(
    ranks: Callable[..., list[Any]], record_property: Callable[[str, Any], None]
) -> None:
    check_runs(ranks, curves, FEW, lambda run: _expected(ranks, run.training), BOUND, record_property)


@pytest.mark.exhaustive
def test_all_layouts_equal_one_process(
    ranks: Callable[..., list[Any]], record_property: Callable[[str, Any], None]
) -> None:
    check_runs(ranks, curves, GRID, lambda run: _expected(ranks, run.training), BOUND, record_property)
