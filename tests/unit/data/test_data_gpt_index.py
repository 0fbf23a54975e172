"""The vectorised indices against the sequential algorithm, written down independently from its description."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.gpt_index import build_gpt_index, plan_epochs, sample_bounds


def sequential_bounds(lengths: list[int], samples: int, seq_length: int, extra: int) -> list[tuple[int, int]]:
    """Walk over the sequences, sample by sample."""
    bounds = [(0, 0)]
    position = offset = 0
    for _ in range(samples):
        need = seq_length + extra
        while True:
            left = lengths[position] - offset
            need -= left
            if need <= 0:
                offset += need + left - extra
                break
            if position == len(lengths) - 1:
                offset = lengths[position] - extra
                break
            position, offset = position + 1, 0
        bounds.append((position, offset))
    return bounds


def sequential_index(
    lengths: list[int], num_samples: int | None, seq_length: int, seed: int, extra: int, drop_last: bool
) -> tuple[np.ndarray, list[tuple[int, int]], np.ndarray]:
    tokens, epochs = sum(lengths), 1
    while num_samples is not None and epochs * tokens < num_samples * seq_length + extra:
        epochs += 1
    usable = epochs * tokens - extra
    samples = usable // seq_length if drop_last else math.ceil(usable / seq_length)
    separate = False
    before = 0
    if epochs > 1:
        assert num_samples is not None
        before = ((epochs - 1) * tokens - extra) // seq_length
        separate = num_samples - before < int(0.80 * ((tokens - extra) // seq_length))
    rng = np.random.RandomState(seed)
    ids = list(range(len(lengths)))
    order = np.array(ids * (epochs - 1 if separate else epochs), np.int32)
    rng.shuffle(order)
    if separate:
        last = np.array(ids, np.int32)
        rng.shuffle(last)
        order = np.concatenate([order, last])
    bounds = sequential_bounds([lengths[i] for i in order], samples, seq_length, extra)
    if not separate:
        before = samples
    first, rest = np.arange(before), np.arange(before, samples)
    rng.shuffle(first)
    if separate:
        rng.shuffle(rest)
    return order, bounds, np.concatenate([first, rest])


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(sum),
    seq_length=st.integers(1, 9),
    num_samples=st.none() | st.integers(0, 60),
    extra=st.integers(0, 1),
    drop_last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_sequential_algorithm(
    lengths: list[int], seq_length: int, num_samples: int | None, extra: int, drop_last: bool, seed: int
) -> None:
    plan = plan_epochs(sum(lengths), num_samples, seq_length, extra_token=bool(extra), drop_last_partial=drop_last)
    index = build_gpt_index(
        np.array(lengths, np.int32),
        np.arange(len(lengths), dtype=np.int32),
        plan,
        seq_length=seq_length,
        seed=seed,
        extra_token=bool(extra),
    )
    order, bounds, shuffle = sequential_index(lengths, num_samples, seq_length, seed, extra, drop_last)
    assert np.array_equal(index.documents, order)
    assert index.samples.tolist() == [list(b) for b in bounds]
    assert np.array_equal(index.shuffle, shuffle)
    assert num_samples is None or len(index.shuffle) >= num_samples


def test_bounds_by_hand() -> None:
    # Tokens 0 1 2 | | 3 4 5 6 | 7; samples of 3 and a fourth that is read again.
    lengths = np.array([3, 0, 4, 1])
    assert sample_bounds(lengths, 2, 3).tolist() == [[0, 0], [2, 0], [2, 3]]
    # Without the extra token a sample may end where a sequence does.
    assert sample_bounds(lengths, 2, 3, extra_token=False).tolist() == [[0, 0], [0, 3], [2, 3]]
    # A third sample has no more than token 7: it ends at the very end.
    assert sample_bounds(lengths, 3, 3).tolist() == [[0, 0], [2, 0], [2, 3], [3, 0]]


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.RandomState(0).randint(0, 30, 200)
    whole = sample_bounds(lengths, 100, 17)
    monkeypatch.setattr("lightning_megatron.data.gpt_index._BLOCK", 7)
    assert np.array_equal(sample_bounds(lengths, 100, 17), whole)


@pytest.mark.parametrize(
    ("tokens", "wanted", "seq_length", "epochs", "samples", "separate"),
    [
        (1000, None, 10, 1, 99, None),
        (1000, 99, 10, 1, 99, None),
        (1000, 100, 10, 2, 199, 99),  # 1 of 99 samples from the last epoch: kept apart
        (1000, 178, 10, 2, 199, None),  # 79 of 99 are not below int(0.8 * 99) = 79
        (1000, 177, 10, 2, 199, 99),
        (1, 3, 4, 13, 3, None),  # epochs shorter than a sample
        (2**40, 2**30, 1024, 2, 2**31 - 1, 2**30 - 1),
    ],
)
def test_plans(tokens: int, wanted: int | None, seq_length: int, epochs: int, samples: int, separate: int) -> None:
    plan = plan_epochs(tokens, wanted, seq_length)
    assert (plan.epochs, plan.samples, plan.separate_after) == (epochs, samples, separate)


def test_partial_sample_count_is_exact_above_2_to_24() -> None:
    # float32 would round 2^24 + 2 tokens down to 2^24.
    assert plan_epochs(2**24 + 2, None, 2, drop_last_partial=False).samples == 2**23 + 1


def test_many_tokens_need_64_bits() -> None:
    lengths = np.array([2**31 - 1, 2**31 - 1])
    bounds = sample_bounds(lengths, 3, 2**30, dtype=np.int64)
    assert bounds.tolist() == [[0, 0], [0, 2**30], [1, 1], [1, 2**30 + 1]]
