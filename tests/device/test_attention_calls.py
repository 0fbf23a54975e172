"""Calls of FusedSDPA in a step: a kernel that computes its weights again is not run twice as well."""

from __future__ import annotations

from typing import Any

import pytest
import simulated_gaudi as hpu
import torch
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronHPUStrategy
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.encoders.t5.cross_attention import CrossAttention
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.registry import Ops
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

LAYERS, STEPS, MICRO_BATCHES = 2, 3, 2
FORWARDS = LAYERS * STEPS * MICRO_BATCHES
RECOMPUTING, KEEPING = "hpu::sdpa_recomp_fwd", "hpu::sdpa_fwd"


def train(**options: Any) -> tuple[list[float], dict[str, int]]:
    """Losses and gradient norms, and calls by name."""
    torch.manual_seed(5)
    sizes: dict[str, Any] = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61}
    module = LlamaModule("llama-tiny", lr=1e-3, vocab_multiple=4, **sizes)
    rows = torch.randint(61, (4 * STEPS, 17), generator=torch.Generator().manual_seed(3))
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    recorder = Recorder()
    strategy = MegatronHPUStrategy(micro_batch_size=4 // MICRO_BATCHES, **options)
    trainer = quiet_trainer(strategy, accelerator="hpu", max_epochs=1, gradient_clip_val=1.0, logger=recorder)
    hpu.reset_calls()
    trainer.fit(module, DataLoader(samples, batch_size=4))  # type: ignore[arg-type]
    return recorder.series("train_loss") + recorder.series("grad_norm"), dict(hpu.calls())


@pytest.mark.parametrize("ops", [None, "attention=fast_softmax"])
def test_selective_recomputation_leaves_a_recomputing_kernel_alone(ops: str | None) -> None:
    plain, calls = train(ops=ops)
    assert calls[RECOMPUTING] == FORWARDS
    selective, calls = train(ops=ops, recompute="selective")
    assert calls[RECOMPUTING] == FORWARDS
    assert selective == plain


def test_selective_recomputation_repeats_a_kernel_that_keeps_weights() -> None:
    selective, calls = train(ops="attention=no_recompute", recompute="selective")
    assert calls[KEEPING] == 2 * FORWARDS
    assert RECOMPUTING not in calls
    assert selective == pytest.approx(train()[0], rel=1e-5)


@pytest.mark.parametrize(("ops", "forwards"), [(None, 1), ("attention=no_recompute", 2)])
def test_of_a_decoder_on_an_encoder_too(ops: str | None, forwards: int) -> None:
    how: dict[str, Any] = {"sequence_parallel": False, "recompute": RecomputePlan("selective")}
    mesh = ParallelMesh.single(torch.device("hpu"))
    layer = CrossAttention(TransformerConfig(1, 32, 4, 61, 16), mesh, ops=Ops("hpu", ops), **how).to("hpu")
    x, memory = (torch.randn(length, 2, 32).to("hpu").requires_grad_() for length in (5, 7))
    hpu.reset_calls()
    layer(x, memory).sum().backward()
    calls = hpu.calls()
    assert calls[RECOMPUTING if ops is None else KEEPING] == forwards
