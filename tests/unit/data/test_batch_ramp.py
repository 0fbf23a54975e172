"""Ramp of the global batch against Megatron-LM's rule, step by step, and what a sampler makes of it."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from lightning_megatron.data.batch_ramp import BatchRamp
from lightning_megatron.data.sampler import MegatronSampler
from lightning_megatron.errors import ConfigError


def megatrons_batches(start: int, increment: int, samples: int, final: int, until: int) -> list[int]:
    """Global batches one after the other, as long as they are within ``until`` samples."""
    found, consumed = [], 0
    while True:
        size = final
        if consumed <= samples and final > start:
            size = start + int(consumed / (samples / ((final - start) // increment))) * increment
        if consumed + size > until:
            return found
        found.append(size)
        consumed += size


RAMPS = [(2, 2, 100, 8), (16, 16, 1000, 64), (3, 5, 7, 23), (4, 4, 1, 12), (8, 1, 500, 8), (1, 3, 997, 10)]
random.seed(3)
RAMPS += [
    (start, step, random.randint(1, 3000), start + step * random.randint(0, 12))
    for start, step in ((random.randint(1, 9), random.randint(1, 9)) for _ in range(60))
]


@pytest.mark.parametrize("given", RAMPS, ids=str)
def test_sizes_and_numbers_of_batches(given: tuple[int, int, int, int]) -> None:
    ramp, until = BatchRamp(*given), given[2] + 5 * given[3]
    expected, consumed = megatrons_batches(*given, until), 0
    assert ramp.batches(0, until) == len(expected)
    for number, size in enumerate(expected):
        assert ramp.size_at(consumed) == size
        assert ramp.consumed_after(number) == consumed
        assert ramp.batches(consumed, until) == len(expected) - number
        consumed += size
    assert [size for size, number in ramp.runs(0, until) for _ in range(number)] == expected


def test_the_ramp_of_tr1_13b() -> None:
    ramp = BatchRamp(16, 16, 5_000_000, 1024)
    # 63 steps of 79,365.08 samples: the second batch size begins with the first position behind that.
    assert ramp.size_at(79_360) == 16
    assert ramp.size_at(79_376) == 32
    assert ramp.size_at(5_000_001) == 1024
    # Megatron-LM counts the batches of the ramp one by one, and divides the rest by the full size.
    consumed = number = 0
    while consumed <= 5_000_000:
        consumed, number = consumed + 16 + int(consumed / (5_000_000 / 63)) * 16, number + 1
    assert ramp.batches(0, 300_000_000) == number + (300_000_000 - consumed) // 1024 == 311_541


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((0, 16, 100, 64), "three whole numbers"),
        ((16, 0, 100, 64), "three whole numbers"),
        ((16, 16, 0, 64), "three whole numbers"),
        ((128, 16, 100, 64), r"grows to has 64; nearest valid: \(64, 16, 100\)"),
        ((10, 16, 100, 64), r"do not reach the global batch of 64; nearest valid: \(16, 16, 100\)"),
    ],
)
def test_impossible_ramps(given: tuple[int, int, int, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        BatchRamp(*given)


def batches_of_all(ramp: BatchRamp, dp: int, total: int, state: dict[str, int] | None = None) -> list[list[int]]:
    parts = []
    for rank in range(dp):
        sampler = MegatronSampler(total, batch_size=ramp, dp_rank=rank, dp_size=dp)
        if state is not None:
            sampler.load_state_dict(state)
        parts.append(list(sampler))
    return [list(chain(*batch)) for batch in zip(*parts, strict=True)]


def test_samplers_of_any_number_of_replicas_make_the_same_global_batches() -> None:
    ramp, total = BatchRamp(4, 4, 50, 16), 203
    whole = batches_of_all(ramp, 1, total)
    assert [len(batch) for batch in whole] == megatrons_batches(4, 4, 50, 16, total)
    assert list(chain(*whole)) == list(range(sum(map(len, whole))))
    assert len(MegatronSampler(total, batch_size=ramp)) == len(whole)
    for dp in (2, 4):
        assert batches_of_all(ramp, dp, total) == whole


@pytest.mark.parametrize("done", [1, 5, 9, 14])
def test_a_position_in_mid_ramp_is_one_number(done: int) -> None:
    ramp, total = BatchRamp(4, 4, 50, 16), 203
    first = MegatronSampler(total, batch_size=ramp, dp_rank=1, dp_size=2)
    first.start()
    first.advance(done - 1)
    before = first.consumed_samples
    first.advance()
    assert len(first.last_batch) == first.consumed_samples - before == ramp.size_at(before)
    assert first.consumed_samples == first.consumed_after(done) == ramp.consumed_after(done)
    rest = batches_of_all(ramp, 4, total, first.state_dict())
    assert rest == batches_of_all(ramp, 1, total)[done:]


def test_the_last_batch_of_a_ramp_can_be_filled() -> None:
    ramp = BatchRamp(2, 2, 10, 6)
    sizes = [len(batch) for batch in MegatronSampler(25, batch_size=ramp, drop_last=False)]
    assert sizes == [*megatrons_batches(2, 2, 10, 6, 25), 6]
    assert len(sizes) == len(MegatronSampler(25, batch_size=ramp, drop_last=False))


def test_replicas_that_cannot_share_a_ramp() -> None:
    with pytest.raises(ConfigError, match="do not split over dp 4"):
        MegatronSampler(100, batch_size=BatchRamp(4, 2, 10, 8), dp_size=4)
