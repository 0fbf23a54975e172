"""Every family in layouts of all kinds against one process: loss and gradient norm over ten steps.

What differs is the order of fp32 sums, which AdamW amplifies. A gradient that is summed once too often (norms of heads,
which every tensor-parallel rank has whole), or a bias that is added on every rank, shows as 1e-3 and more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from lightning.pytorch import seed_everything
from parity import Curve, check_runs
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer
from tests.families import LAYOUTS, RECURRENT, TINY, TRAINED, WITH_EXPERTS, layouts_of, our_config, tokens_of
from tests.routing import NearestTie

pytest.importorskip("transformers")

BOUND = 1e-5
STEPS, BATCH, LENGTH, CLIP = 10, 8, 16, 0.5
SEEDS = {
    "mixtral": 15,
    "qwen3_moe": 18,
    "qwen3_next": 7,
    "gpt_oss": 9,
    "deepseek_v2": 28,
    "deepseek_v3": 3,
    "glm4_moe": 39,
}
"""Seeds with which no token comes near a tie between experts."""
NEAREST_TIE = 1e-4  # a hundred times what other layouts change in a router's logits
QUICK = ("tp2", "pp2", "cp2", "dp2 ep2")
OFTEN = ("bloom", "gemma3_text", "gpt_oss", "qwen3_moe", "qwen3_next", "deepseek_v3")
"""Families that together have all kinds of layers."""


@dataclass(frozen=True)
class Run:
    """A family in a layout."""

    family: str
    name: str

    @property
    def layout(self) -> dict[str, Any]:
        return (LAYOUTS | WITH_EXPERTS)[self.name]

    @property
    def dp(self) -> int:
        return self.layout.get("dp", 1)  # type: ignore[no-any-return]

    @property
    def world_size(self) -> int:
        sizes = [self.layout.get(axis, 1) for axis in ("tp", "pp", "cp")]
        return self.dp * sizes[0] * sizes[1] * sizes[2]

    def curve(self) -> Curve:
        options = {name: value for name, value in self.layout.items() if name != "dp"}
        return curve(self.family, MegatronStrategy(micro_batch_size=2, bucket_size=5000, **options), self.dp)

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"


def curve(family: str, strategy: MegatronStrategy, dp: int = 1, **options: Any) -> Curve:
    seed_everything(SEEDS.get(family, 5), verbose=False)
    tokens = tokens_of(STEPS * BATCH, LENGTH + 1, seed=3)
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    config = our_config(TINY[family], **TRAINED.get(family, {}))
    # eps is above the rounding of gradients that are 0: AdamW makes whole steps of those.
    module = GPTModule(config, lr=1e-3, eps=1e-6)
    recorder = Recorder()
    trainer = quiet_trainer(strategy, max_epochs=1, gradient_clip_val=CLIP, logger=recorder, **options)
    trainer.fit(module, DataLoader(samples, batch_size=BATCH // dp, shuffle=True))  # type: ignore[arg-type]
    return Curve(recorder.series("train_loss"), recorder.series("grad_norm"))


def one_process(family: str) -> Curve:
    tie = NearestTie()
    found = curve(family, MegatronStrategy(micro_batch_size=2), callbacks=[tie])
    # A sigmoid is nowhere steeper than a quarter.
    least = NEAREST_TIE / 4 if our_config(TINY[family]).moe_router_score == "sigmoid" else NEAREST_TIE
    tie.check(least, family)
    return found


def curves(runs: Sequence[Run]) -> list[Curve]:
    """Train once for each run, in a worker."""
    return [run.curve() for run in runs]


@cache
def _expected(ranks: Callable[..., list[Any]], family: str) -> Curve:
    (found,) = ranks(1, one_process, family)
    assert min(found.norms) > CLIP, "clipping is meant to happen"
    return found  # type: ignore[no-any-return]


def check(ranks: Callable[..., list[Any]], family: str, names: Sequence[str], record: Any) -> None:
    if our_config(TINY[family]).num_experts and kind_in_tests() is not CPU:
        pytest.skip("its seed keeps away from ties on CPUs; tests/device/test_families.py and test_parity_mixtral.py")
    runs = [Run(family, name) for name in names]
    check_runs(ranks, curves, runs, lambda run: _expected(ranks, run.family), BOUND, record)


def quick(family: str) -> list[str]:
    return [name for name in layouts_of(family) if name in QUICK]


def how_often(family: str) -> Any:
    """One test in the gate, and those families whose layers the others have too with the whole grid."""
    if family == "qwen3":
        return (pytest.mark.gate, pytest.mark.slow)
    return pytest.mark.slow if family in OFTEN else pytest.mark.exhaustive


def test_there_are_at_least_25_layouts() -> None:
    assert all(len(layouts_of(family)) >= 25 for family in TINY.keys() - RECURRENT)
    assert all(len(layouts_of(family)) >= 22 for family in RECURRENT), "those without context parallelism"


@pytest.mark.parametrize("family", [pytest.param(each, marks=how_often(each)) for each in TINY])
def test_some_layouts_equal_one_process(ranks: Callable[..., list[Any]], family: str, record_property: Any) -> None:
    check(ranks, family, quick(family), record_property)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", TINY)
def test_all_other_layouts_equal_one_process(
    ranks: Callable[..., list[Any]], family: str, record_property: Any
) -> None:
    check(ranks, family, [name for name in layouts_of(family) if name not in QUICK], record_property)
