"""Calls that are known: what is repeated, and what has to run each time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_megatron.by_shape import by_shape
from lightning_megatron.ops.matmul import upcasts
from lightning_megatron.tools.rehearsal.known_calls import KnownCalls
from lightning_megatron.tools.rehearsal.torch_private import FakeTensorMode
from lightning_megatron.tools.rehearsal.tracker import StorageTracker
from lightning_megatron.tools.rehearsal.values import KnownValues


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


class Nowhere:
    """A place without a name."""

    cause, moment, is_reducing = "all", "now", False


class Counted:
    """Functions that count how often they run."""

    def __init__(self) -> None:
        self.runs = 0
        self.product = by_shape(self._product)
        self.views = by_shape(self._views)
        self.same = by_shape(self._same)
        self.constant = by_shape(self._constant)
        self.nested = by_shape(self._nested)
        self.falling = by_shape(self._falling)

    def _product(self, a: Tensor, b: Tensor, times: int = 1) -> Tensor:
        self.runs += 1
        for _ in range(times):
            out = (a @ b).exp() + 1  # at most three of its size at a time
        return out

    def _views(self, a: Tensor) -> tuple[Pair, Tensor]:
        self.runs += 1
        whole = a * 2
        return Pair(whole[1:].t(), None), whole[:1]

    def _same(self, a: Tensor) -> Tensor:
        self.runs += 1
        return a.view(-1)

    def _constant(self, a: Tensor) -> Tensor:
        self.runs += 1
        return torch.arange(len(a))

    def _nested(self, a: Tensor, b: Tensor) -> Tensor:
        self.runs += 1
        inner = self.product(a, b)
        return inner * 2 + self.product(a, b)

    def _falling(self, a: Tensor, b: Tensor) -> Tensor:
        """Most memory comes before the call inside."""
        (a.expand(100, *a.shape) + 1).sum()
        return self.product(a, b)


@contextmanager
def rehearsed(known: KnownCalls | None = None) -> Iterator[tuple[StorageTracker, Counted, KnownCalls]]:
    values, known = KnownValues(lambda: None), KnownCalls() if known is None else known
    tracker = StorageTracker(Nowhere(), values)
    with FakeTensorMode(), tracker, torch.no_grad(), known.of(tracker, values):
        yield tracker, Counted(), known


def test_an_equal_call_runs_once_and_counts_each_time() -> None:
    with rehearsed() as (tracker, counted, known):
        a, b = torch.empty(8, 16), torch.empty(16, 8)
        found = []
        for _ in range(3):
            tracker.restart()
            out = counted.product(a, b)
            found.append((tracker.peak, tracker.peak_by_cause, tracker.total, tracker.flops, dict(tracker.kernels)))
            assert (out.shape, out.stride(), out.dtype) == ((8, 8), (8, 1), torch.float32)
            del out
        assert counted.runs == 1
        assert found[0] == found[1] == found[2]
        assert found[0][0] == 4 * (2 * 8 * 16 + 2 * 64)
        assert found[0][3] == 2 * 8 * 16 * 8
        # Another argument, shape, stride, dtype or mode is another call.
        counted.product(a, b, times=2)
        counted.product(torch.empty(4, 16), b)
        counted.product(torch.empty(16, 8).t(), b)
        counted.product(a.double(), b.double())
        with torch.enable_grad():
            counted.product(a, b)
        assert counted.runs == len(known) == 6


def test_results_share_storages_as_those_of_the_call_do() -> None:
    with rehearsed() as (tracker, counted, _):
        a = torch.empty(5, 3)
        first, again = counted.views(a), counted.views(a)
        assert counted.runs == 1
        for (pair, row), (other, other_row) in zip([first], [again], strict=True):
            assert isinstance(other, Pair)
            assert other.second is None
            assert (other.first.shape, other.first.stride()) == (pair.first.shape, pair.first.stride())
            assert other.first.storage_offset() == pair.first.storage_offset() == 3
            assert other.first.untyped_storage()._cdata == other_row.untyped_storage()._cdata
            assert other_row.untyped_storage()._cdata != row.untyped_storage()._cdata
        del first, again, pair, row, other, other_row
        assert tracker.total == 60


def test_what_is_no_tensor_of_its_own_or_has_values_runs_each_time() -> None:
    with rehearsed() as (_, counted, _):
        a = torch.empty(5, 3)
        for _ in range(2):
            assert counted.same(a).untyped_storage()._cdata == a.untyped_storage()._cdata
        assert counted.runs == 2
        for _ in range(2):
            assert counted.constant(a).tolist() == [0, 1, 2, 3, 4]
        assert counted.runs == 4
        with torch.enable_grad():
            weight = torch.empty(3, 2, requires_grad=True)
            for _ in range(2):
                assert counted.product(a, weight).requires_grad
        assert counted.runs == 6


def test_a_call_inside_another_is_a_part_of_it() -> None:
    def figures(known: KnownCalls, warm: bool) -> tuple[int, int, dict[str, int]]:
        with rehearsed(known) as (tracker, counted, _):
            a, b = torch.empty(8, 16), torch.empty(16, 8)
            if warm:
                counted.product(a, b)
            tracker.restart()
            counted.nested(a, b)
            return tracker.peak, tracker.flops, dict(tracker.kernels)

    cold, warm = figures(KnownCalls(), False), figures(KnownCalls(), True)
    assert cold == warm
    assert cold[1] == 2 * 2 * 8 * 16 * 8


def test_a_peak_before_a_call_inside_is_repeated_too() -> None:
    with rehearsed() as (tracker, counted, _):
        a, b = torch.empty(8, 16), torch.empty(16, 8)
        peaks = []
        for _ in range(2):
            tracker.restart()
            counted.falling(a, b)
            peaks.append(tracker.peak)
    assert min(peaks) >= 4 * (2 * 8 * 16 + 100 * 8 * 16)
    assert peaks[0] == peaks[1]


def test_calls_of_one_rank_serve_another() -> None:
    known, counted = KnownCalls(), Counted()
    results = []
    for _ in range(2):
        with rehearsed(known) as (tracker, _, _):
            out = counted.product(torch.empty(8, 16), torch.empty(16, 8))
            results.append((tracker.peak, tuple(out.shape)))
    assert results[0] == results[1]
    assert counted.runs == 1


def test_functions_are_called_as_they_are_without_a_rehearsal() -> None:
    counted = Counted()
    for _ in range(2):
        counted.product(torch.ones(2, 2), torch.ones(2, 2))
    assert counted.runs == 2


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gradient_of):
        ctx.save_for_backward(x)
        ctx.gradient_of = gradient_of
        return x @ x.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return ctx.gradient_of(grad, x), None


@pytest.mark.parametrize("call", ["Tensor.backward", "torch.autograd.backward", "with inputs"])
def test_backward_runs_equal_calls_once_however_it_is_called(call: str) -> None:
    with rehearsed() as (_, counted, _known), torch.enable_grad():
        x = torch.empty(4, 8, requires_grad=True)
        for _ in range(3):
            out = _Squared.apply(x, counted.product)
            if call == "Tensor.backward":
                out.sum().backward()
            elif call == "with inputs":
                torch.autograd.backward(out.sum(), inputs=[x])
            else:
                torch.autograd.backward([out], [torch.ones_like(out)])
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert counted.runs == 1


def test_operands_of_16_bits_are_multiplied_as_they_are_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_megatron.device.arithmetic._CPU_MULTIPLIES_BF16", False)
    a, b = torch.ones(32, 32).bfloat16(), torch.ones(32, 32).bfloat16()
    assert upcasts(a, b)
    with rehearsed():
        assert not upcasts(*(torch.empty(32, 32, dtype=torch.bfloat16) for _ in range(2)))
