"""Two blocks of a model, eager and compiled in turns: CPU seconds of one thread for forward and backward, as ratios.

    python benchmarks/compile_blocks.py --rows llama/bf16 gpt/fp32 --rounds 8

Much shorter than ``compile_speed.py``, whose steps also have an optimizer and a loss, which are not compiled on a CPU.
Gradients have the dtype of the parameters; those of eager blocks are added in place, as in training.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from sizes import size_of
from torch import Tensor

from lightning_megatron.layers.rotary import RotaryEmbedding
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.ops.registry import Ops
from lightning_megatron.weight_grad_store import GradPlace

ROWS = [f"{model}/{p}" for model in ("llama", "gpt", "mixtral") for p in ("bf16", "fp32")]


class Blocks:
    """Two blocks with gradients of their own."""

    def __init__(self, model: str, dtype: torch.dtype, compiles: bool) -> None:
        torch.manual_seed(0)
        size, self.mesh = size_of(f"{model}-tiny"), ParallelMesh.single()
        self.model = GPTModel(size.config.replace(num_layers=2), self.mesh, ops=Ops("cpu")).to(dtype)
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param)
        if compiles:
            for block in self.model.layers.values():
                block.compile(backend="inductor")
        self.mesh.weight_grads.set_places(lambda p: None if p.grad is None else GradPlace(p.grad, False))
        config = self.model.config
        kind = config.rotary(0)
        self.table = kind and RotaryEmbedding(config.head_dim, *kind)(torch.arange(size.seq), dtype)
        self.input = torch.randn(size.seq, size.micro_batch, size.config.hidden_size, dtype=dtype)

    def step(self) -> float:
        """CPU seconds of a forward and backward."""
        begun = time.thread_time()
        hidden: Tensor = self.input.clone().requires_grad_()
        for block in self.model.layers.values():
            hidden, _ = block(hidden, self.table)
        with self.mesh.weight_grads.accumulating():
            hidden.float().square().mean().backward()
        return time.thread_time() - begun


def main() -> None:
    """Print a row for each model and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| row | eager / compiled, CPU | fastest / fastest | first compiled step s |\n|---|---|---|---|")
    for row in args.rows:
        torch.compiler.reset()
        model, precision = row.split("/")
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        eager, compiled = (Blocks(model, dtype, compiles) for compiles in (False, True))
        eager.step()
        begun = time.perf_counter()
        compiled.step()
        first = time.perf_counter() - begun
        compiled.step()
        pairs = []
        for number in range(args.rounds):
            if number % 2:
                late = compiled.step()
                pairs.append((eager.step(), late))
            else:
                pairs.append((eager.step(), compiled.step()))
        fastest = min(a for a, _ in pairs) / min(b for _, b in pairs)
        print(f"| {row} | {median(a / b for a, b in pairs):.2f} | {fastest:.2f} | {first:.0f} |", flush=True)


if __name__ == "__main__":
    main()
