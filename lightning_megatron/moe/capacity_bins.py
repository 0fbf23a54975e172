"""Capacity bins: a few fixed capacities, of which a forward uses the smallest that drops nothing.

Devices that compile a graph for every shape need few different numbers of rows per expert. Intel's recipe for Gaudi
keeps a small set of capacities ("bins"), uses in each forward the smallest that holds the fullest expert, and
recomputes the set from the number of uses of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil

import torch
from torch import Tensor, nn

from lightning_megatron.comm.collectives import all_reduce, all_reduce_max
from lightning_megatron.config.capacity import edges_of, lowest_capacity
from lightning_megatron.config.moe import MoEConfig
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.mesh import ParallelMesh

LARGEST_SUM = 2**30
"""Above it, sums are halved, because a Gaudi stores 64-bit integers in 32 bits."""


def expected_waste(edges: Sequence[int], usage: Sequence[float], low: int) -> float:
    """Expected rows of padding, if the requests that fell into a bin are spread evenly over it."""
    widths = (b - a for a, b in pairwise((low, *edges)))
    return sum(times * width / 2 for times, width in zip(usage, widths, strict=True))


def spread(usage: Sequence[float], edges: Sequence[int], others: Sequence[int], low: int) -> list[float]:
    """Usage of the bins with edges ``others``, if requests in each bin of ``edges`` are spread evenly over it."""
    found = [0.0] * len(others)
    for times, (begin, end) in zip(usage, pairwise((low, *edges)), strict=True):
        for i, (first, last) in enumerate(pairwise((low, *others))):
            found[i] += times * max(0, min(end, last) - max(begin, first)) / (end - begin)
    return found


def optimized_edges(edges: Sequence[int], usage: Sequence[int], low: int, alignment: int) -> list[int]:
    """Join rarely used bins and halve wasteful ones, as long as that lowers the expected waste.

    Args:
        edges: capacities, ascending; the last one holds the worst case and stays.
        usage: number of uses of each.
        low: lower end of the first bin.
        alignment: every capacity is a multiple of this.
    """

    def waste(of: Sequence[int]) -> float:
        return expected_waste(of, spread(usage, edges, of, low), low)

    found = list(edges)
    while True:
        best = min(_neighbours(found, low, alignment), key=waste, default=found)
        if waste(best) >= waste(found) * (1 - 1e-9):
            return found
        found = best


def _neighbours(edges: list[int], low: int, alignment: int) -> Iterator[list[int]]:
    """Every way to join two neighbouring bins and to halve one bin."""
    for joined in range(len(edges) - 1):
        fewer = edges[:joined] + edges[joined + 1 :]
        for halved, (begin, end) in enumerate(pairwise((low, *fewer))):
            middle = ceil((begin + end) / 2 / alignment) * alignment
            if begin < middle < end:
                yield [*fewer[:halved], middle, *fewer[halved:]]


class CapacityBins(nn.Module):
    """Bins of one layer, equal on all ranks and kept in checkpoints.

    Args:
        mesh: mesh of the ranks; those of its ``etp x ep`` axis use one capacity.

    Attributes:
        edges: ``[N]`` capacities, ascending; zeros before the first forward.
        usage: ``[N]`` number of uses of each bin on all ranks since the edges were last computed.
        rows: ``[2]`` rows requested and rows used on all ranks since then; halved with ``usage`` when they get large.
        steps: optimizer steps taken, a scalar.
        low: smallest capacity that a forward can request, a scalar.
    """

    edges: Tensor
    usage: Tensor
    rows: Tensor
    steps: Tensor
    low: Tensor

    def __init__(self, config: MoEConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        count = config.moe_capacity_bins
        for name, length in {"edges": (count,), "usage": (count,), "rows": (2,), "steps": (), "low": ()}.items():
            self.register_buffer(name, torch.zeros(length, dtype=torch.int64))
        self._seen: Tensor | None = None  # [N + 2] usage and rows of this rank since the last step

    def choose(self, counts: Tensor, tokens: int, repeats: bool = False) -> int:
        """Choose the capacity for a forward with ``[E]`` choices of each expert, by ``T`` tokens of this rank.

        Args:
            counts: choices of each expert.
            tokens: number of tokens.
            repeats: True for a forward that has been counted in its first run.

        Raises:
            ConfigError: if there are more bins than multiples of the alignment in the range of possible requests.
        """
        requested = all_reduce_max(counts.max(), self.mesh.etp_ep)
        used, capacity = self._smallest(requested)
        last_edge, rows = torch.stack((self.edges[-1], capacity)).tolist()  # the only wait for the device
        if not last_edge:
            self._cut(tokens)
            used, capacity = self._smallest(requested)
            rows = capacity.item()
        if self.training and torch.is_grad_enabled() and not repeats:
            seen = torch.cat((used, torch.stack((requested, capacity))))
            self._seen = seen if self._seen is None else self._seen + seen
        return int(rows)

    def _smallest(self, requested: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest bin that holds the requested rows, one-hot ``[N]``, and its capacity.

        One-hot, because indexing with a tensor would wait for the device.
        """
        number = (self.edges < requested).sum().clamp(max=len(self.edges) - 1)
        used = (torch.arange(len(self.edges), device=self.edges.device) == number).to(self.edges.dtype)
        # A batch longer than the first one may need more than the last bin; its tokens are not dropped either.
        return used, torch.maximum((self.edges * used).sum(), requested)

    def _cut(self, tokens: int) -> None:
        raise_if_any(bins_problems(self.config, tokens))
        self.edges.copy_(torch.tensor(edges_of(self.config, tokens)))
        self.low.fill_(lowest_capacity(tokens, self.config.moe_router_topk, self.config.num_experts))

    def after_optimizer_step(self) -> None:
        """Sum the counts of all ranks; recompute the edges of the bins after every interval."""
        seen = torch.zeros(len(self.usage) + 2, dtype=torch.int64, device=self.usage.device)
        if self._seen is not None:
            seen, self._seen = self._seen, None
        for axis in (self.mesh.tp, self.mesh.dp_cp):
            seen = all_reduce(seen, axis)
        self.usage += seen[:-2]
        self.rows += seen[-2:]
        large = (self.rows > LARGEST_SUM).any()
        for sums in (self.usage, self.rows):  # only their proportions matter
            sums.copy_(torch.where(large, sums // 2, sums))
        self.steps += 1
        interval = self.config.moe_capacity_bins_interval
        if interval and int(self.steps) % interval == 0 and self.rows[0] > 0:
            self._cut_anew()

    def forget_step(self) -> None:
        """Discard the counts of a skipped step."""
        self._seen = None

    def _cut_anew(self) -> None:
        requested, used = self.rows.tolist()
        if used / requested - 1 > self.config.moe_capacity_bins_max_overhead:
            alignment = self.config.moe_capacity_bins_alignment
            edges = optimized_edges(self.edges.tolist(), self.usage.tolist(), int(self.low), alignment)
            self.edges.copy_(torch.tensor(edges))
        self.usage.zero_()
        self.rows.zero_()


def bins_problems(config: MoEConfig, tokens: int) -> list[Problem]:
    """Fault of a configuration with more bins than possible capacities for the tokens of one rank in one forward."""
    edges, count = edges_of(config, tokens), config.moe_capacity_bins
    if len(edges) == count:
        return []
    low = lowest_capacity(tokens, config.moe_router_topk, config.num_experts)
    alignment = config.moe_capacity_bins_alignment
    reason = (
        f"between the {low} rows of an even load and the {tokens} tokens of a rank there are only {len(edges)} "
        f"multiples of moe_capacity_bins_alignment={alignment}: use fewer bins, or a finer alignment"
    )
    return [Problem("moe_capacity_bins", count, reason, (len(edges),))]
