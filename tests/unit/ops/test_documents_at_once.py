"""Attention inside of packed documents by torch's ``varlen_attn``, against a call for each length.

The operators behind it are those of CUDA; here a CPU computes them by their definition (``tests/flash_on_cpu.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from flash_on_cpu import flash_on_cpu
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.config.score_rule import PLAIN, ScoreRule
from lightning_megatron.documents import Documents
from lightning_megatron.ops import attention as ops
from lightning_megatron.ops.attention import attention_reference, document_attention, documents_by_length
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.flash import kernel_order
from lightning_megatron.ops.flash.varlen_attention import lacks_varlen, varlen_documents
from lightning_megatron.ops.registry import Ops
from lightning_megatron.testing.parity import assert_same

DOCUMENTS = Documents((((0, 3), (3, 9)), ((2, 5), (5, 6), (7, 12))), 12)
"""Padding at the end, at the beginning and within."""
needs_varlen = pytest.mark.skipif(lacks_varlen() is not None, reason=str(lacks_varlen()))


@pytest.fixture(autouse=True)
def _operators() -> Iterator[None]:
    with flash_on_cpu():
        yield


def results(op: Any, first_query: int, rule: ScoreRule) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    shapes = [(12, 2, heads, 8) for heads in (6, 2, 2, 6)]
    *leaves, grad = (torch.randn(shape, generator=draw).double() for shape in shapes)
    leaves = [x.requires_grad_() for x in leaves]
    call = AttentionCall(causal=True, documents=DOCUMENTS, first_query=first_query, rule=rule)
    out = op(leaves[0][first_query:], *leaves[1:], call)
    out.backward(grad[first_query:])
    return {"out": out.detach()} | {name: x.grad for name, x in zip("qkv", leaves, strict=True) if x.grad is not None}


@needs_varlen
@pytest.mark.parametrize("rule", [PLAIN, ScoreRule(0.4), ScoreRule(window=3)], ids=str)
@pytest.mark.parametrize("first_query", [0, 4])
def test_one_call_gives_output_and_gradients_of_a_call_for_each_length(first_query: int, rule: ScoreRule) -> None:
    found = results(varlen_documents, first_query, rule)
    assert_same(found, results(partial(documents_by_length, attention_reference), first_query, rule), rtol=1e-6)


class Calls(TorchDispatchMode):
    """Counts calls of kernels of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func) or "varlen" in str(func):
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


@needs_varlen
def test_twenty_lengths_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for each length takes twenty, and cuDNN makes a plan for each."""
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda asked: True)
    ends = [sum(range(1, n + 1)) for n in range(21)]
    documents = Documents((tuple(pairwise(ends)),), ends[-1])
    x = torch.randn(ends[-1], 1, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    choice = Ops("cuda").choose("attention")
    attend = document_attention(choice, "cuda", "auto")
    with Calls() as calls:
        attend(x, x, x, AttentionCall(documents=documents, causal=True)).sum().backward()
    assert sum(count for name, count in calls.found.items() if name.startswith("torch_attn")) == 2
    assert choice.fallbacks == {"packed documents": "varlen_attn"}
    wide = x.detach().float()
    attend(wide, wide, wide, AttentionCall(documents=documents, causal=True))
    assert choice.fallbacks["torch.float32"] == "a call for each length"


def test_a_call_for_each_length_leaves_cudnn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the card has no kernel for all documents at once, and where it is switched off."""
    monkeypatch.setattr(kernel_order, "capability", lambda device_type: (9, 0))
    seen: list[bool] = []

    def look(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return torch.empty_like(q)

    monkeypatch.setattr(ops.F, "scaled_dot_product_attention", look)
    x = torch.randn(12, 2, 2, 8, dtype=torch.float16)
    for mode in ("auto", "off"):
        attend = document_attention(Ops("cuda").choose("attention"), "cuda", mode)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
            attend(x, x, x, AttentionCall(documents=DOCUMENTS, causal=True))
    assert seen == [False] * len(seen)
    assert len(seen) == 8  # a call for each of four lengths
