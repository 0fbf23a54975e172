"""BLOOM's recipe and other numbers of heads against one process: loss and gradient norm over ten steps.

``test_parity_families.py`` has BLOOM in all layouts. A slope of another rank's head, or a distance counted from the
beginning of a chunk, shows as 1e-3 and more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from parity import Curve, check_runs
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import BloomModule, MegatronStrategy
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

BOUND = 1e-5
STEPS, BATCH, LENGTH, VOCABULARY, SEED = 10, 8, 16, 61, 5
Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Run:
    """A model of that preset, and a layout to train it on."""

    layout: Options
    preset: str = "bloom-tiny"
    heads: int = 8
    micro_batch: int = 4

    @property
    def dp(self) -> int:
        return int(dict(self.layout).get("dp", 1))

    @property
    def world_size(self) -> int:
        sizes = dict(self.layout)
        return self.dp * int(sizes.get("tp", 1)) * int(sizes.get("pp", 1)) * int(sizes.get("cp", 1))

    def module(self) -> BloomModule:
        # Large weights, so that gradients are above the clipping norm; a large epsilon, so that Adam makes no whole
        # steps of gradients that are rounding alone.
        sizes: dict[str, Any] = {"num_layers": 4, "hidden_size": 8 * self.heads, "num_attention_heads": self.heads}
        sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "vocab_multiple": 4, "init_std": 0.1}
        return BloomModule(self.preset, lr=1e-3, eps=1e-5, **sizes)

    def strategy(self) -> MegatronStrategy:
        given = {name: value for name, value in self.layout if name != "dp"}
        return MegatronStrategy(micro_batch_size=self.micro_batch, bucket_size=5000, **given)

    def __str__(self) -> str:
        return f"{self.preset} {self.heads} heads {dict(self.layout)}"


def run(preset: str = "bloom-tiny", heads: int = 8, micro_batch: int = 2, **layout: Any) -> Run:
    return Run(tuple(layout.items()), preset, heads, micro_batch)


def samples() -> list[dict[str, Tensor]]:
    tokens = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def curve(run: Run, strategy: MegatronStrategy, dp: int) -> Curve:
    seed_everything(SEED, verbose=False)
    recorder = Recorder()
    trainer = quiet_trainer(strategy, max_epochs=1, gradient_clip_val=1.0, logger=recorder)
    trainer.fit(run.module(), DataLoader(samples(), batch_size=BATCH // dp, shuffle=True))  # type: ignore[arg-type]
    return Curve(recorder.series("train_loss"), recorder.series("grad_norm"))


def one_process(run: Run) -> Curve:
    return curve(run, MegatronStrategy(), 1)


def curves(runs: Sequence[Run]) -> list[Curve]:
    """Train once for each run, in a worker."""
    return [curve(run, run.strategy(), run.dp) for run in runs]


@cache
def _expected(ranks: Callable[..., list[Any]], model: Run) -> Curve:
    (found,) = ranks(1, one_process, model)
    assert max(found.norms) > 1.0, "clipping is meant to happen"
    return found  # type: ignore[no-any-return]


def check(ranks: Callable[..., list[Any]], runs: Sequence[Run], record: Callable[[str, Any], None]) -> None:
    check_runs(ranks, curves, runs, lambda r: _expected(ranks, run(r.preset, r.heads)), BOUND, record)


OTHERS = [
    run(heads=6, tp=2),
    run(heads=6, cp=2, cp_comm_type="a2a"),
    run(heads=12, tp=2, cp=2, cp_comm_type="a2a", recompute="full"),
    run(heads=12, tp=2, cp=2, cp_comm_type="all_gather"),
    run(heads=6, pp=2, cp=2, cp_comm_type="p2p"),
    run("bloom-13b", tp=2),
    run("bloom-13b", tp=2, pp=2),
]


@pytest.mark.exhaustive
def test_heads_that_are_no_power_of_two_and_tr1_train_like_one_process(
    ranks: Callable[..., list[Any]], record_property: Any
) -> None:
    check(ranks, OTHERS, record_property)


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["bloom-13b", "bloom-tiny"])
def test_eight_processes_as_in_the_recipe_train_like_one(
    ranks: Callable[..., list[Any]], record_property: Any, preset: str
) -> None:
    """The layout of the recipe bloom-13b."""
    check(ranks, [run(preset, pp=2, tp=4, micro_batch=1)], record_property)
