"""Rehearsals in which equal calls run once, against rehearsals that run each of them: every figure is the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_megatron.config.layout import BatchShape
from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.tools.rehearsal.known_calls import CallsOfRank, KnownCalls
from lightning_megatron.tools.rehearsal.rehearse import rehearse
from lightning_megatron.tools.rehearsal.result import Rehearsal
from lightning_megatron.tools.rehearsal.tracker import StorageTracker
from lightning_megatron.tools.rehearsal.values import KnownValues

SHAPE = BatchShape(4, 2, 512)  # several blocks of attention
OFTEN = {"gpt-oss-tiny"}
JOBS: dict[str, dict[str, Any]] = {
    "gpt-oss-tiny": {"ep": 2, "recompute": "full"},  # windows, sinks, experts with biases
    "llama-tiny": {"tp": 2, "pp": 2},
    "mistral-tiny": {"tp": 2},
    "gemma2-tiny": {"pp": 2},
    "gemma3-tiny": {"cp": 2},
    "deepseek-v3-tiny": {"ep": 2, "recompute": "full"},
    "mixtral-tiny": {"ep": 2, "etp": 2, "tp": 2},
    "qwen3-moe-tiny": {"ep": 2, "pp": 2, "pipeline_schedule": "zero-bubble"},
    "bloom-tiny": {"tp": 2, "recompute": "selective"},
}


class CountedCalls(CallsOfRank):
    """Calls of one rank, each of which runs."""

    calls = 0

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        self.calls += 1
        return function(*args, **kwargs)


class EveryCall(KnownCalls):
    """Calls of which none is known, and their number."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks: list[CountedCalls] = []

    @property
    def calls(self) -> int:
        return sum(rank.calls for rank in self._ranks)

    def of(self, tracker: StorageTracker, values: KnownValues) -> CallsOfRank:
        self._ranks.append(CountedCalls({}, tracker, values))
        return self._ranks[-1]


def rehearsed(preset: str, calls: KnownCalls, rank: int) -> Rehearsal:
    strategy = MegatronStrategy(micro_batch_size=2, **JOBS[preset])
    trainer = Trainer(
        accelerator="cpu",
        devices=math.prod(JOBS[preset].get(name, 1) for name in ("tp", "pp", "cp")) * 2,
        strategy=strategy,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rank %= strategy.num_processes
    return rehearse(trainer, GPTModule(preset, num_layers=4, vocab_size=1024), SHAPE, rank=rank, calls=calls)


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.exhaustive) for name in JOBS]
)
def test_calls_that_are_known_change_no_figure(preset: str) -> None:
    known, every = KnownCalls(), EveryCall()
    ranks = (0, -1) if "pp" in JOBS[preset] else (0,)  # the first and the last stage of a pipeline
    for rank in ranks:
        assert rehearsed(preset, known, rank) == rehearsed(preset, every, rank)
    assert len(known) * 4 < every.calls
