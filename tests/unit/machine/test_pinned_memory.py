"""Page-locked memory for copies of a state: sizes asked of torch's allocator, which rounds up to powers of two."""

from __future__ import annotations

import random

import pytest

from lightning_megatron.device.memory import pieces_of

MIB = 1 << 20


def rounded(size: int) -> int:
    """Bytes that the allocator takes."""
    return 1 << max(0, size - 1).bit_length()


def asked(sizes: list[int]) -> list[int]:
    """Bytes of each piece, whose tensors must not overlap."""
    found = []
    for piece in pieces_of(sizes):
        ends = [0]
        for number, start in piece:
            assert start >= ends[-1]
            assert start % 64 == 0
            ends.append(start + sizes[number])
        found.append(ends[-1])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_pieces_take_little_more_than_their_tensors(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [
        draw.choice((0, 1, 4, 4096, 129 * MIB, draw.randrange(1, 600 * MIB))) for _ in range(draw.randrange(1, 300))
    ]
    numbers = sorted(number for piece in pieces_of(sizes) for number, _ in piece)
    assert numbers == list(range(len(sizes)))
    assert sum(map(rounded, asked(sizes))) <= sum(sizes) + 2 * max(sizes) + 128 * len(sizes)


def test_buckets_of_an_odd_size_take_no_second_time_their_memory() -> None:
    sizes = [129 * MIB] * 100
    alone = sum(map(rounded, sizes))
    assert alone > 1.9 * sum(sizes)
    assert sum(map(rounded, asked(sizes))) < 1.1 * sum(sizes)
