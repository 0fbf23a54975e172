"""Memory of one step on a long sequence: one process against ranks that share it.

    python benchmarks/context_memory.py --length 32768

Each layout runs in fresh processes, one thread each. A short sequence runs first, so that libraries and workspaces are
allocated; then the long sequence's activations are the growth of the process's peak memory.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass

import torch

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.device import peak_memory_bytes
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.testing.workers import WorkerPool

CPU = torch.device("cpu")
VOCABULARY, WARM_UP = 256, 128  # bytes: the loss works in chunks of 64 MiB, and should not be what is measured
LAYOUTS = {
    "one process": ParallelLayout(),
    "cp=2, p2p": ParallelLayout(cp=2, cp_comm_type="p2p"),
    "cp=2, all_gather": ParallelLayout(cp=2, cp_comm_type="all_gather"),
    "cp=2, a2a": ParallelLayout(cp=2, cp_comm_type="a2a"),
    "cp=4, p2p": ParallelLayout(cp=4, cp_comm_type="p2p"),
}


@dataclass(frozen=True)
class Cost:
    """Cost of a step on the long sequence on one rank.

    Attributes:
        forward: bytes by which the peak grew in the forward pass.
        step: bytes by which it grew in forward and backward.
        seconds: time of both.
        loss: loss of the whole sequence.
    """

    forward: int
    step: int
    seconds: float
    loss: float


def measure(layout: ParallelLayout, length: int, hidden_size: int) -> Cost:
    mesh = ParallelMesh.create(layout, CPU)
    torch.manual_seed(1)
    config = TransformerConfig(
        1, hidden_size, 4, VOCABULARY, length, num_query_groups=2, position_embedding="rope", tie_embeddings=False
    )
    model = GPTModel(config, mesh)
    tokens = torch.randint(VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(2))
    tokens, labels = tokens[:, :-1], tokens[:, 1:]
    model(tokens[:, :WARM_UP], labels[:, :WARM_UP]).backward()
    before, begin = peak_memory_bytes(CPU), time.perf_counter()
    loss = model(tokens, labels)
    forward = peak_memory_bytes(CPU) - before
    loss.backward()
    return Cost(forward, peak_memory_bytes(CPU) - before, time.perf_counter() - begin, loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768, help="tokens of the sequence")
    parser.add_argument("--hidden-size", type=int, default=256, help="features of the one layer")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS, help="what to measure")
    args = parser.parse_args()
    # The C library keeps freed blocks of up to 32 MiB for reuse; tensors of half the size would fall below that.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    print("| layout | forward MiB | forward and backward MiB | share | seconds | loss |")
    print("|---|---|---|---|---|---|")
    whole = 0
    for name in args.layouts:
        size = LAYOUTS[name].model_parallel_size
        with WorkerPool(size, timeout=3600) as pool:  # new processes: a peak never falls
            costs = pool.run(size, measure, LAYOUTS[name], args.length, args.hidden_size)
        worst = max(costs, key=lambda cost: cost.step)
        whole = whole or worst.step
        memory = f"{worst.forward / 2**20:.0f} | {worst.step / 2**20:.0f} | {worst.step / whole:.2f}"
        print(f"| {name} | {memory} | {worst.seconds:.0f} | {worst.loss:.7f} |", flush=True)


if __name__ == "__main__":
    main()
