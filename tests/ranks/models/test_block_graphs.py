"""Graphs and breaks of a compiled block in every layout on a CPU; ``tests/device`` has those of the simulation.

Each number is one graph of two equal blocks. If a number grows, a change of ours has broken a graph: the reasons are in
the message.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron import device as devices
from lightning_megatron.lightning.compat._private import CompilerCounts
from lightning_megatron.testing.block_graphs import CASES, Case, count, gradients

GRAPHS_AND_BREAKS = {
    "tp 1": (1, 0),
    "tp 1, bf16": (1, 0),
    "tp 1, GPT with dropout": (1, 0),
    "tp 1, recompute selective": (1, 0),
    "tp 1, recompute mlp": (1, 0),
    "tp 2": (6, 13),
    "tp 2, sequence parallel": (6, 13),
    "tp 2, sequence parallel, recompute selective": (6, 13),
    "cp 2, a2a": (1, 0),
    "cp 2, p2p": (9, 12),
    "experts, moe_dynamic": (4, 4),
    "experts, capacity bins": (4, 4),
}

pytestmark = [
    pytest.mark.skipif(devices.best_available().type != "cpu", reason="the numbers are a CPU's"),
    pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another torch breaks graphs elsewhere"),
    pytest.mark.slow,
]


RARELY = ("tp 2", "tp 2, sequence parallel, recompute selective", "cp 2, a2a")
"""Their graphs are those of others, or of one rank."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=pytest.mark.exhaustive if each.name in RARELY else ()) for each in CASES],
    ids=lambda case: case.name,
)
def test_a_compiled_block_computes_the_same_in_as_few_graphs_as_before(ranks: Any, case: Case) -> None:
    found = ranks(case.ranks, counted, case)
    # On a ring the ranks see other parts of the keys: the one with most graphs is looked at.
    most = max(found, key=lambda counts: counts.graphs)
    assert (most.graphs, sum(most.breaks.values())) == GRAPHS_AND_BREAKS[case.name], list(most.breaks)


def counted(case: Case) -> CompilerCounts:
    """Graphs and breaks of a block, with the loss and gradients of one that is not compiled."""
    found = count(case, "cpu", ("block",))["block"]
    plain, compiled = gradients(case, None, "cpu"), gradients(case, "block", "cpu")
    near = {"rtol": 2**-6, "atol": 2**-9} if case.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    assert all(grad.any() for grad in plain.values())
    torch.testing.assert_close(compiled, plain, **near)
    return found
