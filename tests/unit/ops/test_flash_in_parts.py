"""Attention by the flash operators, whole and in parts, against plain torch in fp64.

The operators are those of CUDA; here a CPU computes them by their definition (``tests/flash_on_cpu.py``), so that what
is proven are masks, windows, the merge of parts and their gradients. Nothing of it ran on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from flash_on_cpu import flash_on_cpu
from torch import Tensor

from lightning_megatron.config.score_rule import PLAIN, ScoreRule
from lightning_megatron.ops.attention import ATTENTION, IN_PARTS, attention_reference
from lightning_megatron.ops.blockwise_attention import FLASH, PARTS, blockwise_attention, flash_attention
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.registry import Ops
from lightning_megatron.testing.parity import assert_same


@pytest.fixture(autouse=True)
def _operators() -> Iterator[None]:
    with flash_on_cpu():
        yield


class Case(NamedTuple):
    queries: int
    keys: int
    first_query: int = 0
    causal: bool = True
    rule: ScoreRule = PLAIN


CASES = {
    "causal": Case(9, 9),
    "not causal": Case(5, 11, causal=False),
    "later queries": Case(4, 12, 8),
    "later queries, more keys": Case(4, 16, 6),
    "queries beyond all keys": Case(5, 7, 4),
    "queries behind all keys": Case(4, 6, 9),
    "more queries than keys": Case(9, 4),
    "a window": Case(13, 13, rule=ScoreRule(window=4)),
    "a window of one": Case(5, 5, rule=ScoreRule(window=1)),
    "a window longer than all": Case(5, 5, rule=ScoreRule(window=9)),
    "a window, later queries": Case(5, 12, 7, rule=ScoreRule(window=3)),
    "a window over two chunks": Case(6, 6, 6, rule=ScoreRule(window=5)),
    "a window that some queries have left": Case(6, 6, 9, rule=ScoreRule(window=7)),
    "a window and a scale": Case(9, 9, rule=ScoreRule(0.7, window=3)),
    "sinks": Case(9, 9, rule=ScoreRule(has_sinks=True)),
    "sinks and a window": Case(9, 9, rule=ScoreRule(window=4, has_sinks=True)),
}


def results(op: Any, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and all gradients, of six heads in two groups."""
    draw = torch.Generator().manual_seed(1)
    shapes = [(case.queries, 2, 6, 8), (case.keys, 2, 2, 8), (case.keys, 2, 2, 8), (6,), (case.queries, 2, 6, 8)]
    *leaves, grad = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    leaves = [x.requires_grad_() for x in leaves]
    sinks = leaves[3] if case.rule.has_sinks else None
    call = AttentionCall(causal=case.causal, first_query=case.first_query, rule=case.rule, sinks=sinks)
    out = op(*leaves[:3], call)
    out.backward(grad)
    return {"out": out.detach()} | {str(i): x.grad for i, x in enumerate(leaves) if x.grad is not None}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_output_and_gradients_are_those_of_plain_attention(case: Case) -> None:
    found = results(flash_attention, case, torch.float64)
    assert_same(found, results(blockwise_attention, case, torch.float64), rtol=1e-12)
    oldest = case.first_query + case.queries - case.rule.window  # that the last query sees
    if not case.rule.window or oldest < case.keys:  # the definition makes NaN of a query without keys
        assert_same(found, results(attention_reference, case, torch.float64), rtol=1e-6)


def test_a_window_that_no_query_has_a_key_in_gives_zeros() -> None:
    found = results(flash_attention, Case(4, 4, 20, rule=ScoreRule(window=5)), torch.float64)
    assert not any(x.any() for x in found.values())


def test_cuda_takes_flash_for_windows_sinks_scales_and_later_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel in place of blocks, or of a mask ``[S, T]``; what the kernel cannot is told in the op report."""
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda asked: True)
    x = torch.randn(16, 1, 2, 8, dtype=torch.bfloat16)
    choice = Ops("cuda").choose("attention")
    for rule in (ScoreRule(window=4), ScoreRule(0.3), ScoreRule(has_sinks=True)):
        choice.run(x, x, x, AttentionCall(causal=True, rule=rule, sinks=torch.zeros(2) if rule.has_sinks else None))
    choice.run(x[8:], x, x, AttentionCall(causal=True, first_query=8))
    told = {"a window of 4", "scores times 0.3", "sinks", "queries that begin later than the keys"}
    assert choice.fallbacks == dict.fromkeys(told, "flash with its log-sum-exp")
    choice.run(x, x, x, AttentionCall(causal=True, rule=ScoreRule(softcap=5.0)))
    assert choice.fallbacks["scores capped at 5"] == "block by block"
    wide = Ops("cuda").choose("attention")
    wide.run(x.float(), x.float(), x.float(), AttentionCall(causal=True, rule=ScoreRule(window=4)))
    assert wide.fallbacks["a window of 4"] == "block by block"


def test_parts_on_cuda_are_merged_from_flash_where_the_call_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda asked: True)
    x = torch.randn(16, 1, 2, 8, dtype=torch.bfloat16)
    choice = PARTS.choose("cuda")
    assert choice.run(x, x, x, AttentionCall(causal=True)) is FLASH
    assert choice.fallbacks == {}
    assert choice.run(x, x, x, AttentionCall(causal=False, key_mask=torch.ones(1, 16, dtype=torch.bool))) is not FLASH
    assert choice.fallbacks == {"padding among the keys": "block by block"}
    gathered = IN_PARTS.choose("cuda")
    gathered.run(x[8:], x, x, AttentionCall(causal=True, first_query=8))
    assert gathered.fallbacks == {}


def test_a_kernel_that_the_card_lacks_or_the_user_has_switched_off_is_not_taken() -> None:
    x = torch.randn(16, 1, 2, 8, dtype=torch.bfloat16)
    assert ATTENTION.name == PARTS.name == IN_PARTS.name == "attention"
    choice = PARTS.choose("cuda")
    assert choice.run(x, x, x, AttentionCall(causal=True)) is not FLASH  # this is a CPU
    assert choice.fallbacks == {"torch's flash kernel is not available": "block by block"}
