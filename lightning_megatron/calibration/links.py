"""Bandwidth and latency of the link between the processes of one node."""

from __future__ import annotations

import torch

from lightning_megatron.calibration.timing import seconds_of
from lightning_megatron.comm.collectives import all_gather, reduce_scatter
from lightning_megatron.mesh import Axis

SMALL, LARGE = 1 << 12, 1 << 25
"""Bytes of the two tensors that are gathered."""


def link(axis: Axis, device: torch.device) -> tuple[float, float]:
    """Bytes a second and seconds of a message, from gathers and scatters of a small and a large tensor.

    Args:
        axis: ranks of the node; at least two.
        device: device of the tensors.
    """
    small, large = (_seconds(axis, device, size) for size in (SMALL, LARGE))
    moved = (LARGE - SMALL) * (axis.size - 1) / axis.size
    return moved / max(large - small, 1e-9), small / (axis.size - 1)


def _seconds(axis: Axis, device: torch.device, size: int) -> float:
    """Mean of a gather to, and a reduce-scatter of, so many bytes. Ranks make the same number of calls."""
    whole = torch.ones(size // 4, device=device)
    part = whole[: whole.numel() // axis.size].clone()
    calls = 50 if size == SMALL else 4

    def both() -> None:
        for _ in range(calls):
            all_gather(part, axis)
            reduce_scatter(whole, axis)

    # A limit of no time makes one round, on every rank.
    return seconds_of(both, device, 0.0) / (2 * calls)
