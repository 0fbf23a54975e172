"""The zigzag and the plan of the ring, without processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.context_parallel.ring import seen_at, seen_chunks
from lightning_megatron.context_parallel.zigzag import by_rank, chunks_of, in_order, split_context
from lightning_megatron.mesh import Axis

sizes = st.integers(2, 9)


def shards(length: int, size: int) -> list[list[int]]:
    positions = torch.arange(length)
    return [split_context(positions, Axis("cp", size, rank)).tolist() for rank in range(size)]


def test_four_ranks_hold_one_chunk_from_each_end():
    assert shards(16, 4) == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert [chunks_of(rank, 3) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


@given(size=sizes, chunk=st.integers(1, 4))
def test_every_token_is_held_once_and_all_have_as_many_to_look_at(size, chunk):
    held = shards(2 * size * chunk, size)
    assert sorted(position for shard in held for position in shard) == list(range(2 * size * chunk))
    assert len({sum(position + 1 for position in shard) for shard in held}) == 1


@given(size=sizes, chunk=st.integers(1, 4))
def test_order_of_ranks_and_order_of_the_sequence_turn_into_each_other(size, chunk):
    sequence = torch.arange(2 * size * chunk * 3).view(-1, 3)
    together = torch.cat([split_context(sequence, Axis("cp", size, rank)) for rank in range(size)])
    assert torch.equal(in_order(together, size), sequence)
    assert torch.equal(by_rank(sequence, size), together)


def test_any_dimension_can_be_split_and_what_does_not_split_is_refused():
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(split_context(tokens, Axis("cp", 2, 0), 1), tokens[:, [0, 1, 2, 9, 10, 11]])
    assert split_context(tokens, Axis("cp"), 1) is tokens
    with pytest.raises(ValueError, match="dimension 1 of length 12 does not split into 2 x cp = 8 chunks"):
        split_context(tokens, Axis("cp", 4, 0), 1)


@given(size=sizes, chunk=st.integers(1, 3), causal=st.booleans())
def test_the_steps_of_the_ring_see_what_the_mask_shows_each_pair_once(size, chunk, causal):
    length = 2 * chunk
    held = shards(length * size, size)
    for rank, queries in enumerate(held):
        pairs: list[tuple[int, int]] = []
        for source, keys in enumerate(held):
            seen = seen_at(rank, source, length, causal)
            rows, columns = queries[seen.queries], keys[seen.keys]
            # The mask of a step goes by place in the shard.
            pairs += [(q, k) for i, q in enumerate(rows) for j, k in enumerate(columns) if not seen.causal or j <= i]
        assert sorted(pairs) == [(q, k) for q in sorted(queries) for k in range(length * size) if k <= q or not causal]


@given(size=sizes, chunk=st.integers(1, 3), window=st.integers(1, 20))
def test_pairs_of_chunks_see_what_a_window_shows_each_pair_once_and_none_sees_nothing(size, chunk, window):
    length = 2 * chunk
    held = shards(length * size, size)
    for rank, queries in enumerate(held):
        pairs: list[tuple[int, int]] = []
        for source, keys in enumerate(held):
            for seen in seen_chunks(Axis("cp", size, rank), source, length, window):
                rows, columns = queries[seen.queries], keys[seen.keys]
                assert rows[0] - columns[0] == seen.first_query
                new = [(q, k) for q in rows for k in columns if 0 <= q - k < window]
                assert new
                pairs += new
        assert sorted(pairs) == [(q, k) for q in sorted(queries) for k in range(max(0, q - window + 1), q + 1)]


@given(size=sizes, chunk=st.integers(1, 3))
def test_under_a_causal_mask_every_step_after_the_first_costs_half(size, chunk):
    length = 2 * chunk
    for rank in range(size):
        for source in set(range(size)) - {rank}:
            seen = seen_at(rank, source, length, True)
            scores = len(range(length)[seen.queries]) * len(range(length)[seen.keys])
            assert scores == length * length // 2
