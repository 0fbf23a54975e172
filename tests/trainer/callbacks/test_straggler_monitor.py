"""StragglerMonitor: ranks made slow in one way or the other are named within 20 steps, in several layouts."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron import ConfigError, GPTModule, MegatronStrategy
from lightning_megatron.data import MegatronSampler, ResumableDataLoader
from lightning_megatron.lightning.callbacks import StragglerMonitor
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from tests.tiny import tiny_llama

Ranks = Callable[..., list[Any]]

ONSET, STEPS = 24, 46
BATCH = 4


class Brake:
    """Seconds to sleep in each step."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def pause(self) -> float:
        self.moments.append(time.perf_counter())
        if len(self.moments) <= ONSET:
            return 0.0
        before = self.moments[:ONSET]
        return max(0.05, 4 * median(b - a for a, b in pairwise(before)))


class Slow(GPTModule):
    """One rank computes slowly from a step on: by four times what a step has taken before, on whatever machine."""

    brake: Brake | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.brake is not None:
            time.sleep(self.brake.pause())
        return super().training_step(batch, batch_idx)


class Texts(Dataset[dict[str, Tensor]]):
    """A data set that one rank reads slowly from a step on."""

    def __init__(self, slow: bool, batch_size: int) -> None:
        self.slow, self.batch_size, self.read = slow, batch_size, 0
        self.brake = Brake()
        self.tokens = torch.randint(40, (9,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.slow and self.read % self.batch_size == 0:
            time.sleep(self.brake.pause())
        self.read += 1
        return {"tokens": self.tokens[:-1], "labels": self.tokens[1:]}


def run(layout: dict[str, int], kind: str, slow_rank: int, steps: int = STEPS) -> dict[str, Any]:
    seed_everything(7, verbose=False)
    is_slow = dist.get_rank() == slow_rank
    monitor, recorder = StragglerMonitor(), Recorder()
    strategy = MegatronStrategy(**layout)
    trainer = quiet_trainer(strategy, max_steps=steps, callbacks=[monitor], logger=recorder)
    module = Slow(tiny_llama(), lr=1e-3)
    module.brake = Brake() if is_slow and kind == "compute" else None
    dp, rank = (1, 0) if layout else (2, dist.get_rank())
    size = BATCH // dp
    sampler = MegatronSampler(BATCH * STEPS, batch_size=size, dp_rank=rank, dp_size=dp)
    loader = ResumableDataLoader(Texts(is_slow and kind == "data", size), batch_sampler=sampler)
    named: list[tuple[int, str]] = []
    monitor._sentence = lambda found, inner=monitor._sentence: named.append((trainer.global_step, inner(found))) or ""  # type: ignore[method-assign, func-returns-value, assignment]
    profiler = trainer.profiler
    trainer.fit(module, loader)
    assert trainer.profiler is profiler
    assert strategy.mesh.recorder.main.clock is None
    return {"found": monitor.found, "named": named, "metrics": recorder.rows}


@pytest.mark.parametrize("kind", ["compute", "data"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {}], ids=["tp2", "pp2", "dp2"])
@pytest.mark.slow
def test_a_slow_rank_is_named_within_twenty_steps(ranks: Ranks, layout: dict[str, int], kind: str) -> None:
    slow_rank = 0 if layout.get("tp") else 1
    results = ranks(2, run, layout, kind, slow_rank)
    for result in results:
        assert [(found.rank, found.kind) for found in result["found"]] == [(slow_rank, kind)], result["found"]
    ((step, sentence),) = results[0]["named"]
    assert ONSET < step <= ONSET + 20
    word = {"compute": "computes slowly", "data": "waits for its data"}[kind]
    axis = next(iter(layout), "dp")
    assert sentence.startswith(f"rank {slow_rank} (")
    assert f", {axis} {slow_rank}) {word}: " in sentence
    excess = [row[f"straggler/{kind}_excess"] for row in results[0]["metrics"] if f"straggler/{kind}_excess" in row]
    assert excess[-1] > 0.2
    assert any("straggler/waiting" in row for row in results[0]["metrics"])
    assert all(row["straggler/slowest_rank"] in range(4) for row in results[0]["metrics"] if "straggler/waiting" in row)


def test_other_strategies_are_refused_and_one_rank_is_left_alone() -> None:
    trainer = quiet_trainer(MegatronStrategy(), max_steps=2, callbacks=[monitor := StragglerMonitor()])
    loader = ResumableDataLoader(Texts(False, 4), batch_sampler=MegatronSampler(16, batch_size=4))
    trainer.fit(Slow(tiny_llama()), loader)
    assert monitor.found == []
    with pytest.raises(ConfigError, match="compares ranks of MegatronStrategy"):
        quiet_trainer(devices=1, callbacks=[StragglerMonitor()]).fit(Slow(tiny_llama()), loader)
