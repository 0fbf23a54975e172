"""Training in fp8 on simulated HPUs: near bf16; a compiled block, whatever the layout, does what it does uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import simulated_gaudi as hpu
import torch
from habana_frameworks.torch.utils.internal import is_lazy
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader
from tracing import compiled

from lightning_megatron import LlamaModule, LoRA, MegatronHPUStrategy
from lightning_megatron.layers.fp8_linear import Fp8Gemms
from lightning_megatron.ops.fp8 import Fp8Recipe
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

compiles = pytest.mark.skipif(is_lazy(), reason="nothing is compiled in the lazy mode")

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
QUICK = ("one rank",)


def train(
    tokens: int, precision: Any = "32-true", lora: LoRA | None = None, fp8: bool = True, **options: Any
) -> tuple[list[float], int]:
    """Losses and gradient norms of four steps, and how many products were made in fp8."""
    seed_everything(5, verbose=False)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "ffn_hidden_size": 64}
    module = LlamaModule("llama-tiny", lr=1e-3, vocab_multiple=4, lora=lora, **sizes)
    rows = torch.randint(61, (16, tokens + 1), generator=torch.Generator().manual_seed(3))
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    recipe, recorder = Fp8Recipe(first_layers=0, last_layers=0), Recorder()
    how: dict[str, Any] = {"ops": "linear_fp8=require", "fp8": recipe} if fp8 else {}
    strategy = MegatronHPUStrategy(**how, **options)
    trainer = quiet_trainer(
        strategy, accelerator="hpu", precision=precision, max_epochs=1, gradient_clip_val=1.0, logger=recorder
    )
    hpu.reset_calls()
    trainer.fit(module, DataLoader(samples, batch_size=4))  # type: ignore[arg-type]
    return recorder.series("train_loss") + recorder.series("grad_norm"), hpu.calls()["hpu::fp8_gemm_v2"]


def both(tokens: int, options: dict[str, Any]) -> tuple[Any, Any, int, list[str]]:
    return train(tokens, **options), *compiled(train, tokens, **options, compile="aot_eager")


@compiles
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_compiled_fp8_trains_alike(ranks: Callable[..., list[Any]], name: str) -> None:
    world, options = LAYOUTS[name]
    for plain, traced, graphs, breaks in ranks(world, both, 16, options):
        assert len(plain[0]) == 8
        assert plain[1] > 0
        assert traced[0] == pytest.approx(plain[0], rel=1e-5)
        assert traced[1] == plain[1]
        assert graphs >= 1
        assert name not in WHOLE or not breaks


@compiles
def test_micro_batches_that_do_not_fit_are_compiled_too(ranks: Callable[..., list[Any]]) -> None:
    ((plain, traced, *_),) = ranks(1, both, 13, {"micro_batch_size": 1})
    assert plain[1] == traced[1] == 0
    assert traced[0] == pytest.approx(plain[0], rel=1e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_train_beside_weights_in_fp8(dora: bool) -> None:
    lora = LoRA(rank=4, dora=dora)
    (found, products), (plain, none) = train(16, "bf16-mixed", lora), train(16, "bf16-mixed", lora, fp8=False)
    assert products > none == 0
    assert found[:4] == pytest.approx(plain[:4], rel=2e-3)
    assert found != plain


class Writes(LlamaModule):
    """Writes weights without a trace after each batch, of which two make a step."""

    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.parameters():
            p.data.mul_(0.98)


def written(keep_weights: bool) -> tuple[list[float], int]:
    """Losses, and the number of casts of weights to both formats or of all casts."""
    seed_everything(5, verbose=False)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "ffn_hidden_size": 64}
    rows = torch.randint(61, (40, 17), generator=torch.Generator().manual_seed(3))
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    options = {"first_layers": 0, "last_layers": 0, "stochastic_rounding": False, "keep_weights": keep_weights}
    recorder = Recorder()
    strategy = MegatronHPUStrategy(ops="linear_fp8=require", fp8=Fp8Recipe(**options), micro_batch_size=2)
    trainer = quiet_trainer(
        strategy, accelerator="hpu", max_epochs=1, accumulate_grad_batches=2, logger=recorder, precision="bf16-mixed"
    )
    hpu.reset_calls()
    module = Writes("llama-tiny", lr=1e-3, vocab_multiple=4, **sizes)
    trainer.fit(module, DataLoader(samples, batch_size=4))  # type: ignore[arg-type]
    assert all(gemms.kept_weight is None for gemms in module.modules() if isinstance(gemms, Fp8Gemms))
    return recorder.series("train_loss"), hpu.calls()["hpu::cast_to_fp8_v2"] + hpu.calls()["hpu::cast_to_fp8_hybrid"]


def test_weights_that_are_written_in_mid_step_are_cast_again() -> None:
    (kept, casts), (anew, more) = written(True), written(False)
    assert kept == anew
    assert casts < more


STEPS, VOCABULARY = 200, 61


def losses(ops: str) -> list[float]:
    """Losses on a chain of tokens, of which each has two successors: the least possible loss is 0.56."""
    seed_everything(5, verbose=False)
    sizes = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
    # Steps become small at the end, where losses are compared: large ones make any two roundings differ.
    rates = {"lr": 3e-3, "warmup_steps": 10, "lr_schedule": "cosine"}
    module = LlamaModule("llama-tiny", vocab_size=VOCABULARY, vocab_multiple=4, **rates, **sizes)
    dice = torch.Generator().manual_seed(3)
    successors = torch.randint(VOCABULARY, (VOCABULARY, 2), generator=dice)
    tokens = [torch.randint(VOCABULARY, (8 * STEPS,), generator=dice)]
    for _ in range(16):
        tokens.append(successors[tokens[-1], (torch.rand(8 * STEPS, generator=dice) < 0.25).int()])
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in torch.stack(tokens, 1)]
    recorder, recipe = Recorder(), Fp8Recipe(first_layers=0, last_layers=0)
    strategy = MegatronHPUStrategy(ops=ops, fp8=recipe, micro_batch_size=4)
    options = {"precision": "bf16-mixed", "max_steps": STEPS, "gradient_clip_val": 1.0, "logger": recorder}
    trainer = quiet_trainer(strategy, accelerator="hpu", **options)
    hpu.reset_calls()
    trainer.fit(module, DataLoader(samples, batch_size=8))  # type: ignore[arg-type]
    return recorder.series("train_loss")


@pytest.mark.slow
def test_200_steps_in_fp8_are_within_half_a_percent_of_bf16() -> None:
    """Larger, and on both products: ``benchmarks/fp8_loss.py``."""
    plain = losses("linear_fp8=off")
    assert hpu.calls()["hpu::fp8_gemm_v2"] == 0
    ours = losses("linear_fp8=require")
    calls, layers, micro_batches = hpu.calls(), 3 * 4, 2
    assert calls["hpu::fp8_gemm_v2"] == STEPS * layers * micro_batches * 3
    # In each micro-batch the input is cast twice and the gradient once; the weight once in a step, when there is a
    # history that the host knows: before, in the first two steps, twice in each micro-batch.
    weights = layers * (STEPS - 2)
    both = 0 if torch.hpu.get_device_name() == "GAUDI3" else weights
    assert calls["hpu::cast_to_fp8_hybrid"] == both
    others = STEPS * layers * micro_batches * 3 + 2 * layers * micro_batches * 2
    assert calls["hpu::cast_to_fp8_v2"] == others + weights - both
    assert len(ours) == len(plain) == STEPS
    assert plain[-1] < 0.5 * plain[0]
    last, right = (sum(found[-20:]) / 20 for found in (ours, plain))
    print(f"{torch.hpu.get_device_name()}: {last:.4f} in fp8, {right:.4f} in bf16")
    assert last == pytest.approx(right, rel=0.005)
    assert ours != plain
