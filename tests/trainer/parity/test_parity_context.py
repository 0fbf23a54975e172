"""Context parallelism against one process: loss and gradient norm over ten steps, and what evaluation returns.

Losses are sums over ranks where one process has one, which AdamW amplifies as it does any rounding. A token that counts
twice, a wrong position or a gradient of the wrong scale shows as 1e-3 and more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from parity import Curve, check_runs
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_megatron import GPTModule, MegatronStrategy, Throughput
from lightning_megatron.config.layout import CP_COMM_TYPES
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from tests.routing import NearestTie

BOUND = 1e-5
STEPS, BATCH, LENGTH, VOCABULARY, SEED = 10, 4, 24, 61, 25
NEAREST_TIE = 5e-5  # other layouts change a router's logits by some 1e-6
Ranks = Callable[..., list[Any]]


@dataclass(frozen=True)
class Training:
    """Training run that must give the same numbers on every layout."""

    family: str = "gpt"
    length: int = LENGTH

    def module(self, kind: type[GPTModule] = GPTModule, **options: Any) -> GPTModule:
        # Large weights, so that gradients are above the clipping norm.
        sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "head_dim": 4}
        sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "vocab_multiple": 4, "init_std": 0.1}
        sizes |= {"num_query_groups": 2, "ffn_hidden_size": 48} if self.family != "gpt" else {}
        return kind(f"{self.family}-tiny", lr=1e-3, **sizes | options)

    def samples(self, count: int = STEPS * BATCH) -> list[dict[str, Tensor]]:
        """Some labels do not count, and not equally many on the ranks that hold them."""
        tokens = torch.randint(VOCABULARY, (count, self.length + 1), generator=torch.Generator().manual_seed(3))
        labels = tokens[:, 1:].clone()
        labels[::3, : self.length // 3] = -100
        return [{"tokens": row[:-1], "labels": y} for row, y in zip(tokens, labels, strict=True)]


@dataclass(frozen=True)
class Run:
    """A layout to train it on."""

    cp: int
    comm_type: str = "p2p"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batches: int = 1
    training: Training = field(default=Training())
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def batch_size(self) -> int:
        """Of one replica's DataLoader."""
        return BATCH // self.dp

    def strategy(self) -> MegatronStrategy:
        return MegatronStrategy(
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            cp_comm_type=self.comm_type,  # type: ignore[arg-type]
            micro_batch_size=self.batch_size // self.micro_batches,
            bucket_size=5000,
            **dict(self.options),
        )


def curve(training: Training, strategy: MegatronStrategy, batch_size: int, **options: Any) -> Curve:
    seed_everything(SEED, verbose=False)
    recorder = Recorder()
    trainer = quiet_trainer(strategy, max_epochs=1, gradient_clip_val=1.0, logger=recorder, **options)
    trainer.fit(training.module(), DataLoader(training.samples(), batch_size=batch_size, shuffle=True))  # type: ignore[arg-type]
    return Curve(recorder.series("train_loss"), recorder.series("grad_norm"))


def one_process(training: Training, batch_size: int, micro_batch_size: int) -> Curve:
    tie = NearestTie()
    found = curve(training, MegatronStrategy(micro_batch_size=micro_batch_size), batch_size, callbacks=[tie])
    tie.check(NEAREST_TIE, training.family)
    return found


def curves(runs: Sequence[Run]) -> list[Curve]:
    """Train once for each run, in a worker."""
    return [curve(run.training, run.strategy(), run.batch_size) for run in runs]


@cache
def _expected(ranks: Ranks, training: Training, micro_batch_size: int) -> Curve:
    (found,) = ranks(1, one_process, training, BATCH, micro_batch_size)
    assert min(found.norms) > 1.0, "clipping is meant to happen"
    return found  # type: ignore[no-any-return]


def check(ranks: Ranks, runs: Sequence[Run], record: Callable[[str, Any], None]) -> None:
    def expected(run: Run) -> Curve:
        # A batch's loss is the mean of its micro-batches' means, whose samples have unequal numbers of labels: the one
        # process cuts them alike (down to one sample where replicas pair them otherwise).
        return _expected(ranks, run.training, BATCH // run.dp // run.micro_batches)

    check_runs(ranks, curves, runs, expected, BOUND, record)


LLAMA, ODD, MIXTRAL = Training("llama"), Training("llama", length=21), Training("mixtral")
FLAT, EXPERTS = (("sequence_parallel", False),), (("ep", 2),)
# Every layout, way of communication and family is met at least once by these.
QUICK = [
    Run(2, "p2p"),
    Run(2, "a2a", training=LLAMA),
    Run(2, "all_gather", training=ODD),
    Run(2, "p2p", tp=2, training=LLAMA),
    Run(2, "a2a", pp=2, micro_batches=4),
    Run(2, "all_gather", dp=2, micro_batches=2, training=LLAMA),
    Run(4, "p2p", training=ODD),
    Run(2, "p2p", training=MIXTRAL, options=EXPERTS),
]
LAYOUTS: list[dict[str, Any]] = [
    {"cp": 2},
    {"cp": 4},
    {"cp": 2, "tp": 2},
    {"cp": 2, "tp": 2, "options": FLAT},
    {"cp": 2, "dp": 2, "micro_batches": 2},
    {"cp": 2, "dp": 2, "micro_batches": 2, "options": (("distributed_optimizer", False),)},
    {"cp": 2, "pp": 2, "micro_batches": 2},
    {"cp": 2, "pp": 2, "micro_batches": 4, "options": (("pipeline_schedule", "zero-bubble"),)},
    {"cp": 2, "options": (("recompute", "selective"),)},
    {"cp": 2, "tp": 2, "options": (("recompute", "full"),)},
]
GRID = [
    Run(comm_type=comm_type, training=training, **layout)
    for layout, comm_type, training in product(LAYOUTS, CP_COMM_TYPES, (Training(), LLAMA))
]
GRID += [
    Run(2, "p2p", training=MIXTRAL),
    Run(2, "a2a", tp=2, training=MIXTRAL, options=EXPERTS),
    Run(2, "all_gather", dp=2, micro_batches=2, training=MIXTRAL, options=EXPERTS),
]


@pytest.mark.gate
@pytest.mark.slow
def test_covering_layouts_equal_one_process(ranks: Ranks, record_property: Any) -> None:
    check(ranks, QUICK, record_property)


@pytest.mark.exhaustive
@pytest.mark.parametrize("comm_type", CP_COMM_TYPES)
def test_all_layouts_equal_one_process(ranks: Ranks, record_property: Any, comm_type: str) -> None:
    check(ranks, [run for run in GRID if run.comm_type == comm_type and run not in QUICK], record_property)


def bf16(strategy: dict[str, Any]) -> list[float]:
    seed_everything(SEED, verbose=False)
    recorder = Recorder()
    trainer = quiet_trainer(
        MegatronStrategy(**strategy), max_epochs=1, precision="bf16-mixed", gradient_clip_val=1.0, logger=recorder
    )
    trainer.fit(LLAMA.module(), DataLoader(LLAMA.samples(), batch_size=BATCH))  # type: ignore[arg-type]
    return recorder.series("train_loss")


@pytest.mark.parametrize("comm_type", CP_COMM_TYPES)
def test_bf16_differs_by_its_rounding(ranks: Ranks, comm_type: str) -> None:
    (expected,) = ranks(1, bf16, {})
    assert len(expected) == STEPS
    for found in ranks(2, bf16, {"cp": 2, "cp_comm_type": comm_type}):
        assert found == pytest.approx(expected, rel=2e-3)


# Everything around training


class Counting(GPTModule):
    """Counts tokens with a metric object and with a sum, and predicts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tokens = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.tokens(batch["tokens"].numel())
        self.log("tokens", self.tokens)
        self.log("samples", float(len(batch["tokens"])), reduce_fx="sum", sync_dist=True)


def evaluation(strategy: dict[str, Any], batch_size: int) -> dict[str, Any]:
    seed_everything(SEED, verbose=False)
    module = ODD.module(Counting)
    data = DataLoader(ODD.samples(8), batch_size=batch_size)  # type: ignore[arg-type]
    throughput = Throughput()
    trainer = quiet_trainer(MegatronStrategy(**strategy), max_epochs=1, callbacks=[throughput], logger=Recorder())
    trainer.fit(module, DataLoader(ODD.samples(12), batch_size=batch_size, shuffle=True), data)  # type: ignore[arg-type]
    timed = ("step_time", "per_second", "tok/s", "flops")
    metrics = {name: float(x) for name, x in trainer.callback_metrics.items() if not any(t in name for t in timed)}
    fitted = metrics | {"samples trained on": throughput.total.samples, "tokens trained on": throughput.total.tokens}
    predicted = trainer.predict(module, data)
    assert predicted is not None
    return {"fitted": fitted, "predicted": torch.cat(predicted)}  # type: ignore[arg-type]


EVALUATIONS: list[tuple[int, dict[str, Any], int]] = [
    (2, {"cp": 2}, 4),
    (4, {"cp": 2, "pp": 2, "cp_comm_type": "a2a"}, 4),
    (4, {"cp": 2, "cp_comm_type": "all_gather"}, 2),
]
"""World size, what the strategy is given, samples of one replica's batch."""


@pytest.mark.slow
def test_evaluation_returns_on_every_rank_what_one_process_does_and_counts_a_sample_once(ranks: Ranks) -> None:
    (expected,) = ranks(1, evaluation, {"micro_batch_size": 1}, 4)
    assert expected["fitted"]["tokens"] == 8 * ODD.length
    assert expected["fitted"]["samples"] == 8
    assert expected["fitted"]["tokens trained on"] == 12 * ODD.length
    assert expected["predicted"].shape == (8, ODD.length, VOCABULARY)
    for size, strategy, batch_size in EVALUATIONS:
        for rank, found in enumerate(ranks(size, evaluation, {"micro_batch_size": 1} | strategy, batch_size)):
            order = list(range(8))
            if batch_size == 2:  # each of two replicas predicts its own samples; cp is the faster axis
                order = order[rank // 2 :: 2]
            torch.testing.assert_close(found["fitted"], expected["fitted"], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found["predicted"], expected["predicted"][order], rtol=1e-5, atol=1e-5)


def train_and_save(strategy: dict[str, Any], folder: Path, resume: str | None, epochs: int) -> Curve:
    """Train to the end of an epoch of three steps, with a checkpoint there."""
    seed_everything(SEED, verbose=False)
    recorder = Recorder()
    trainer = quiet_trainer(
        MegatronStrategy(**strategy),
        max_epochs=epochs,
        gradient_clip_val=1.0,
        logger=recorder,
        callbacks=[ModelCheckpoint(folder, filename="end", enable_version_counter=False)],
        enable_checkpointing=True,
        use_distributed_sampler=False,
    )
    data = DataLoader(LLAMA.samples(3 * BATCH), batch_size=BATCH)  # type: ignore[arg-type]
    trainer.fit(LLAMA.module(), data, ckpt_path=resume)
    return Curve(recorder.series("train_loss"), recorder.series("grad_norm"))


def test_a_checkpoint_of_cp_2_continues_without_cp_and_the_other_way_round(ranks: Ranks, tmp_path: Path) -> None:
    (whole,) = ranks(1, train_and_save, {}, tmp_path / "whole", None, 2)
    for first, second in ((2, 1), (1, 2)):
        folder = tmp_path / f"from {first}"
        ranks(first, train_and_save, {"cp": first}, folder, None, 1)
        for rest in ranks(second, train_and_save, {"cp": second}, folder / "on", str(folder / "end.ckpt"), 2):
            assert rest.losses == pytest.approx(whole.losses[3:], rel=BOUND)
            assert rest.norms == pytest.approx(whole.norms[3:], rel=BOUND)


class Ordinary(LightningModule):
    pass


def test_a_module_that_does_not_split_sequences_is_refused() -> None:
    """Its attention would take whole sequences for shards."""
    strategy = MegatronStrategy(cp=2)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy.check(GPTModule("gpt-tiny"))
    with pytest.raises(ConfigError, match="cp=2: Ordinary does not say that each rank takes its part of a sequence"):
        strategy.check(Ordinary())


def refused(strategy: dict[str, Any], options: dict[str, Any]) -> list[str]:
    trainer = quiet_trainer(MegatronStrategy(**strategy))
    with pytest.raises(ConfigError) as caught:
        trainer.fit(LLAMA.module(**options), DataLoader(LLAMA.samples(4), batch_size=4))  # type: ignore[arg-type]
    return [str(problem) for problem in caught.value.problems]


def test_what_cannot_be_shared_is_refused_before_the_model_is_built(ranks: Ranks) -> None:
    dropout = "cp_comm_type='p2p': attention on a ring cannot drop weights (attention_dropout=0.1)"
    for found in ranks(2, refused, {"cp": 2}, {"attention_dropout": 0.1}):
        assert len(found) == 1
        assert found[0].startswith(dropout)
    heads = "cp=2: cp_comm_type='a2a' splits heads, and 3 a rank (3 over tp=1) do not divide; nearest valid: 1, 3"
    odd = {"num_attention_heads": 3, "num_query_groups": 3, "head_dim": 4}
    assert ranks(2, refused, {"cp": 2, "cp_comm_type": "a2a"}, odd) == [[heads]] * 2
    with pytest.raises(ConfigError, match="cp_comm_type='ring': unknown; nearest valid: p2p, all_gather, a2a"):
        MegatronStrategy(cp=2, cp_comm_type="ring")  # type: ignore[arg-type]
