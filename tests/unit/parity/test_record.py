"""Outputs of layers over all ranks, from the sums of each rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_megatron.tools.parity.record import Sums, outputs_of


def sums(output: Tensor) -> Sums:
    return Sums(float(output.square().sum()), float(output.sum()), output.numel(), "signs")


def test_a_layer_has_one_size_whole_on_all_ranks_and_in_shards() -> None:
    whole = torch.randn(4, 6, dtype=torch.float64)
    shards = whole.chunk(2, dim=-1)
    group = (0, 1)
    found = outputs_of([(group, {"whole": sums(whole), "shard": sums(shards[rank])}) for rank in group])
    (alone,) = outputs_of([((0,), {"whole": sums(whole)})]).values()
    assert list(found) == ["whole", "shard"]
    assert found["whole"].spread == 0 < found["shard"].spread
    for output in found.values():
        assert output.shared_count(alone, 1e-9) == whole.numel()
        assert output.rms == pytest.approx(alone.rms)
        assert output.signed == pytest.approx(alone.signed)


def test_ranks_of_other_groups_may_differ() -> None:
    samples = torch.randn(2, 4, 6)
    found = outputs_of([((rank // 2 * 2, rank // 2 * 2 + 1), {"fc": sums(samples[rank // 2])}) for rank in range(4)])
    assert found["fc"].spread == 0
    assert found["fc"].count == 2 * samples.numel()
