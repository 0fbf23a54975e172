"""Search for NaN and infinity by sums of rows, against torch's check of each element."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.device.finite import first_bad_row, is_finite


@pytest.mark.parametrize("length", [3, 4, 8, 10, 11])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_element_is_found_in_its_row_wherever_it_is(length: int, bad: float) -> None:
    row, clean = 4, torch.ones(length)
    assert bool(first_bad_row(clean, row)[0])
    for place in range(length):
        values = clean.clone()
        values[place] = bad
        fine, found = first_bad_row(values, row)
        assert not fine
        assert int(found) == int((~values.isfinite()).nonzero()[0]) // row
        assert not is_finite(values)
