"""Every pipeline against one process: loss and gradient norm over ten steps, and what evaluation returns.

Micro-batches are added up where one process takes a mean over the whole batch, so what differs is rounding, which AdamW
amplifies. A stage that is skipped, a gradient that is added twice or a tied copy that drifts shows as 1e-3 and more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from parity import Curve, check_runs
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

BOUND = 1e-5
# Adam makes whole steps of gradients that are rounding alone, such as those of a key's bias. With its own epsilon of
# 1e-8 a curve deviates by up to 1.3e-5 on some processors, with this one by 2e-7.
ADAM_EPSILON = 1e-5
STEPS, LENGTH, VOCABULARY, SEED = 10, 12, 61, 5
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


class Steady(GPTModule):
    """A language model whose steps do not hang on the rounding of gradients near zero."""

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        for group in found.param_groups:
            group["eps"] = ADAM_EPSILON
        return found


@dataclass(frozen=True)
class Training:
    """Training run that must give the same numbers on every layout."""

    family: str = "gpt"
    tied: bool = True
    layers: int = 8
    batch: int = 8
    accumulate: int = 1

    def module(self) -> GPTModule:
        # Large weights, so that gradients are above the clipping norm.
        sizes: dict[str, Any] = {"num_layers": self.layers, "hidden_size": 32, "num_attention_heads": 4}
        sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "vocab_multiple": 4, "init_std": 0.1}
        sizes |= {"num_query_groups": 2, "head_dim": 8, "ffn_hidden_size": 48} if self.family == "llama" else {}
        return Steady(f"{self.family}-tiny", lr=1e-3, tie_embeddings=self.tied, **sizes)


@dataclass(frozen=True)
class Run:
    """A layout to train it on."""

    pp: int
    schedule: str
    tp: int = 1
    dp: int = 1
    micro_batches: int = 4
    vpp: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    training: Training = field(default=Training())

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def batch_size(self) -> int:
        """Of one replica's DataLoader."""
        return self.training.batch // self.dp // self.training.accumulate

    def strategy(self) -> MegatronStrategy:
        return MegatronStrategy(
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            pipeline_schedule=self.schedule,  # type: ignore[arg-type]
            micro_batch_size=self.batch_size // self.micro_batches,
            bucket_size=5000,
            **dict(self.options),
        )

    def __str__(self) -> str:
        given = [f"{name}={value}" for name, value in self.options]
        sizes = f"tp{self.tp} pp{self.pp} vpp{self.vpp} dp{self.dp} m{self.micro_batches}"
        return " ".join([f"{self.schedule} {sizes} {self.training}", *given])


def run(pp: int, schedule: str, **options: Any) -> Run:
    """A run, with two chunks a rank where the schedule interleaves."""
    return Run(pp, schedule, **{"vpp": 2 if schedule == "interleaved" else 1} | options)


def options(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


def samples(count: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def curve(training: Training, strategy: MegatronStrategy, batch_size: int) -> Curve:
    seed_everything(SEED, verbose=False)
    recorder = Recorder()
    trainer = quiet_trainer(
        strategy,
        max_epochs=1,
        gradient_clip_val=1.0,
        accumulate_grad_batches=training.accumulate,
        logger=recorder,
    )
    loader = DataLoader(samples(STEPS * training.batch), batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]
    trainer.fit(training.module(), loader)
    return Curve(recorder.series("train_loss"), recorder.series("grad_norm"))


def one_process(training: Training) -> Curve:
    return curve(training, MegatronStrategy(), training.batch // training.accumulate)


def curves(runs: Sequence[Run]) -> list[Curve]:
    """Train once for each run, in a worker."""
    return [curve(run.training, run.strategy(), run.batch_size) for run in runs]


@cache
def _expected(ranks: Callable[..., list[Any]], training: Training) -> Curve:
    (found,) = ranks(1, one_process, training)
    assert min(found.norms) > 1.0, "clipping is meant to happen"
    return found  # type: ignore[no-any-return]


def check(ranks: Callable[..., list[Any]], runs: Sequence[Run], record: Callable[[str, Any], None]) -> None:
    check_runs(ranks, curves, runs, lambda run: _expected(ranks, run.training), BOUND, record)


MODELS = [Training(family, tied) for family, tied in product(("gpt", "llama"), (True, False))]
GRID = [
    run(pp, schedule, tp=tp, micro_batches=m, training=training)
    for pp, schedule, tp, m, training in product((2, 4), SCHEDULES, (1, 2), (4, 8), MODELS)
]
# Every pair of values of two axes is met at least once by these.
COVERING = [
    run(pp, schedule, tp=tp, micro_batches=m, training=Training(family, tied))
    for pp, schedule, tp, m, family, tied in [
        (2, "gpipe", 1, 4, "gpt", True),
        (4, "gpipe", 2, 8, "llama", False),
        (2, "1f1b", 1, 4, "llama", False),
        (4, "1f1b", 2, 8, "gpt", True),
        (2, "interleaved", 1, 8, "gpt", False),
        (4, "interleaved", 2, 4, "llama", True),
        (2, "zero-bubble", 2, 4, "gpt", False),
        (4, "zero-bubble", 1, 8, "llama", True),
    ]
]
SEVEN, SIX = Training(layers=7), Training(layers=6)
UNEVEN = [
    run(4, "1f1b", options=options(first_stage_layers=1, last_stage_layers=1)),
    run(2, "1f1b", options=options(last_stage_layers=3), training=Training("llama", False)),
    run(4, "1f1b", options=options(count_embedding=True), training=SEVEN),
    run(4, "zero-bubble", options=options(count_embedding=True, count_loss=True), training=SIX),
    run(2, "interleaved", options=options(pipeline_layout="Ett|tttt|t|tL")),
    run(4, "gpipe", options=options(pipeline_layout="E|t*4|t*4|L")),
    run(2, "1f1b", options=options(pipeline_layout="balanced"), training=SEVEN),
]
# Groups of micro-batches that are no multiple of pp, and fewer micro-batches than ranks.
TEN, THREE = Training(batch=10), Training("llama", batch=3)
ODD = [
    run(4, "interleaved", micro_batches=10, training=TEN),
    run(4, "interleaved", micro_batches=5, training=TEN),
    run(2, "interleaved", micro_batches=5, training=TEN),
    run(4, "interleaved", micro_batches=3, training=THREE),
    run(2, "zero-bubble", vpp=2, micro_batches=5, training=TEN),
]
ACCUMULATING = Training(accumulate=2)
REPLICATED = [
    run(2, "1f1b", dp=2),
    run(2, "interleaved", dp=2, options=options(distributed_optimizer=False)),
    run(2, "zero-bubble", dp=2, micro_batches=2, training=ACCUMULATING),
    run(2, "1f1b", dp=2, micro_batches=2, training=ACCUMULATING, options=options(distributed_optimizer=False)),
    run(4, "interleaved", training=ACCUMULATING),
    run(2, "1f1b", dp=2, tp=2),
    run(2, "zero-bubble", dp=2, tp=2, training=Training("llama"), options=options(sequence_parallel=False)),
]
FLAT = options(sequence_parallel=False)
WITHOUT_SEQUENCE_PARALLEL = [
    run(2, "interleaved", tp=2, options=FLAT),
    run(2, "zero-bubble", tp=2, options=FLAT, training=Training("llama", False)),
    run(4, "1f1b", tp=2, options=FLAT, training=Training("gpt", False)),
]
QUICK = [*COVERING, UNEVEN[0], UNEVEN[4], ODD[0], *REPLICATED[:3]]
OF_TWO_STAGES = [each for each in COVERING if each.pp == 2]
"""Each schedule once."""


@pytest.mark.gate
def test_each_schedule_equals_one_process(ranks: Callable[..., list[Any]], record_property: Any) -> None:
    check(ranks, OF_TWO_STAGES, record_property)


@pytest.mark.slow
def test_covering_pipelines_equal_one_process(ranks: Callable[..., list[Any]], record_property: Any) -> None:
    check(ranks, [each for each in QUICK if each not in OF_TWO_STAGES], record_property)


# Half of the grid: every pipeline with two models that differ in family and in ties, another two for another number of
# micro-batches. All of it was run once, with Adam's own epsilon: nowhere was the deviation above 3e-6.
HALF = [r for r in GRID if (r.micro_batches == 4) == ((r.training.family == "gpt") == r.training.tied)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("pp", "schedule"), list(product((2, 4), SCHEDULES)))
def test_half_of_all_pipelines_equal_one_process(
    ranks: Callable[..., list[Any]], record_property: Any, pp: int, schedule: str
) -> None:
    check(ranks, [r for r in HALF if (r.pp, r.schedule) == (pp, schedule) and r not in COVERING], record_property)


@pytest.mark.exhaustive
@pytest.mark.parametrize("runs", [UNEVEN, ODD, REPLICATED, WITHOUT_SEQUENCE_PARALLEL])
def test_other_splits_and_replicas_equal_one_process(
    ranks: Callable[..., list[Any]], record_property: Any, runs: list[Run]
) -> None:
    check(ranks, [r for r in runs if r not in QUICK], record_property)


def test_the_covering_pipelines_meet_every_pair_of_values() -> None:
    def pairs(runs: Sequence[Run]) -> set[Any]:
        axes = ("pp", "schedule", "tp", "micro_batches", "family", "tied")
        points = [[(axis, getattr(r, axis, None) or getattr(r.training, axis, None)) for axis in axes] for r in runs]
        return {(a, b) for point in points for a, b in product(point, point) if a[0] < b[0]}

    assert len(GRID) == 128
    assert set(COVERING) <= set(GRID)
    assert pairs(COVERING) == pairs(GRID)


# Evaluation


def evaluation(strategy: MegatronStrategy, batch_size: int) -> dict[str, Any]:
    """Everything that evaluation gives, before and after a little training; eleven samples: the last batch is short."""
    seed_everything(SEED, verbose=False)
    module = Training("llama", tied=True).module()
    loader = DataLoader(samples(11), batch_size=batch_size)  # type: ignore[arg-type]
    trainer = quiet_trainer(strategy, max_steps=3, use_distributed_sampler=False)
    before = trainer.validate(module, loader, verbose=False)
    trainer.fit(module, DataLoader(samples(24), batch_size=8), loader)  # type: ignore[arg-type]
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tested = trainer.test(module, loader, verbose=False)
    predicted = trainer.predict(module, loader)
    assert predicted is not None
    return {"before": before, "fitted": fitted, "tested": tested, "predicted": [p.clone() for p in predicted]}


EVALUATIONS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2, "pipeline_schedule": "interleaved"},
    "pp4 vpp2 zero-bubble": {"pp": 4, "vpp": 2, "pipeline_schedule": "zero-bubble"},
    "pp2 tp2": {"pp": 2, "tp": 2},
}


def evaluations(names: Sequence[str]) -> list[dict[str, Any]]:
    """Micro-batches of two of batches of four: the last batch, of three, ends in a micro-batch of one."""
    return [evaluation(MegatronStrategy(micro_batch_size=2, **EVALUATIONS[name]), 4) for name in names]


def evaluation_alone() -> dict[str, Any]:
    return evaluation(MegatronStrategy(), 4)


@pytest.mark.slow
def test_evaluation_returns_on_every_rank_what_one_process_does(ranks: Callable[..., list[Any]]) -> None:
    (expected,) = ranks(1, evaluation_alone)
    assert [len(p) for p in expected["predicted"]] == [4, 4, 3]
    for size in (2, 4):
        names = [name for name, given in EVALUATIONS.items() if given["pp"] * given.get("tp", 1) == size]
        for found in ranks(size, evaluations, names):
            for name, mine in zip(names, found, strict=True):
                torch.testing.assert_close(mine, expected, rtol=BOUND, atol=BOUND, msg=lambda m, n=name: f"{n}: {m}")
