from __future__ import annotations

import pytest

from lightning_megatron.optim.buffers.bucket_plan import ALIGNMENT, default_bucket_size, plan_buckets, round_up


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("bucket_size", [1, 100, 1000, 10**9])
def test_buckets_hold_every_parameter_once_aligned_and_divisible(ranks: int, bucket_size: int) -> None:
    sizes = [5, 700, 64, 1, 129, 2000, 0, 33]
    plans = plan_buckets(sizes, bucket_size, ranks)
    assert [start for plan in plans for start in plan.starts] == sorted(s for plan in plans for s in plan.starts)
    assert sum(len(plan.starts) for plan in plans) == len(sizes)
    end = 0
    for plan in plans:
        assert plan.start == end
        end = plan.end
        assert (plan.end - plan.start) % (ranks * ALIGNMENT) == 0
        inside = sizes[plan.first : plan.first + len(plan.starts)]
        stops = [start + size for start, size in zip(plan.starts, inside, strict=True)]
        assert all(start % ALIGNMENT == 0 for start in plan.starts)
        assert all(stop <= nxt for stop, nxt in zip(stops, [*plan.starts[1:], plan.end], strict=True))
    assert all(plan.end - plan.start >= bucket_size for plan in plans[:-1])


def test_a_huge_size_makes_one_bucket_and_a_tiny_one_a_bucket_each() -> None:
    assert len(plan_buckets([10] * 7, 10**9, 2)) == 1
    assert len(plan_buckets([10] * 7, 1, 2)) == 7


def test_default_size_grows_with_the_ranks() -> None:
    assert default_bucket_size(1) == 40_000_000
    assert default_bucket_size(128) == 128_000_000
    assert round_up(65, 64) == 128
    assert round_up(64, 64) == 64
