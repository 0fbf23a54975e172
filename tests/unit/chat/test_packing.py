"""Rows of documents: none lost, none too long, as full as best fit makes them, and the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.chat.packing import best_fit
from lightning_megatron.data.chat.selection import held_out, repeated


def rows_of(lengths: list[int], capacity: int, seed: int = 0) -> list[list[int]]:
    members, ends = best_fit(np.array(lengths, np.int64), capacity, seed)
    return [row.tolist() for row in np.split(members, ends[:-1])] if len(ends) else []


def plain_best_fit(lengths: list[int], capacity: int) -> int:
    """Number of rows of the textbook's algorithm, which looks at every row."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return len(rooms)


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 64), st.integers(0, 3))
def test_every_document_stands_in_one_row_that_has_room_for_it(lengths: list[int], capacity: int, seed: int):
    rows = rows_of(lengths, capacity, seed)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[number] for number in row) <= capacity for row in rows)
    assert len(rows) == plain_best_fit(lengths, capacity)
    assert rows == rows_of(lengths, capacity, seed)


@pytest.mark.parametrize("capacity", [1024, 4096])
@pytest.mark.parametrize("sigma", [0.7, 1.2])
def test_rows_of_a_log_normal_mix_are_filled_to_97_percent_and_more(capacity: int, sigma: float):
    lengths = np.random.default_rng(1).lognormal(5.3, sigma, 5000).astype(np.int64).clip(8, capacity)
    _, ends = best_fit(lengths, capacity)
    assert lengths.sum() / (len(ends) * capacity) > 0.99


def test_equal_lengths_do_not_stand_in_the_order_of_the_file():
    assert rows_of([10] * 64, 100) != rows_of([10] * 64, 100, seed=1)
    assert sum(np.diff(row).tolist() == [1] * (len(row) - 1) for row in rows_of([10] * 64, 100)) == 0


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0.01, 10.0)), min_size=1, max_size=5))
def test_weights_are_shares_and_the_smallest_share_is_read_once(files: list[tuple[int, float]]):
    sizes, weights = [size for size, _ in files], [weight for _, weight in files]
    places = repeated(sizes, weights, 3)
    counts = [len(one) for one in places]
    for size, one in zip(sizes, places, strict=True):
        times = np.bincount(one, minlength=size)
        assert times.min() >= 1
        assert times.max() - times.min() <= 1
    assert any(count == size for count, size in zip(counts, sizes, strict=True))
    total = sum(weights)
    assert all(abs(count - sum(counts) * w / total) <= len(files) for count, w in zip(counts, weights, strict=True))


def test_without_weights_every_conversation_is_read_once_and_an_empty_file_does_no_harm():
    assert [one.tolist() for one in repeated([2, 0], None, 0)] == [[0, 1], []]
    assert [len(one) for one in repeated([4, 0, 2], [1.0, 5.0, 1.0], 0)] == [4, 0, 4]


@given(st.integers(2, 300), st.floats(0.001, 0.999), st.integers(0, 9))
def test_a_share_is_held_out_whole(count: int, share: float, seed: int):
    kept, out = held_out(count, share, seed)
    assert sorted([*kept, *out]) == list(range(count))
    assert 0 < len(out) < count
    assert abs(len(out) - count * share) <= 1
