"""Windows over long texts: each token once, with as much before it as is promised, as Megatron-LM cuts them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.tools.evaluation.windows import Window, collate, groups, windows

LENGTHS = st.integers(1, 12)


@given(size=st.integers(0, 60), length=LENGTHS, data=st.data())
def test_every_token_but_the_first_is_predicted_once_with_the_tokens_promised(size, length, data):
    stride = data.draw(st.integers(1, length))
    found = list(windows(range(size), length, stride))
    predicted = [(token, len(w.tokens)) for w in found for token in w.tokens[len(w.tokens) - w.asked :]]
    assert [token for token, _ in predicted] == list(range(1, size))
    for window in found:
        assert 1 <= window.asked < len(window.tokens) <= length + 1
        first = window.tokens[len(window.tokens) - window.asked]
        assert first - window.tokens[0] >= min(first, length - stride + 1), "tokens before the first that is asked for"


@given(size=st.integers(2, 60), length=LENGTHS, data=st.data())
def test_windows_and_masks_are_megatrons(size, length, data):
    """Megatron-LM counts windows by a formula and masks them one by one."""
    stride = data.draw(st.integers(1, length))
    expected = []
    targets = size - 1
    for number in range(max(-(-max(targets - stride, 0) // stride) + 1, 1)):
        start = number * stride
        mask = [start + i + 1 < size for i in range(length)]
        if stride != length and number:
            mask[: length - stride] = [False] * (length - stride)
        asked = [start + i + 1 for i in range(length) if mask[i]]
        if asked:
            expected.append((start, asked))
    found = [(w.tokens[0], list(w.tokens[len(w.tokens) - w.asked :])) for w in windows(range(size), length, stride)]
    assert found == expected


def test_batches_are_filled_up_where_no_label_asks():
    batch = collate([Window([5, 6, 7, 8], 2), Window([1, 2], 1)], 10)
    assert batch["tokens"].tolist() == [[5, 6, 7] + [0] * 7, [1] + [0] * 9]
    assert batch["labels"].tolist() == [[-100, 7, 8] + [-100] * 7, [2] + [-100] * 9]
    assert collate([Window(range(65), 64)], 200)["tokens"].shape == (1, 64)
    assert collate([Window(range(66), 65)], 200)["tokens"].shape == (1, 128)
    assert collate([Window(range(66), 65)], 100)["tokens"].shape == (1, 100)
    assert torch.equal(collate([Window(range(4), 3)], 3)["labels"], torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize(("count", "size", "lengths"), [(0, 3, []), (3, 3, [3]), (7, 3, [3, 3, 1])])
def test_groups(count, size, lengths):
    assert [len(some) for some in groups(range(count), size)] == lengths
