"""Operators of ours in graphs of ``torch.compile``: what torch asks of an operator, and the numbers of eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, library, nn

from lightning_megatron.ops.attention import attention_cpu
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.cpu import graph_operators, onednn
from lightning_megatron.ops.matmul import linear
from lightning_megatron.testing.parity import assert_same

needs_onednn = pytest.mark.skipif(onednn._operator() is None, reason="this torch has no such operator of oneDNN")
HEADS = {"equal heads": (4, 4, 2), "grouped heads": (4, 2, 2), "one sequence": (4, 2, 1), "one head": (1, 1, 1)}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def operands(heads: str, dtype: torch.dtype, queries: int = 40, keys: int = 40) -> list[Tensor]:
    n, groups, batch = HEADS[heads]
    sizes = ((queries, n), (keys, groups), (keys, groups))
    return [random(length, batch, number, 8, dtype=dtype).requires_grad_() for length, number in sizes]


def compiled(function: Any, operators: list[str]) -> Any:
    """``function`` as one graph; names of our operators in it are put into the list."""

    def backend(graph: Any, _: Any) -> Any:
        nodes = [n for part in graph.modules() if isinstance(part, torch.fx.GraphModule) for n in part.graph.nodes]
        operators.extend(str(n.target) for n in nodes if "lightning_megatron" in str(n.target))
        return graph.forward

    torch.compiler.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
"""Schema, gradients, strides of results without values; torch's other check traces with sizes that vary."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_attention_is_an_operator_as_torch_defines_it(heads: str, dtype: torch.dtype) -> None:
    q, k, v = operands(heads, dtype)
    plain = [x.detach() for x in (torch.ones_like(q), q, k, v)]
    for first_query in (0, None):
        library.opcheck(graph_operators.attention_blocks, (q, k, v, first_query), test_utils=QUICK)
        library.opcheck(graph_operators.attention_blocks_backward, (*plain, first_query), test_utils=QUICK)


@pytest.mark.slow
def test_attention_is_traced_with_sizes_that_vary() -> None:
    library.opcheck(graph_operators.attention_blocks, (*operands("grouped heads", torch.float32), 0))


@needs_onednn
@pytest.mark.parametrize("bias", [None, 6], ids=["no bias", "bias"])
def test_a_product_by_onednn_is_an_operator_as_torch_defines_it(bias: int | None) -> None:
    for x in (random(7, 8), random(3, 4, 8)):
        for weight in (random(6, 8), random(8, 6).t()):
            given = None if bias is None else random(bias)
            library.opcheck(graph_operators.linear_onednn, (x, weight, given))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all keys"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_in_a_graph_has_the_bits_of_eager_mode(dtype: torch.dtype, causal: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_cpu(q, k, v, AttentionCall(causal=causal, first_query=5 if causal else 0))

    tensors, operators = operands("grouped heads", dtype, keys=45), []
    dy = random(40, 2, 4, 8, dtype=dtype)
    found = []
    for function in (run, compiled(run, operators)):
        out = function(*tensors)
        found.append([out.detach(), *torch.autograd.grad(out, tensors, dy)])
    assert operators == ["lightning_megatron.attention_blocks.default"]
    for eager, graph in zip(*found, strict=True):
        assert torch.equal(eager, graph)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_a_linear_layer_in_a_graph_multiplies_by_onednn(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_MISSING", None)
    monkeypatch.setattr(onednn, "SMALLEST", 1)
    leaves = [random(7, 3, 32), nn.Parameter(random(40, 32)), *([nn.Parameter(random(40))] if bias else [])]
    leaves[0].requires_grad_()
    dy, operators = random(7, 3, 40), []

    def gradients(function: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in leaves]
        out = function(*inputs)
        found = torch.autograd.grad(out, inputs, dy.to(dtype))
        return {"out": out.detach(), **{f"d{i}": grad for i, grad in enumerate(found)}}

    in_graph = gradients(compiled(linear, operators), torch.float32)
    assert_same(in_graph, gradients(linear, torch.float64), rtol=1e-6)
    assert_same(in_graph, gradients(linear, torch.float32), rtol=1e-6)
    assert operators == ["lightning_megatron.linear_onednn.default"] * 2, "forward and gradient of the input"
