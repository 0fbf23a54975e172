"""Products of bf16 operands where a processor has no arithmetic for bf16: what is chosen, and that no digit is lost.

``native=False`` is such a processor, ``native=True`` is one with the arithmetic: both are tested on any machine.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.device import has_bf16_arithmetic
from lightning_megatron.device.arithmetic import cpu_capabilities
from lightning_megatron.layers.cross_entropy import linear_cross_entropy
from lightning_megatron.mesh import Axis
from lightning_megatron.ops.grouped_linear import batched_linear, grouped_linear
from lightning_megatron.ops.matmul import (
    FEW,
    linear,
    matmul,
    matmul_fp32,
    product,
    product_reference,
    upcasts,
)
from lightning_megatron.testing.parity import assert_same

N, IN, OUT = 48, 32, 40
HALF_UNIT = 2**-8  # what rounding to bf16 once may change, relative
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_bf16": False, "amx_bf16": True}, True),
        ({"neon": True, "bf16": False}, False),
        ({"neon": True, "bf16": True}, True),
        ({"architecture": "ppc64le"}, True),
        ({}, True),
    ],
)
def test_a_processor_says_whether_it_has_arithmetic_for_bf16_and_silence_changes_nothing(capabilities, expected):
    assert has_bf16_arithmetic(CPU, capabilities) is expected


def test_accelerators_have_it_and_a_torch_that_cannot_say_counts_as_native():
    assert has_bf16_arithmetic(torch.device("cuda"), {"avx512_bf16": False})
    assert has_bf16_arithmetic(torch.device("hpu"), {"avx512_bf16": False})
    assert cpu_capabilities(SimpleNamespace()) == {}
    assert cpu_capabilities(SimpleNamespace(get_capabilities=lambda: {"bf16": False})) == {"bf16": False}
    assert has_bf16_arithmetic(CPU, cpu_capabilities(SimpleNamespace()))
    assert has_bf16_arithmetic(CPU) is has_bf16_arithmetic(CPU, cpu_capabilities())


def test_only_bf16_of_some_size_on_a_device_without_arithmetic_for_it_is_widened():
    a, b = random(N, IN), random(IN, OUT)
    assert upcasts(a, b, native=False)
    assert not upcasts(a, b, native=True)
    assert not upcasts(a.float(), b.float(), native=False)
    assert not upcasts(a.half(), b.half(), native=False)
    assert not upcasts(a, b.float(), native=False)
    assert not upcasts(a[: FEW - 1], b, native=False)
    assert upcasts(a[:FEW].view(2, -1, IN), b, native=False)
    assert not upcasts(a[: FEW - 2].view(2, -1, IN), random(2, IN, OUT), native=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert not upcasts(a, b, native=False)


def test_a_widened_product_is_the_fp32_product_rounded_once_and_the_native_one_is_torchs():
    a, b = random(4, N, IN), random(IN, OUT)
    exact = a.float() @ b.float()
    assert torch.equal(product(a, b, native=False), exact)
    assert torch.equal(matmul(a, b, native=False), exact.bfloat16())
    assert torch.equal(product(a, b, native=True), a @ b)
    assert_same({"native": product_reference(a, b)}, {"native": exact}, rtol=HALF_UNIT)


@pytest.mark.parametrize("block_bytes", [4 * IN, 1000, 1 << 20])
def test_a_large_operand_is_widened_block_by_block(block_bytes):
    for a, b in ((random(2, N, IN), random(IN, OUT)), (random(N, OUT), random(OUT, IN))):
        blocked = matmul_fp32(a, b, block_bytes=block_bytes)
        torch.testing.assert_close(blocked.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_a_widened_linear_layer_and_its_gradients_equal_fp64_rounded_once(blocks, bias):
    shape = (OUT,) if blocks == 1 else (blocks, OUT // blocks)
    inputs = [random(3, N // 3, IN), random(*shape, IN), *([random(*shape)] if bias else [])]
    dy = random(3, N // 3, OUT, seed=1)

    def run(leaves: list[Tensor], dy: Tensor, **choice: bool) -> dict[str, Tensor]:
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        out = linear(*leaves, **choice)
        out.backward(dy)
        return {"out": out.detach(), **{f"d{i}": leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None}}

    narrow, truth = run(inputs, dy, native=False), run([x.double() for x in inputs], dy.double())
    assert all(x.dtype == torch.bfloat16 for x in narrow.values())
    for name, expected in truth.items():
        torch.testing.assert_close(narrow[name].double(), expected, rtol=HALF_UNIT, atol=1e-5)
    assert_same(run(inputs, dy, native=True), truth, rtol=2 * HALF_UNIT)
    x, weight, *biases = inputs
    flat = F.linear(x, weight.flatten(0, -2), *(b.flatten() for b in biases))
    assert torch.equal(linear(*inputs, native=True), flat)


def test_a_parameter_that_accumulates_in_fp32_gets_gradients_that_were_never_rounded():
    weight = nn.Parameter(random(OUT, IN))
    if not hasattr(weight, "grad_dtype"):
        pytest.skip("this torch accumulates in the parameter's dtype")
    weight.grad_dtype = torch.float32
    x, dy = random(N, IN), random(N, OUT)
    linear(x, weight, native=False).backward(dy)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, dy.float().t() @ x.float())


def test_the_backward_of_a_widened_layer_keeps_no_wide_copy():
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        linear(random(N, IN), nn.Parameter(random(OUT, IN)), native=False)
    assert {x.dtype for x in kept} == {torch.bfloat16}


def test_what_needs_no_gradient_gets_none():
    x, weight, bias = random(N, IN), random(OUT, IN), random(OUT).requires_grad_()
    linear(x, weight, bias, native=False).sum().backward()
    assert x.grad is None
    assert weight.grad is None
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((OUT,), float(N)).bfloat16())


@pytest.mark.parametrize("rows", [3, 24])
def test_batched_experts_equal_one_layer_after_the_other(rows):
    x, weight, dy = random(3, rows, IN), random(3, OUT, IN), random(3, rows, OUT, seed=1)

    def run(dtype: torch.dtype) -> dict[str, Tensor]:
        a, w = (t.to(dtype).requires_grad_() for t in (x.clone(), weight.clone()))
        a.retain_grad()
        out = batched_linear(a, w)
        dx, dw = torch.autograd.grad(out, (a, w), dy.to(dtype))
        return {"out": out.detach(), "dx": dx, "dw": dw}

    a, w = x.double().requires_grad_(), weight.double().requires_grad_()
    out = torch.stack([F.linear(a_e, w_e) for a_e, w_e in zip(a, w, strict=True)])
    dx, dw = torch.autograd.grad(out, (a, w), dy.double())
    truth = {"out": out.detach(), "dx": dx, "dw": dw}
    assert_same(run(torch.float64), truth, rtol=1e-12)
    assert_same(run(torch.bfloat16), truth, rtol=HALF_UNIT)


def test_groups_of_any_length_may_mix_widths():
    counts = [2, 0, 30, 16]
    x, weight = random(N, IN).requires_grad_(), random(4, OUT, IN).requires_grad_()
    dy = random(N, OUT, seed=1)
    out = grouped_linear(x, weight, counts)
    dx, dw = torch.autograd.grad(out, (x, weight), dy)
    wide = [(r.double(), w.double(), g.double()) for r, w, g in zip(
        x.detach().split(counts), weight.detach(), dy.split(counts), strict=True)]  # fmt: skip
    truth = {
        "out": torch.cat([r @ w.t() for r, w, _ in wide]),
        "dx": torch.cat([g @ w for _, w, g in wide]),
        "dw": torch.stack([g.t() @ r for r, _, g in wide]),
    }
    assert_same({"out": out.detach(), "dx": dx, "dw": dw}, truth, rtol=HALF_UNIT)


def test_the_head_of_a_narrow_model_loses_no_digit_between_its_chunks(monkeypatch):
    """On a processor without arithmetic for bf16; another one makes the logits in bf16."""
    monkeypatch.setattr("lightning_megatron.ops.matmul.multiplies_bf16", lambda device: False)
    hidden, weight, labels = random(N, IN), random(OUT, IN), torch.arange(N) % OUT
    mean = torch.full((N,), 1 / N)

    def run(dtype: torch.dtype, chunk_bytes: int) -> dict[str, Tensor]:
        x, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        loss = linear_cross_entropy(x, w, labels, mean, Axis("tp"), OUT, chunk_bytes=chunk_bytes)
        dx, dw = torch.autograd.grad(loss, (x, w))
        return {"loss": loss.detach(), "dx": dx, "dw": dw}

    for chunk_bytes in (1, 1 << 20):
        narrow, wide = run(torch.bfloat16, chunk_bytes), run(torch.float32, chunk_bytes)
        torch.testing.assert_close(narrow["loss"], wide["loss"], rtol=1e-6, atol=0)
        for name in ("dx", "dw"):
            torch.testing.assert_close(narrow[name].float(), wide[name], rtol=HALF_UNIT, atol=1e-7)
