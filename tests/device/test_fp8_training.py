"""Training in fp8 on simulated HPUs: a compiled block, whatever the layout, does what it does uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from habana_frameworks.torch.utils.internal import is_lazy
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader
from tracing import compiled

from lightning_megatron import LlamaModule, MegatronHPUStrategy
from lightning_megatron.ops.fp8 import Fp8Recipe
from lightning_megatron.testing import hpu
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

pytestmark = pytest.mark.skipif(is_lazy(), reason="nothing is compiled in the lazy mode")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"micro_batch_size": 2}),
    "bf16": (1, {"precision": "bf16-mixed"}),
    "all recomputed": (1, {"recompute": "full"}),
    "mlp recomputed": (1, {"recompute": ["mlp"]}),
    "sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "zero-bubble": (2, {"pp": 2, "pipeline_schedule": "zero-bubble", "micro_batch_size": 2}),
}
WHOLE = ("one rank", "bf16", "all recomputed")
"""Compiled blocks, each one graph."""


def train(tokens: int, precision: Any = "32-true", **options: Any) -> tuple[list[float], int]:
    """Losses and gradient norms of four steps, and how many products were made in fp8."""
    seed_everything(5, verbose=False)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "ffn_hidden_size": 64}
    module = LlamaModule("llama-tiny", lr=1e-3, vocab_multiple=4, **sizes)
    rows = torch.randint(61, (16, tokens + 1), generator=torch.Generator().manual_seed(3))
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    recipe, recorder = Fp8Recipe(first_layers=0, last_layers=0), Recorder()
    strategy = MegatronHPUStrategy(ops="linear_fp8=require", fp8=recipe, **options)
    trainer = quiet_trainer(
        strategy, accelerator="hpu", precision=precision, max_epochs=1, gradient_clip_val=1.0, logger=recorder
    )
    hpu.reset_calls()
    trainer.fit(module, DataLoader(samples, batch_size=4))  # type: ignore[arg-type]
    return recorder.series("train_loss") + recorder.series("grad_norm"), hpu.calls()["hpu::fp8_gemm_v2"]


def both(tokens: int, options: dict[str, Any]) -> tuple[Any, Any, int, list[str]]:
    return train(tokens, **options), *compiled(train, tokens, **options, compile="aot_eager")


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_compiled_fp8_trains_alike(ranks: Callable[..., list[Any]], name: str) -> None:
    world, options = LAYOUTS[name]
    for plain, traced, graphs, breaks in ranks(world, both, 16, options):
        assert len(plain[0]) == 8
        assert plain[1] > 0
        assert traced[0] == pytest.approx(plain[0], rel=1e-5)
        assert traced[1] == plain[1]
        assert graphs >= 1
        assert name not in WHOLE or not breaks


def test_micro_batches_that_do_not_fit_are_compiled_too(ranks: Callable[..., list[Any]]) -> None:
    ((plain, traced, *_),) = ranks(1, both, 13, {"micro_batch_size": 1})
    assert plain[1] == traced[1] == 0
    assert traced[0] == pytest.approx(plain[0], rel=1e-5)
