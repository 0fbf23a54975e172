"""The functions of a training step are called in the order of docs/walks.md."""

from __future__ import annotations

from functools import partial
from pathlib import PurePosixPath

import torch
from tiny import tiny_llama
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer
from tests.walks import first_calls, steps_of, text_of


def test_a_training_step_takes_the_walk_of_the_page() -> None:
    walk = steps_of("A training step")
    batches = DataLoader([{"tokens": torch.arange(8), "labels": torch.arange(8)}], 1)
    trainer = quiet_trainer(MegatronStrategy(), max_steps=1, gradient_clip_val=1.0)
    calls, folders = first_calls(walk, partial(trainer.fit, LlamaModule(tiny_llama()), batches))
    assert calls == walk
    listed = {PurePosixPath(step.module).parent.as_posix() for step in walk}
    others = folders - listed - {".", "testing"}
    assert [folder for folder in others if f"`{folder}/`" not in text_of("A training step")] == []
