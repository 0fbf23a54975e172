"""Where parameters lie in a flat buffer: pure arithmetic, no tensors of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Elements to which every parameter's start and every rank's share of a bucket is rounded up.

Matrix kernels read 16 bytes at a time and collectives are fastest from 128 bytes on; 64 bf16 elements are 128 bytes.
"""


@dataclass(frozen=True)
class BucketPlan:
    """A stretch of a buffer that is reduced and gathered at once.

    Attributes:
        start: first element of the stretch in the buffer.
        end: one past the last, padding included.
        starts: first element in the buffer of each parameter in the stretch.
        first: index of the stretch's first parameter in the buffer's list of parameters.
    """

    start: int
    end: int
    starts: tuple[int, ...]
    first: int


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def default_bucket_size(ranks: int) -> int:
    """Elements of a bucket: Megatron-LM's rule, so that a message stays long when it is shared by many ranks."""
    return max(40_000_000, 1_000_000 * ranks)


def plan_buckets(sizes: Sequence[int], bucket_size: int, ranks: int) -> list[BucketPlan]:
    """Cut parameters, in the order given, into buckets of at least ``bucket_size`` elements (the last may be less).

    A parameter is never split over buckets; a bucket is padded so that ``ranks`` equal aligned shares make it up.

    Args:
        sizes: elements of each parameter.
        bucket_size: elements after which a bucket is closed.
        ranks: how many ranks share a bucket.
    """
    plans: list[BucketPlan] = []
    start = offset = first = 0
    starts: list[int] = []
    for index, size in enumerate(sizes):
        starts.append(offset)
        offset = round_up(offset + size, ALIGNMENT)
        if offset - start >= bucket_size or index == len(sizes) - 1:
            offset = start + round_up(offset - start, ALIGNMENT * ranks)
            plans.append(BucketPlan(start, offset, tuple(starts), first))
            start, first, starts = offset, index + 1, []
    return plans
