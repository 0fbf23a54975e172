"""Products of experts have few different shapes, and the numbers of products of exactly an expert's rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.ops import grouped_linear
from lightning_megatron.ops.grouped_linear import grouped_in_place, rounded_length
from lightning_megatron.testing.parity import assert_same

IN, OUT = 24, 40
COUNTS = ([37, 0, 5, 130, 16, 1], [0, 0, 200, 0, 0, 0], [1, 2, 3, 0, 0, 0], [0] * 6, [16, 32, 0, 0, 64, 80])


@pytest.fixture(autouse=True)
def _rounded(monkeypatch):
    monkeypatch.setattr(grouped_linear, "builds_kernels", lambda a, b: True)


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def test_lengths_are_few_and_hardly_longer():
    lengths = {rows: rounded_length(rows) for rows in range(1 << 13)}
    assert all(rows <= length < rows + max(16, rows / 8) for rows, length in lengths.items())
    assert all(length % 16 == 0 for length in lengths.values())
    for begin in (1 << n for n in range(13)):
        assert len({lengths[rows] for rows in range(begin, 2 * begin)}) <= 17
    assert rounded_length(0) == 0


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_longer_products_change_no_number(counts):
    x, weight = values(sum(counts), IN).double(), values(len(counts), OUT, IN).double()
    dy = values(sum(counts), OUT, seed=1).double()

    def run(function: Any) -> dict[str, Tensor]:
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = function(a, w, counts)
        dx, dw = torch.autograd.grad(out, (a, w), dy)
        return {"out": out.detach(), "dx": dx, "dw": dw}

    assert_same(run(grouped_in_place), run(grouped_linear.grouped_linear_reference), rtol=1e-12)


def test_an_expert_does_not_see_the_tokens_of_the_next():
    counts = [5, 30, 7]
    x, weight = values(42, IN), values(3, OUT, IN).requires_grad_()
    x[5:35] = torch.nan
    x.requires_grad_()
    out = grouped_in_place(x, weight, counts)
    dx, dw = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
    assert out[:5].isfinite().all()
    assert out[5:35].isnan().all()
    assert out[35:].isfinite().all()
    assert dw[[0, 2]].isfinite().all()
    assert dx.isfinite().all()


class _Shapes(TorchDispatchMode):
    """Notes the shapes of all products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[tuple[int, ...], ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            self.seen.add(tuple(tuple(a.shape) for a in args[:2]))
        return func(*args, **(kwargs or {}))


def test_shapes_repeat_whatever_the_routing():
    weight = values(8, OUT, IN).bfloat16().requires_grad_()
    generator = torch.Generator().manual_seed(1)
    with _Shapes() as shapes:
        for _ in range(20):
            ids = torch.randn(400, 8, generator=generator).topk(2).indices
            counts = torch.bincount(ids.flatten(), minlength=8).tolist()
            x = torch.ones(800, IN, dtype=torch.bfloat16, requires_grad=True)
            grouped_in_place(x, weight, counts).sum().backward()
    lengths = {shape[0][0] for shape in shapes.seen if shape[1] == (IN, OUT)}
    assert len(lengths) <= 6
    assert len(shapes.seen) == 3 * len(lengths)
