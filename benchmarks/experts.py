"""Measures a rank's experts alone, forward and backward, on routings that all differ in their numbers of tokens.

    python benchmarks/experts.py                        # mixtral-tiny's experts, bf16
    python benchmarks/experts.py --tokens 4096 --routings 20

Variants take turns on the same routings in one process: ``exact`` multiplies exactly the rows of an expert, ``rounded``
rounds their number up to one of a few. Printed for each: processor time of the first and of the last routings, growth
of memory within its turns, and the largest relative difference of a gradient from the first variant's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.presets import preset
from lightning_megatron.moe.dispatch import ExpertGrid, alltoall
from lightning_megatron.moe.experts import RoutedExperts
from lightning_megatron.ops import grouped_linear

PAGE_MB = 4096 / 2**20


@contextmanager
def rounded() -> Iterator[None]:
    """The library's own products, whose numbers of rows are rounded up."""
    yield


@contextmanager
def exact() -> Iterator[None]:
    """Products of exactly the rows of their experts."""
    with mock.patch.object(grouped_linear, "rounded_length", lambda rows: rows):
        yield


VARIANTS = {"rounded": rounded, "exact": exact}


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MB


def routing(seed: int, tokens: int, experts: int, topk: int, skew: float) -> tuple[Tensor, Tensor]:
    """Ids and weights ``[T, k]`` of random logits, some experts preferred."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator) + skew * torch.randn(experts, generator=generator)
    top, ids = logits.topk(topk, dim=-1)
    return ids, top.softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="mixtral-tiny")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a micro-batch")
    parser.add_argument("--routings", type=int, default=60)
    parser.add_argument("--skew", type=float, default=0.2, help="spread of the experts' popularity")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    dtype, c = getattr(torch, args.dtype), preset(args.preset)
    mesh = ParallelMesh.single()
    experts = RoutedExperts(c, mesh).to(dtype)
    grid = ExpertGrid(c.num_experts, mesh)
    x = torch.randn(args.tokens, c.hidden_size).to(dtype).requires_grad_()
    dy = torch.randn(args.tokens, c.hidden_size).to(dtype)
    seconds: dict[str, list[float]] = {name: [] for name in args.variants}
    grown, apart = (dict.fromkeys(args.variants, 0.0) for _ in range(2))
    for number in range(args.routings):
        ids, weights = routing(number, args.tokens, c.num_experts, c.moe_router_topk, args.skew)
        leaves = [x, weights.requires_grad_(), experts.fc1, experts.fc2]
        right: tuple[Tensor, ...] = ()
        for name in args.variants:
            memory = resident_mb()
            with VARIANTS[name]():
                begun = time.process_time()
                grads = torch.autograd.grad(alltoall(x, ids, weights, experts, grid), leaves, dy)
                seconds[name].append(time.process_time() - begun)
            if number:  # the first one of all also warms up
                grown[name] += resident_mb() - memory
            right = right or grads
            difference = max(float((a - b).norm() / b.norm()) for a, b in zip(grads, right, strict=True))
            apart[name] = max(apart[name], difference)
    part = max(1, args.routings // 4)
    print("| variant | ms, first quarter | ms, last quarter | MB grown | apart |\n|---|---|---|---|---|")
    for name, all_of in seconds.items():
        first, last = (1e3 * statistics.median(some) for some in (all_of[1 : part + 1], all_of[-part:]))
        print(f"| {name} | {first:.1f} | {last:.1f} | {grown[name]:.0f} | {apart[name]:.1g} |")


if __name__ == "__main__":
    main()
