"""Collectives beside computation: no result is read before the wait for it, no input is changed before it is sent.

Losses and gradient norms are those of collectives that run at once, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from tests.families import TINY, TRAINED, our_config, tokens_of
from tests.late import late_collectives

STEPS, BATCH, LENGTH = 4, 4, 16
EXPERTS = ("mixtral", "gpt_oss", "deepseek_v3")
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "dp, not sharded": {"distributed_optimizer": False},
    "tp": {"tp": 2},
    "tp, no sp": {"tp": 2, "sequence_parallel": False},
    "tp, recompute": {"tp": 2, "recompute": "full"},
    "cp": {"cp": 2},
    "cp, all_gather": {"cp": 2, "cp_comm_type": "all_gather"},
    "cp, a2a": {"cp": 2, "cp_comm_type": "a2a"},
    "ep": {"ep": 2},
    "pp": {"pp": 2},
    "pp, zero-bubble": {"pp": 2, "pipeline_schedule": "zero-bubble"},
    "pp, interleaved": {"pp": 2, "vpp": 2, "pipeline_schedule": "interleaved"},
}


def curves(family: str, names: list[str]) -> list[tuple[list[float], list[float]]]:
    """For each layout the losses and norms with late collectives, and with others."""
    found = []
    tokens = tokens_of(STEPS * BATCH * 4, LENGTH + 1)
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    config = our_config(TINY[family], **TRAINED.get(family, {}))
    for name in names:
        pair = []
        for way in (late_collectives, nullcontext):
            seed_everything(3, verbose=False)
            recorder = Recorder()
            strategy = MegatronStrategy(micro_batch_size=2, bucket_size=2000, **LAYOUTS[name])
            trainer = quiet_trainer(strategy, max_steps=STEPS, logger=recorder, gradient_clip_val=0.5)
            with way():
                trainer.fit(GPTModule(config, lr=0.01), DataLoader(samples, batch_size=BATCH))  # type: ignore[arg-type]
            pair.append(recorder.series("train_loss") + recorder.series("grad_norm"))
        found.append((pair[0], pair[1]))
    return found


def check(ranks: Callable[..., list[Any]], size: int, family: str, names: list[str]) -> None:
    for of_rank in ranks(size, curves, family, names):
        for name, (late, at_once) in zip(names, of_rank, strict=True):
            assert len(late) == 2 * STEPS
            assert late == at_once, name


def layouts_of(family: str) -> list[str]:
    without = "tp, no sp" if family in EXPERTS else "ep"  # ranks of tp hold tokens of their own with experts
    return [name for name in LAYOUTS if name != without]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ["dp", "tp", "cp", "pp"]),
        pytest.param("mixtral", ["tp", "ep"], marks=pytest.mark.gate),
        ("mixtral", ["dp", "cp", "pp"]),
    ],
    ids=str,
)
def test_two_ranks(ranks: Callable[..., list[Any]], family: str, names: list[str]) -> None:
    check(ranks, 2, family, names)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", *EXPERTS])
def test_with_data_parallelism(ranks: Callable[..., list[Any]], family: str) -> None:
    check(ranks, 4, family, layouts_of(family))
