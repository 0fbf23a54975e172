"""Parts of a rehearsal: choices of experts, micro-batches that suffice, known values, counted storages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.pipeline.schedule import build_schedule
from lightning_megatron.tools.rehearsal.cut import enough_micro_batches, most_in_flight
from lightning_megatron.tools.rehearsal.errors import RehearsalError
from lightning_megatron.tools.rehearsal.routing import routed_choices
from lightning_megatron.tools.rehearsal.torch_private import (
    FAKE_BACKEND,
    ITEM,
    FakeStore,
    FakeTensorMode,
    TorchDispatchMode,
    signature_of,
    without_fake_tensors,
)
from lightning_megatron.tools.rehearsal.tracker import StorageTracker, _sent_nothing
from lightning_megatron.tools.rehearsal.values import KnownValues
from lightning_megatron.tools.rehearsal.world import FakeWorld


class Nowhere:
    """A place without a name."""

    cause, moment, is_reducing = "all", "now", False


@pytest.mark.parametrize(
    ("experts", "topk", "here"), [(8, 2, range(2, 4)), (8, 2, range(8)), (4, 1, range(1)), (4, 3, range(2))]
)
@pytest.mark.parametrize("imbalance", [1.0, 1.5])
def test_choices_of_experts_are_as_unequal_as_asked(experts: int, topk: int, here: range, imbalance: float) -> None:
    tokens = 240
    chosen = routed_choices(tokens, topk, experts, here, imbalance)
    assert chosen.shape == (tokens, topk)
    assert all(len(set(row)) == topk for row in chosen.tolist())
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    favoured = list(here) if len(here) < experts else [0]
    most, mean = tokens * min(topk, len(favoured)), tokens * topk * len(favoured) / experts
    least = tokens * max(0, topk - (experts - len(favoured)))
    assert int(counts[favoured].sum()) == max(least, min(most, round(imbalance * mean)))
    rest = [count for e, count in enumerate(counts.tolist()) if e not in favoured]
    assert not rest or max(rest) - min(rest) <= 1


@pytest.mark.parametrize(("name", "vpp"), [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2)])
@pytest.mark.parametrize("pp", [2, 4])
def test_fewer_micro_batches_hold_as_many_activations(name: str, vpp: int, pp: int) -> None:
    number = 8 * pp
    fewer = enough_micro_batches(name, pp, vpp, number)
    most = [[most_in_flight(rank) for rank in build_schedule(name, pp, vpp, n)] for n in (fewer, number)]
    assert most[0] == most[1]
    assert fewer == number if name == "gpipe" else fewer < number


def test_values_that_follow_from_constants_are_known_and_others_refused_by_name() -> None:
    values = KnownValues(lambda: None)
    with FakeTensorMode(), StorageTracker(Nowhere(), values):
        known = torch.arange(6).view(2, 3)[1] * 2
        assert known.tolist() == [6, 8, 10]
        filled = torch.zeros(3)
        filled[1:] = 4
        assert filled.sum().item() == 8
        weights = torch.empty(3)
        assert bool((weights * 2).isfinite().all())  # every number is taken to be finite
        mixed = torch.stack([torch.tensor(2.0), weights.sum()])
        assert mixed[0].item() == 2
        with pytest.raises(RehearsalError, match="float32"):
            mixed[1].item()
        filled.add_(weights)
        with pytest.raises(RehearsalError, match="float32"):
            filled[0].item()
        with pytest.raises(RehearsalError, match="nonzero"):
            weights.nonzero()
        assert torch.tensor([0, 3, 4]).nonzero().shape == (2, 1)


@pytest.mark.parametrize("fake", [False, True])
def test_storages_are_counted_from_their_first_to_their_last_tensor(fake: bool) -> None:
    tracker = StorageTracker(Nowhere())
    with FakeTensorMode() if fake else without_fake_tensors(), tracker:
        first = torch.empty(100)
        second = first * 2
        view = second[:50]
        del second
        assert tracker.total == 800
        del view
        assert tracker.total == 400
        third = torch.empty(50)
        tracker.name("parameters", [first])
        assert tracker.by_cause["parameters"] == 400
        assert tracker.by_cause["all"] == 200
        del first, third
    assert tracker.total == 0
    assert tracker.peak == 800
    assert tracker.peak_by_cause == {"all": 800}
    assert tracker.kernels["aten::mul.Tensor"] == 1


def test_matrix_products_are_counted_as_work() -> None:
    tracker = StorageTracker(Nowhere())
    with FakeTensorMode(), tracker:
        torch.empty(3, 4) @ torch.empty(4, 5)
        assert tracker.flops == 2 * 3 * 4 * 5
        torch.empty(3, 5).addmm_(torch.empty(3, 4), torch.empty(4, 5))  # as gradients of weights are added
    assert tracker.flops == 2 * 2 * 3 * 4 * 5


def test_torch_still_has_the_private_names_of_a_rehearsal() -> None:
    """Where torch changes one of them, a rehearsal cannot run: this test says which."""
    assert FAKE_BACKEND in torch.distributed.Backend.backend_list
    assert isinstance(FakeStore(), torch.distributed.Store)
    assert ITEM.name() == "aten::_local_scalar_dense"
    assert signature_of(torch.ops.aten.add_.Tensor).written_names == ("self",)
    assert signature_of(torch.ops.aten.view.default).is_view
    with FakeTensorMode():
        assert type(torch.empty(1)) is not torch.Tensor
        with without_fake_tensors():
            assert type(torch.empty(1)) is torch.Tensor


class WithoutFakeCollectives(TorchDispatchMode):
    """torch 2.10, which has no collectives of fake tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _sent_nothing(func, args) if func.namespace == "c10d" else func(*args, **(kwargs or {}))


def test_collectives_send_nothing_where_torch_has_none_of_fake_tensors() -> None:
    with FakeWorld(0, 2).entered(), WithoutFakeCollectives():
        whole, part = torch.ones(4), torch.ones(2)
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_gather([torch.ones(2), part], part)
        dist.broadcast(part, 0)
        for work in (dist.all_reduce(part, async_op=True), dist.isend(part, 1), dist.irecv(whole, 1)):
            assert work is not None
            work.wait()
        dist.barrier()
        assert whole.shape == (4,)
