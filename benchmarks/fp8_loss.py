"""Loss of llama-tiny in fp8 against bf16, on a simulated Gaudi 2 and Gaudi 3.

    python benchmarks/fp8_loss.py GAUDI2
    python benchmarks/fp8_loss.py GAUDI3

The same weights, batches and learning rates for both; all layers in fp8; bf16-mixed, two micro-batches a step. Tokens
are drawn from a Markov chain, in which each token has four successors: a loss of 1.21 is the least possible. The
simulation has the formats and the roundings of fp8, and no speed. Its stochastic rounding draws from torch's generator.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import simulated_gaudi as hpu
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

VOCABULARY, LENGTH, BATCH = 512, 32, 8
WEIGHTS = torch.tensor([0.5, 0.25, 0.15, 0.1])


def chain(rows: int) -> list[dict[str, Tensor]]:
    """Samples from the chain, the same each time."""
    dice = torch.Generator().manual_seed(0)
    successors = torch.randint(VOCABULARY, (VOCABULARY, len(WEIGHTS)), generator=dice)
    tokens = [torch.randint(VOCABULARY, (rows,), generator=dice)]
    for _ in range(LENGTH):
        choice = torch.multinomial(WEIGHTS, rows, replacement=True, generator=dice)
        tokens.append(successors[tokens[-1], choice])
    return [{"tokens": row[:-1], "labels": row[1:]} for row in torch.stack(tokens, 1)]


def losses(steps: int, layers: int, ops: str, **recipe: Any) -> list[float]:
    """Loss of each step."""
    from lightning_megatron import LlamaModule, MegatronHPUStrategy
    from lightning_megatron.ops.fp8 import Fp8Recipe
    from lightning_megatron.testing.trainer import Recorder, quiet_trainer

    seed_everything(1, verbose=False)
    module = LlamaModule(
        "llama-tiny", num_layers=layers, vocab_size=VOCABULARY, lr=1e-3, warmup_steps=20, lr_schedule="cosine"
    )
    recorder = Recorder()
    trainer = quiet_trainer(
        MegatronHPUStrategy(ops=ops, fp8=Fp8Recipe(**recipe), micro_batch_size=BATCH // 2),
        accelerator="hpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=recorder,
    )
    trainer.fit(module, DataLoader(chain(steps * BATCH), batch_size=BATCH))  # type: ignore[arg-type]
    return recorder.series("train_loss")


def main() -> None:
    """Print a row for each kind of run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("product", choices=hpu.DEVICE_NAMES)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=2)
    asked = parser.parse_args()
    hpu.enable("1.24", device_name=asked.product)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "bf16": ("linear_fp8=off", {}),
        "fp8": ("linear_fp8=require", {"first_layers": 0, "last_layers": 0}),
    }
    right = math.nan
    for name, (ops, recipe) in kinds.items():
        hpu.reset_calls()
        found = losses(asked.steps, asked.layers, ops, **recipe)
        calls = hpu.calls()
        last = sum(found[-20:]) / 20
        right = last if name == "bf16" else right
        casts = calls["hpu::cast_to_fp8_v2"] + calls["hpu::cast_to_fp8_hybrid"]
        marks = " | ".join(f"{found[step - 1]:.4f}" for step in (1, 50, 100, 150, asked.steps) if step <= asked.steps)
        row = (
            f"| {asked.product} | {name} | {marks} | {last:.4f} | {100 * (last / right - 1):+.2f} % |"
            f" {calls['hpu::fp8_gemm_v2'] / asked.steps:.0f} | {casts / asked.steps:.1f} |"
        )
        print(row, flush=True)


if __name__ == "__main__":
    main()
