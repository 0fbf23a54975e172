"""Layout of parameters in a flat buffer: arithmetic without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Every parameter's start and every rank's share is rounded up to a multiple of this number of elements.

Matrix kernels read 16 bytes at a time, and collectives are fastest from 128 bytes on; 64 bf16 elements are 128 bytes.
"""


@dataclass(frozen=True)
class BucketPlan:
    """The range of a buffer that one bucket covers.

    Attributes:
        start: first element of the bucket in the buffer.
        end: one past the last element, padding included.
        starts: first element in the buffer of each parameter of the bucket.
        first: index of the bucket's first parameter in the buffer's list of parameters.
    """

    start: int
    end: int
    starts: tuple[int, ...]
    first: int


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def default_bucket_size(ranks: int) -> int:
    """Elements per bucket by Megatron-LM's rule, which grows with the ranks to keep messages long enough."""
    return max(40_000_000, 1_000_000 * ranks)


def plan_buckets(sizes: Sequence[int], bucket_size: int, ranks: int) -> list[BucketPlan]:
    """Group parameters, in the order given, into buckets of at least ``bucket_size`` elements (the last may be less).

    A parameter is never split over buckets. A bucket is padded so that it consists of ``ranks`` equal aligned shares.
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
