"""Bandwidth and latency of the link between the processes of one node."""

from __future__ import annotations

import torch

from lightning_megatron.comm.collectives import all_gather, reduce_scatter
from lightning_megatron.mesh import Axis
from lightning_megatron.tools.calibration.timing import seconds_of

SMALL, LARGE = 1 << 12, 1 << 25
"""Bytes of the two tensors that are gathered."""


def link(axis: Axis, device: torch.device) -> tuple[float, float]:
    """Bandwidth in bytes a second, and latency of a message in seconds, from collectives on a small and a large tensor.

    Args:
        axis: ranks of the node; at least two.
        device: device of the tensors.
    """
    small, large = (_seconds(axis, device, size) for size in (SMALL, LARGE))
    moved = (LARGE - SMALL) * (axis.size - 1) / axis.size
    return moved / max(large - small, 1e-9), small / (axis.size - 1)


def _seconds(axis: Axis, device: torch.device, size: int) -> float:
    """Mean seconds of an all-gather to, and a reduce-scatter of, ``size`` bytes; all ranks make the same calls."""
    whole = torch.ones(size // 4, device=device)
    part = whole[: whole.numel() // axis.size].clone()
    calls = 50 if size == SMALL else 4

    def both() -> None:
        for _ in range(calls):
            all_gather(part, axis)
            reduce_scatter(whole, axis)

    # With a limit of 0 s every rank makes exactly one round.
    return seconds_of(both, device, 0.0) / (2 * calls)
