"""Collectives and messages of one training step, by axis and kind: a new one in a layout shows here, on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from tiny import tiny_llama
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.testing.traffic import Traffic, TrafficLog
from lightning_megatron.testing.trainer import quiet_trainer

Ranks = Callable[..., list[Any]]
STEPS, BATCH, LENGTH = 8, 4, 16
EACH_STEP = {
    Traffic("world", "all_reduce"): 2,  # the norm of the gradient, and one flag for NaN and infinity
    Traffic("host", "all_reduce"): 1,  # signals to stop, under way during the step
}
# Random generators, which ranks that share a replica compare before the step.
DRAWS = {Traffic("host", "all_reduce"): 2}
BUCKETS = {Traffic("dp_cp", "reduce_scatter"): 2, Traffic("dp_cp", "all_gather"): 2}  # with and without weight decay
LAYERS, MICRO_BATCHES = 2, 2
TOKENS = torch.arange(STEPS * 2 * BATCH * LENGTH).view(-1, LENGTH) % 40

SEQUENCE_PARALLEL = {
    # Two column-parallel layers gather their input, in backward once more for their weights, and head and loss once;
    # two row-parallel ones gather the gradient of their output, and so does the embedding.
    Traffic("tp", "all_gather"): MICRO_BATCHES * (LAYERS * 6 + 3),
    # The reverse of each, but of what is gathered again.
    Traffic("tp", "reduce_scatter"): MICRO_BATCHES * (LAYERS * 4 + 2),
    Traffic("tp", "all_reduce"): 1,  # gradients of norms, in one message
}
RING = BUCKETS | {
    Traffic("cp", "send"): MICRO_BATCHES * LAYERS * 3,  # in backward the gradients go round as well
    Traffic("cp", "receive"): MICRO_BATCHES * LAYERS * 3,
    Traffic("cp", "all_reduce"): MICRO_BATCHES * 2,
}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[Traffic, int]]] = {
    "dp2": (
        {},
        # Beside it the logged loss, and faults of data, which a replica alone finds.
        BUCKETS | {Traffic("dp", "all_reduce"): 1, Traffic("host", "all_reduce"): 2},
    ),
    "tp2": ({"tp": 2}, SEQUENCE_PARALLEL),
    "tp2, whole sequences": (
        {"tp": 2, "sequence_parallel": False},
        {Traffic("tp", "all_reduce"): MICRO_BATCHES * (LAYERS * 4 + 2), Traffic("tp", "all_gather"): MICRO_BATCHES},
    ),
    "pp2": (
        {"pp": 2},
        {
            Traffic("pp", "send"): MICRO_BATCHES,
            Traffic("pp", "receive"): MICRO_BATCHES,
            Traffic("pp", "broadcast"): 1,  # loss and logs of the last stage
        },
    ),
    "cp2, a ring": ({"cp": 2, "cp_comm_type": "p2p"}, RING),
    # Attention on a ring computes its weights again by itself: it does not go round once more.
    "cp2, a ring, recomputed": ({"cp": 2, "cp_comm_type": "p2p", "recompute": "selective"}, RING),
    "cp2, all-to-all": (
        {"cp": 2, "cp_comm_type": "a2a"},
        {
            Traffic("cp", "all_to_all"): MICRO_BATCHES * LAYERS * 4,
            Traffic("cp", "all_reduce"): MICRO_BATCHES * 2,
        }
        | BUCKETS,
    ),
}


class Count(L.Callback):
    """Traffic of the last step but one, without what an end of training adds."""

    def __init__(self) -> None:
        self.found: dict[Traffic, int] = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        amounts = strategy.recorder.main.take(strategy.mesh)
        if batch_idx == STEPS - 1:
            self.found = {traffic: amount.number for traffic, amount in amounts.items()}


def _traffic(options: dict[str, Any], micro_batch_size: int) -> dict[Traffic, int]:
    strategy = MegatronStrategy(micro_batch_size=micro_batch_size, **options)
    strategy.recorder.main = TrafficLog(strategy.recorder)
    count = Count()
    trainer = quiet_trainer(strategy, max_steps=STEPS, gradient_clip_val=1.0, callbacks=[count])
    rows = [{"tokens": tokens, "labels": tokens} for tokens in TOKENS]
    trainer.fit(LlamaModule(tiny_llama(num_layers=LAYERS)), DataLoader(rows, batch_size=BATCH))  # type: ignore[arg-type]
    return count.found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_communicates_no_more_than_it_says_here(name: str, ranks: Ranks) -> None:
    """Small sums of a step are few; those of a layer are as many as its products need."""
    options, expected = LAYOUTS[name]
    for rank, found in enumerate(ranks(2, _traffic, options, BATCH // MICRO_BATCHES)):
        # The last stage tells the others whether logged names have changed.
        message = {Traffic("host", ("receive", "send")[rank]): 1} if name == "pp2" else {}
        assert found == EACH_STEP | (DRAWS if name != "dp2" else {}) | expected | message
