"""Attention by kernels of CUDA against plain torch in fp64: parts with their log-sum-exp, windows, documents, masks.

Needs a card: ``pytest -p lightning_megatron.testing.one_card --one-card tests/cuda``. Nothing here has run on one yet.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.config.score_rule import PLAIN, ScoreRule
from lightning_megatron.documents import Documents
from lightning_megatron.ops.attention import attention_reference, document_attention
from lightning_megatron.ops.blockwise_attention import (
    FLASH,
    PartialAttention,
    flash_attention,
    merge_partials_,
    row_dot,
)
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.flash.varlen_attention import lacks_varlen
from lightning_megatron.ops.registry import Ops
from lightning_megatron.testing import one_card
from lightning_megatron.testing.parity import assert_same

pytestmark = pytest.mark.skipif(not one_card.enabled(), reason="needs a CUDA card and --one-card")

LENGTH, ROUNDING = 192, 2**-6


def leaves(length: int = LENGTH) -> list[Tensor]:
    """Queries of eight heads, keys and values of two groups, gradient of the output."""
    draw = torch.Generator().manual_seed(4)
    return [torch.randn(length, 2, n, 64, generator=draw).to("cuda", torch.bfloat16) for n in (8, 2, 2, 8)]


def results(op: Any, dtype: torch.dtype, first_query: int = 0, **how: Any) -> dict[str, Tensor]:
    *given, grad = (x.to(dtype) for x in leaves())
    q, k, v = (x.requires_grad_() for x in given)
    out = op(q[first_query:], k, v, AttentionCall(causal=True, first_query=first_query, **how))
    grads = torch.autograd.grad(out, (q, k, v), grad[first_query:])
    return {"out": out.detach()} | dict(zip("qkv", grads, strict=True))


@pytest.mark.parametrize("first_query", [0, 64])
@pytest.mark.parametrize("rule", [PLAIN, ScoreRule(0.05), ScoreRule(window=1), ScoreRule(window=70)], ids=str)
def test_flash_with_its_log_sum_exp_is_plain_attention(rule: ScoreRule, first_query: int) -> None:
    found = results(flash_attention, torch.bfloat16, first_query, rule=rule)
    expected = results(attention_reference, torch.float64, first_query, rule=rule)
    assert_same(found, expected, rtol=ROUNDING)


@pytest.mark.parametrize("window", [0, 70])
def test_parts_of_the_keys_merge_to_all_of_them(window: int) -> None:
    """Three chunks of keys, of which the last queries have left the first where there is a window."""
    q, k, v, grad = leaves()
    rule, size = ScoreRule(window=window), LENGTH // 3
    cuts = [slice(i * size, (i + 1) * size) for i in range(3)]
    pairs = [(rows, keys) for rows in cuts for keys in cuts if keys.start <= rows.start]
    whole = PartialAttention.nothing(q, 64)

    def call(rows: slice, keys: slice) -> AttentionCall:
        return AttentionCall(causal=True, first_query=rows.start - keys.start, rule=rule)

    for rows, keys in pairs:
        part = FLASH.forward(q[rows], k[keys], v[keys], call(rows, keys))
        merge_partials_(PartialAttention(whole.out[rows], whole.lse[rows]), part)
    out, delta = whole.out.to(q.dtype), row_dot(whole.out, grad)
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for rows, keys in pairs:
        of_rows = PartialAttention(out[rows], whole.lse[rows]), delta[rows]
        parts = FLASH.backward(grad[rows], q[rows], k[keys], v[keys], *of_rows, call(rows, keys))
        for total, place, part in zip(grads, (rows, keys, keys), parts, strict=True):
            total[place] += part
    expected = results(attention_reference, torch.float64, rule=rule)
    assert_same({"out": out, **dict(zip("qkv", grads, strict=True))}, expected, rtol=ROUNDING)


@pytest.mark.skipif(lacks_varlen() is not None, reason=str(lacks_varlen()))
@pytest.mark.parametrize("rule", [PLAIN, ScoreRule(window=9)], ids=str)
def test_documents_in_one_call_are_those_of_a_call_for_each_length(rule: ScoreRule) -> None:
    documents = Documents((((0, 50), (50, 51), (60, 192)), ((3, 192),)), LENGTH)
    at_once, by_length = (document_attention(Ops("cuda").choose("attention"), "cuda", m) for m in ("auto", "off"))
    found = results(at_once, torch.bfloat16, documents=documents, rule=rule)
    assert_same(found, results(by_length, torch.float64, documents=documents, rule=rule), rtol=ROUNDING)


@pytest.mark.parametrize("length", [64, 192, 320])
def test_a_sample_of_padding_only_has_finite_gradients(length: int) -> None:
    """Lengths that leave 64 over 128, at which cuDNN's backward gave NaN (torch#196678)."""
    *given, grad = leaves(length)
    q, k, v = (x.requires_grad_() for x in given)
    mask = torch.ones(2, length, dtype=torch.bool, device="cuda")
    mask[1] = False
    out = Ops("cuda").choose("attention").run(q, k, v, AttentionCall(causal=False, key_mask=mask))
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, (q, k, v), grad))


def test_deterministic_gradients_repeat_bit_for_bit() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        attend = Ops("cuda").choose("attention").run
        first, second = (results(attend, torch.bfloat16) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)
