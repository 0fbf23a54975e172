"""Recomputation under a Trainer: every loss and gradient norm bit for bit that of the same layout without it.

Dropout is on, so that a generator that is not rewound, or is rewound too far, shows at the next micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

STEPS, BATCH, LENGTH, VOCABULARY = 4, 8, 12, 61


@dataclass(frozen=True)
class Layout:
    """A layout to train on; ``world_size`` ranks."""

    world_size: int
    family: str
    options: dict[str, Any]

    @property
    def replicas(self) -> int:
        return self.world_size // self.options.get("tp", 1) // self.options.get("pp", 1)


LAYOUTS = {
    "one rank": Layout(1, "gpt", {"micro_batch_size": 8}),
    "one rank, micro-batches": Layout(1, "llama", {"micro_batch_size": 2}),
    "interleaved": Layout(2, "gpt", {"pp": 2, "vpp": 2, "pipeline_schedule": "interleaved", "micro_batch_size": 2}),
    "zero-bubble": Layout(2, "llama", {"pp": 2, "pipeline_schedule": "zero-bubble", "micro_batch_size": 2}),
    "zero-bubble, tp": Layout(4, "gpt", {"tp": 2, "pp": 2, "pipeline_schedule": "zero-bubble", "micro_batch_size": 4}),
    "1f1b, tp, flat": Layout(4, "llama", {"tp": 2, "pp": 2, "sequence_parallel": False, "micro_batch_size": 2}),
    "tp, dp": Layout(4, "gpt", {"tp": 2, "micro_batch_size": 2}),
}
FULL = {"recompute": "full"}
PAIRS = {**FULL, "recompute_num_layers": 2}
BLOCK = {**FULL, "recompute_method": "block"}
SELECTIVE = {"recompute": "selective"}
PARTS = {"recompute": ["attention", "mlp"]}
SHARES = {**PAIRS, "recompute_shard_saved": True}
WISHES: dict[str, list[dict[str, Any]]] = {
    "one rank": [FULL, SELECTIVE, PARTS],
    "one rank, micro-batches": [PAIRS, SELECTIVE],
    "interleaved": [FULL, BLOCK, SELECTIVE],
    "zero-bubble": [FULL, BLOCK, PARTS],
    "zero-bubble, tp": [FULL, PAIRS, SELECTIVE],
    "1f1b, tp, flat": [BLOCK, SHARES],
    "tp, dp": [FULL, PARTS],
}


def samples() -> list[dict[str, Tensor]]:
    tokens = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def train(layout: Layout, wish: dict[str, Any]) -> list[list[float]]:
    """Losses, norms and what evaluation says afterwards."""
    seed_everything(5, verbose=False)
    module = GPTModule(
        f"{layout.family}-tiny",
        lr=1e-3,
        num_layers=8,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        vocab_multiple=4,
        hidden_dropout=0.2,
        attention_dropout=0.1,
    )
    recorder = Recorder()
    trainer = quiet_trainer(
        MegatronStrategy(**layout.options, **wish), max_epochs=1, gradient_clip_val=1.0, logger=recorder
    )
    size = BATCH // layout.replicas
    held_out: Any = DataLoader(samples()[:BATCH], batch_size=size)  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(samples(), batch_size=size, shuffle=True), held_out)  # type: ignore[arg-type]
    return [recorder.series(name) for name in ("train_loss", "grad_norm", "val_loss")]


def differing(name: str) -> list[dict[str, Any]]:
    """Plans under which training is not exactly what it is without any."""
    layout = LAYOUTS[name]
    expected = train(layout, {})
    assert [len(series) for series in expected] == [STEPS, STEPS, 1]
    return [wish for wish in WISHES[name] if train(layout, wish) != expected]


def run(ranks: Any, names: Sequence[str]) -> None:
    for name in names:
        assert ranks(LAYOUTS[name].world_size, differing, name) == [[]] * LAYOUTS[name].world_size, name


def test_recomputation_changes_no_bit_of_training(ranks: Any) -> None:
    run(ranks, ["one rank"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved", pytest.param("zero-bubble", marks=pytest.mark.gate)])
def test_recomputation_changes_no_bit_of_training_in_pipelines(ranks: Any, name: str) -> None:
    run(ranks, [name])


@pytest.mark.exhaustive
def test_recomputation_changes_no_bit_of_training_on_more_layouts(ranks: Any) -> None:
    run(ranks, [name for name in LAYOUTS if name not in ("one rank", "interleaved", "zero-bubble")])
