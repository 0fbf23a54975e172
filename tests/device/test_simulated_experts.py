"""Kernels of the simulated experts' operator: refusals, the division of rows into chunks, counters."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from simulated_hpu import calls
from simulated_hpu.ops.experts import chunks
from simulated_hpu.settings import settings
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronHPUStrategy, MixtralModule
from lightning_megatron.testing.trainer import quiet_trainer

UNIT = settings().product.expert_chunk_rows
ranged = pytest.mark.skipif(
    settings().is_old or (settings().profile == "1.22" and not settings().is_lazy),
    reason="this version's kernel with gradients multiplies every token by all experts",
)


def call(table: Tensor, first: int, last: int) -> Tensor:
    """Experts of two features, all matrices ones."""
    x, ones = torch.ones(len(table), 2, device="hpu"), torch.ones(2, 2, device="hpu")
    lists = [[ones] * (last - first + 1)] * 3
    found: Tensor = torch.ops.hpu.mixture_of_experts(
        x, table.to("hpu"), torch.ones(table.shape, device="hpu"), *lists, True, "relu", first, last
    )
    return found


@ranged
def test_an_id_twice_in_one_token_is_refused():
    with pytest.raises(RuntimeError, match=r"token 1 is sent to an expert twice: \[2, 2\]"):
        call(torch.tensor([[1, 2], [2, 2]]), 1, 2)


@ranged
def test_more_rows_than_the_chunks_hold_are_refused():
    """So it is where every choice of other ranks is handed to expert 0."""
    with pytest.raises(RuntimeError, match=rf"rows \[{3 * UNIT}, 0\] need 3 chunks of {UNIT}, and there are 2"):
        call(torch.zeros(UNIT, 3, dtype=torch.int64), 0, 1)


@ranged
def test_rows_are_counted_that_lie_in_the_range():
    calls.reset()
    found = call(torch.tensor([[1, 2], [0, 3], [3, 3], [2, 0]]), 1, 2)
    assert found.cpu().tolist() == [[16.0] * 2, [0.0] * 2, [0.0] * 2, [8.0] * 2]
    assert calls.expert_rows() == {"ranged": 3}


def test_a_small_batch_has_one_chunk_an_expert():
    assert {"GAUDI2": 256, "GAUDI3": 512}[settings().device_name] == UNIT
    assert chunks(UNIT, 2, 4) == (UNIT, 4)
    assert chunks(1, 2, 4) == (UNIT, 2), "no more than choices"
    assert chunks(UNIT + 1, 2, 4) == (UNIT, 4 * 2)


def test_a_large_batch_has_chunks_for_any_distribution():
    size, number = chunks(64 * UNIT, 2, 4)
    assert size * number >= 2 * 64 * UNIT + 4 * size
    assert size == 4 * UNIT


def test_distinct_experts_always_fit():
    """In the worst distribution: one row in a chunk of each expert, and the others in full chunks."""
    for tokens, choices, experts in product((1, 3, UNIT, UNIT + 1, 5 * UNIT + 1, 64 * UNIT), (1, 2, 8), (1, 2, 8, 64)):
        size, held = chunks(tokens, choices, experts)
        begun = min(experts, choices * tokens)
        full = min((choices * tokens - begun) // size, begun * ((tokens - 1) // size))
        assert begun + full <= held, (tokens, choices, experts)


@ranged
@pytest.mark.parametrize("tokens", [1, UNIT, UNIT + 1])
def test_a_batch_of_distinct_experts_is_taken(tokens):
    call(torch.tensor([[0, 1]]).repeat(tokens, 1), 0, 1)


def test_a_run_whose_routing_decides_shapes_is_told_so():
    sizes = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 16, "num_attention_heads": 4, "vocab_size": 40}
    module = MixtralModule("mixtral-tiny", **sizes)
    rows = [{"tokens": torch.arange(8), "labels": torch.arange(8)}] * 2
    with pytest.warns(UserWarning, match="moe_token_dispatcher='alltoall' without capacities: the number of rows"):
        quiet_trainer(MegatronHPUStrategy(), max_steps=1).fit(module, DataLoader(rows, batch_size=2))
