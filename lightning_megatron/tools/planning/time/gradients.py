"""Time of summing gradients and gathering parameters over data-parallel ranks, and the part that a step waits for.

Buckets of gradients are sent while the last micro-batch's backward makes the next ones, and buckets of parameters are
gathered while the first forward runs. So a step waits only for the part that exceeds that computation, and for one
bucket that overlaps with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.tools.planning.core.device_file import DeviceSpec
from lightning_megatron.tools.planning.time.communication import Group, Groups
from lightning_megatron.tools.planning.time.sizes import Sizes

LEAST_BUCKET = 40e6
BUCKET_OF_A_RANK = 1e6


@dataclass(frozen=True)
class Overlap:
    """Computation of a rank beside which data-parallel communication can run, in seconds.

    Attributes:
        forward: forward of one micro-batch, all chunks of the rank.
        backward: backward of one micro-batch.
    """

    forward: float
    backward: float


def gradient_seconds(
    sizes: Sizes, device: DeviceSpec, dense: float, experts: float, beside: Overlap
) -> tuple[float, float]:
    """Seconds that a step waits for data-parallel communication, and seconds that it takes.

    Args:
        sizes: sizes of the rank.
        dense: parameters of the rank that all data-parallel ranks share.
        experts: parameters of its experts.
        beside: computation that hides it.
    """
    job, groups = sizes.job, Groups(sizes)
    parts = [(groups.dp, dense), (groups.edp, experts)]
    parts = [(group, count) for group, count in parts if group.size > 1 and count]
    if not parts:
        return 0.0, 0.0
    bucket = job.bucket_size or max(LEAST_BUCKET, BUCKET_OF_A_RANK * groups.dp.size)
    sums = sum(_seconds(group, device, count, bucket, sizes.job.sent_grad_bytes) for group, count in parts)
    gathers = sum(_seconds(group, device, count, bucket, sizes.value_bytes) for group, count in parts)
    in_backward = job.overlap_grad_reduce and device.asynchronous
    if not job.distributed_optimizer:
        # An all-reduce takes twice as long as a reduce-scatter, and no parameters are gathered afterwards.
        return _waited(2 * sums, beside.backward, bucket, parts, in_backward), 2 * sums
    in_forward = job.overlap_param_gather and device.asynchronous
    waits = _waited(sums, beside.backward, bucket, parts, in_backward)
    waits += _waited(gathers, beside.forward, bucket, parts, in_forward)
    return waits, sums + gathers


def _seconds(group: Group, device: DeviceSpec, count: float, bucket: float, bytes_: int) -> float:
    buckets = max(1.0, count // bucket)
    return group.gather(device, count * bytes_) + (buckets - 1) * group.latency(device)


def _waited(seconds: float, beside: float, bucket: float, parts: list[tuple[Group, float]], overlaps: bool) -> float:
    """Part of ``seconds`` that nothing hides: the surplus over ``beside``, and at least one bucket's share."""
    if not overlaps:
        return seconds
    last = min(1.0, bucket / sum(count for _, count in parts))
    return max(seconds - beside * (1 - last), seconds * last)
