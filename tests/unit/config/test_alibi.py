"""Slopes of ALiBi: the paper's, and those of transformers' BLOOM for numbers of heads that are no power of two."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.config.score_rule import alibi_slopes


def test_slopes_of_a_power_of_two_are_the_papers() -> None:
    assert alibi_slopes(1) == (2.0**-8,)
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(16) == tuple(2.0 ** (-i / 2) for i in range(1, 17))


def test_between_two_powers_of_two_every_other_slope_of_the_next_one_follows() -> None:
    assert alibi_slopes(6) == (*alibi_slopes(4), *alibi_slopes(8)[:4:2])
    assert alibi_slopes(112) == (*alibi_slopes(64), *alibi_slopes(128)[: 2 * 48 : 2])


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 8, 12, 16, 25, 32, 40, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mask = torch.ones(1, 2)
    theirs = bloom.build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]  # of the second key: the slope itself
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), theirs, rtol=1e-6, atol=0.0)
