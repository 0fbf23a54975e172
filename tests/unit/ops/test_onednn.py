"""Products of fp32 matrices by oneDNN: the choice by processor, and numbers against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.device import mkl_is_slow
from lightning_megatron.ops.cpu import onednn
from lightning_megatron.ops.matmul import linear, product
from lightning_megatron.testing.parity import assert_same

needs_operator = pytest.mark.skipif(onednn._operator() is None, reason="this torch has no such operator of oneDNN")


@pytest.fixture
def chosen(monkeypatch):
    """Choose oneDNN, whatever the processor and the size."""
    monkeypatch.setattr(onednn, "_MISSING", None)
    monkeypatch.setattr(onednn, "SMALLEST", 1)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_vendor_of_the_processor_decides():
    assert mkl_is_slow("AuthenticAMD") is torch.backends.mkl.is_available()
    assert not mkl_is_slow("GenuineIntel")
    assert not mkl_is_slow("")
    assert onednn.why_not_onednn("GenuineIntel") == "torch's own choice is fast on this processor"


def test_a_torch_without_the_operator_keeps_its_own_choice(monkeypatch):
    monkeypatch.setattr(onednn, "mkl_is_slow", lambda vendor: True)
    monkeypatch.setattr(onednn, "_operator", lambda: None)
    assert onednn.why_not_onednn() == "this torch has no such operator of oneDNN"
    monkeypatch.setattr(onednn, "_MISSING", onednn.why_not_onednn())
    assert not onednn.by_onednn(random(1024, 512), random(512, 512))


@needs_operator
def test_only_large_fp32_products_of_matrices_on_a_cpu_are_taken(monkeypatch):
    monkeypatch.setattr(onednn, "_MISSING", None)
    a, b = random(512, 256), random(256, 512)
    assert onednn.by_onednn(a, b)
    assert onednn.by_onednn(a.view(4, 128, 256), b)
    assert not onednn.by_onednn(a[:64], b)
    assert not onednn.by_onednn(a.t().contiguous().t(), b)
    assert not onednn.by_onednn(a.bfloat16(), b.bfloat16())
    assert not onednn.by_onednn(a.double(), b.double())
    assert not onednn.by_onednn(a.to("meta"), b.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not onednn.by_onednn(a, b)


@needs_operator
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("shape", [(7, 3, 33), (64, 2, 48), (1, 1, 5)], ids=str)
def test_a_linear_layer_and_its_gradients_equal_fp64(shape, blocks, bias, chosen):
    *rows, size = shape
    weight = random(*((40,) if blocks == 1 else (blocks, 20)), size)
    inputs = [random(*shape), weight, *([random(*weight.shape[:-1])] if bias else [])]
    dy = random(*rows, 40)

    def run(function, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, dy.to(dtype))
        return {"out": out.detach(), **{f"d{i}": grad for i, grad in enumerate(grads)}}

    assert_same(run(linear, torch.float32), run(linear, torch.float64), rtol=1e-6)


@needs_operator
def test_operands_of_any_strides_are_multiplied(chosen):
    a, b = random(24, 60), random(48, 30)
    for left in (a[:, ::2], a[:, 10:40], a.view(3, 8, 60).transpose(0, 1)[..., :30]):
        for right in (b.t(), b.t().contiguous(), random(30, 96)[:, ::2]):
            assert_same({"out": product(left, right)}, {"out": left.double() @ right.double()}, rtol=1e-6)


@needs_operator
def test_what_needs_no_gradient_gets_none(chosen):
    x, weight = random(24, 30), nn.Parameter(random(40, 30))
    linear(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    weight.requires_grad_(False)
    x.requires_grad_()
    linear(x, weight).sum().backward()
    assert x.grad is not None
