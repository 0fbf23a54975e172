"""T5 on every kind of layout against one process: loss and gradient norm over ten steps.

The number of tokens to write is the same in all samples, so that the mean of the micro-batches is that of the batch.
Stages hold whole stacks, parts of one, or the end of the encoder and the beginning of the decoder.
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

from lightning_megatron import ConfigError, MegatronStrategy, T5Module
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

BOUND = 1e-5
ADAM_EPSILON = 1e-5  # steps of gradients that are rounding alone stay small, see test_parity_pipeline.py
STEPS, BATCH, LENGTH, DECODER_LENGTH, WRITTEN, VOCABULARY, SEED = 10, 8, 13, 7, 5, 61, 5


@dataclass(frozen=True)
class Training:
    """Training run that must give the same numbers on every layout."""

    gated: bool = False
    layers: int = 4
    decoder_layers: int = 2

    def module(self) -> T5Module:
        sizes: dict[str, Any] = {"num_layers": self.layers, "num_decoder_layers": self.decoder_layers}
        sizes |= {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 6, "ffn_hidden_size": 48}
        sizes |= {"vocab_size": VOCABULARY, "vocab_multiple": 4, "relative_buckets": 8, "relative_distance": 10}
        sizes |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        kind = {"activation": "geglu_tanh", "tie_embeddings": False} if self.gated else {}
        return T5Module("t5-tiny", lr=1e-3, eps=ADAM_EPSILON, **sizes | kind)


@dataclass(frozen=True)
class Run:
    """A layout to train it on."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batches: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    training: Training = field(default=Training())

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def strategy(self) -> MegatronStrategy:
        size = BATCH // self.dp // self.micro_batches
        sizes: dict[str, Any] = {"tp": self.tp, "pp": self.pp}
        return MegatronStrategy(**sizes, micro_batch_size=size, bucket_size=5000, **dict(self.options))

    def __str__(self) -> str:
        given = [f"{name}={value}" for name, value in self.options]
        return " ".join([f"tp{self.tp} pp{self.pp} dp{self.dp} m{self.micro_batches}", str(self.training), *given])


def run(*sizes: int, training: Training | None = None, **options: Any) -> Run:
    """A run with tp, pp, dp and micro-batches, and arguments of the strategy."""
    given = dict(zip(("tp", "pp", "dp", "micro_batches"), sizes, strict=False))
    return Run(**given, options=tuple(options.items()), training=training or Training())


def samples(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        decoder = torch.randint(VOCABULARY, (DECODER_LENGTH,), generator=generator)
        labels = torch.full((DECODER_LENGTH,), -100)
        labels[torch.randperm(DECODER_LENGTH, generator=generator)[:WRITTEN]] = torch.arange(WRITTEN) * 3
        mask = (torch.arange(LENGTH) < LENGTH - number % 5).long()
        found.append({"tokens": tokens, "padding_mask": mask, "decoder_tokens": decoder, "labels": labels})
    return found


def curve(training: Training, strategy: MegatronStrategy, batch_size: int) -> Curve:
    seed_everything(SEED, verbose=False)
    recorder = Recorder()
    trainer = quiet_trainer(strategy, max_epochs=1, gradient_clip_val=0.5, logger=recorder)
    loader = DataLoader(samples(STEPS * BATCH), batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]
    trainer.fit(training.module(), loader)
    return Curve(recorder.series("train_loss"), recorder.series("grad_norm"))


def one_process(training: Training) -> Curve:
    return curve(training, MegatronStrategy(), BATCH)


def curves(runs: Sequence[Run]) -> list[Curve]:
    """Train once for each run, in a worker."""
    return [curve(run.training, run.strategy(), BATCH // run.dp) for run in runs]


@cache
def _expected(ranks: Callable[..., list[Any]], training: Training) -> Curve:
    (found,) = ranks(1, one_process, training)
    assert min(found.norms) > 0.5, "clipping is meant to happen"
    return found  # type: ignore[no-any-return]


GATED, LONG, SHORT = Training(gated=True), Training(layers=6, decoder_layers=2), Training(layers=3, decoder_layers=1)
ZERO, PLAIN = {"distributed_optimizer": True}, {"distributed_optimizer": False}
FEW = [run(2), run(1, 2, 1, 4), run(2, 2, 1, 4, training=GATED)]
GRID = [
    run(1, 1, 1, 4),
    run(1, 1, 1, 2, recompute="full"),
    run(1, training=GATED, recompute="selective"),
    run(1, recompute=("attention", "mlp"), training=LONG),
    run(2, sequence_parallel=False),
    run(2, 1, 1, 2, training=GATED, sequence_parallel=False),
    run(2, recompute="full"),
    run(2, recompute="selective", training=GATED),
    run(2, sequence_parallel=False, recompute="full", recompute_shard_saved=True),
    run(2, training=SHORT),
    run(4),
    run(4, sequence_parallel=False),
    run(1, 1, 2, **ZERO),
    run(1, 1, 2, **PLAIN),
    run(1, 1, 4, 2, **ZERO),
    run(2, 1, 2, **ZERO),
    run(2, 1, 2, training=GATED, sequence_parallel=False, **PLAIN),
    run(1, 2, 1, 4, training=GATED),
    run(1, 2, 1, 4, training=LONG, recompute="full"),
    run(1, 2, 1, 4, pipeline_schedule="gpipe"),
    run(1, 2, 1, 4, pipeline_schedule="zero-bubble", training=GATED),
    run(1, 2, 1, 4, pipeline_schedule="interleaved", vpp=2),
    run(1, 2, 1, 4, pipeline_layout="Et|tttL"),
    run(1, 2, 1, 4, pipeline_layout="Ettt|tL", training=GATED),
    run(1, 2, 1, 2, first_stage_layers=2, training=SHORT),
    run(1, 3, 1, 4, training=LONG),
    run(1, 3, 1, 4, pipeline_layout="Ett|ttt|tL", training=LONG),
    run(1, 3, 1, 4, training=SHORT),
    run(1, 4, 1, 4),
    run(1, 4, 1, 4, training=LONG, pipeline_layout="Ett|t|tt|tL"),
    run(2, 2, 1, 4, recompute="full"),
    run(2, 2, 1, 4, pipeline_schedule="interleaved", vpp=2, training=GATED),
    run(1, 2, 2, 4, **ZERO),
    run(1, 2, 2, 2, training=GATED, **PLAIN),
]


@pytest.mark.slow
def test_there_are_as_many_layouts_as_docs_say() -> None:
    (told,) = re.findall(r"T5 in (\d+) layouts", (Path(__file__).parents[3] / "docs" / "evidence.yaml").read_text())
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


def faults(devices: int, training: Training | None = None, **options: Any) -> str:
    """Faults that the launcher tells before it spawns."""
    strategy = MegatronStrategy(**options)
    strategy.parallel_devices = [torch.device("cpu")] * devices
    with pytest.raises(ConfigError) as caught:
        strategy.check((training or Training()).module(), DataLoader(samples(4), batch_size=4))  # type: ignore[arg-type]
    return str(caught.value)


def test_layouts_that_cannot_be_are_refused_before_any_process_starts() -> None:
    assert "cp=2: T5's relative positions are added to the scores of whole sequences" in faults(2, cp=2)
    assert "ep=2: the model has no experts" in faults(2, ep=2)
    assert "tp=3" in faults(3, tp=3)
    assert "6 layers (num_layers) do not split over pp x vpp = 4 x 1 stages" in faults(4, LONG, pp=4)
    assert "the layout has 3 layers" in faults(2, pp=2, pipeline_layout="Et|ttL")
