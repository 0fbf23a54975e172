"""Every family on CUDA as on the CPU: plain, compiled, with packed documents, and with LoRA.

Needs a card: ``pytest -p lightning_megatron.testing.one_card --one-card tests/cuda``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, LoRA, MegatronStrategy
from lightning_megatron.testing import one_card
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from tests.families import TINY, TRAINED, our_config, tokens_of

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not one_card.enabled(), reason="needs a CUDA card and --one-card")

STEPS, BATCH, LENGTH = 6, 8, 16
SEEDS = {"mixtral": 15, "qwen3_moe": 18, "gpt_oss": 9, "deepseek_v2": 28, "deepseek_v3": 3, "glm4_moe": 39}
"""Seeds with which no token comes near a tie between experts."""
CLOSE = {"32-true": 2e-5, "bf16-mixed": 2e-2}
"""Largest relative difference from fp32 on the CPU: two runs in bf16 differ by the sum of both errors."""


def curve(
    family: str,
    accelerator: str,
    precision: str = "32-true",
    packed: bool = False,
    lora: LoRA | None = None,
    **options: Any,
) -> list[float]:
    """Loss and gradient norm of each step."""
    seed_everything(SEEDS.get(family, 5), verbose=False)
    tokens = tokens_of(STEPS * BATCH, LENGTH + 1, seed=3)
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    if packed:
        for index, sample in enumerate(samples):
            ends = torch.arange(LENGTH)
            sample["segment_ids"] = 1 + (ends > index % 7).long() + (ends > 9).long()
    config = our_config(TINY[family], **TRAINED.get(family, {}))
    module = GPTModule(config, lr=1e-3, eps=1e-6, lora=lora)
    recorder = Recorder()
    trainer = quiet_trainer(
        MegatronStrategy(micro_batch_size=2, **options),
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=recorder,
        precision=precision,
    )
    trainer.fit(module, DataLoader(samples, batch_size=BATCH))  # type: ignore[arg-type]
    assert trainer.strategy.root_device.type == accelerator
    losses = recorder.series("train_loss")
    assert len(losses) == STEPS
    return losses + recorder.series("grad_norm")


@pytest.mark.parametrize("precision", list(CLOSE))
@pytest.mark.parametrize("family", list(TINY))
def test_losses_and_norms_are_those_on_the_cpu(family: str, precision: str) -> None:
    found = curve(family, "cuda", precision)
    assert found == pytest.approx(curve(family, "cpu"), rel=CLOSE[precision])


@pytest.mark.parametrize("precision", list(CLOSE))
@pytest.mark.parametrize("family", list(TINY))
def test_packed_documents_are_those_of_the_cpu(family: str, precision: str) -> None:
    found = curve(family, "cuda", precision, packed=True)
    assert found == pytest.approx(curve(family, "cpu", packed=True), rel=CLOSE[precision])


@pytest.mark.parametrize("family", list(TINY))
def test_compiled_blocks_train_as_eager_ones(family: str) -> None:
    found = curve(family, "cuda", compile=True)
    assert found == pytest.approx(curve(family, "cuda"), rel=CLOSE["32-true"])


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2", "deepseek_v3"])
def test_adapters_train_as_on_the_cpu(family: str) -> None:
    found = curve(family, "cuda", lora=LoRA(rank=4, alpha=8))
    assert found == pytest.approx(curve(family, "cpu", lora=LoRA(rank=4, alpha=8)), rel=CLOSE["32-true"])
