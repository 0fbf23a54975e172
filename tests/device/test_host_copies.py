"""Copies between host and device: pinned memory, and what happens to int64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_hpu.native_extension import native
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron import device as devices
from lightning_megatron.checkpoint.background.host_copy import HostCopy
from lightning_megatron.checkpoint.tensors.fragment import Chunk, Fragment
from lightning_megatron.params import Box

HPU = torch.device("hpu")
BEYOND = 2**31


def copies(run: Callable[[], object]) -> tuple[int, int]:
    """Number of copies to pinned and to other host memory."""
    before = native().copies_to_host()
    run()
    now = native().copies_to_host()
    return now[0] - before[0], now[1] - before[1]


def test_pinned_memory_is_known_by_its_address() -> None:
    pinned = torch.arange(6.0).pin_memory("hpu")
    assert pinned.is_pinned()
    assert pinned[2:].is_pinned()
    assert pinned.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert not torch.arange(6.0).is_pinned()


def test_copies_of_a_state_go_into_pinned_memory_that_is_kept() -> None:
    x = torch.randn(3, 4).to(HPU)
    state = {"x": Fragment((3, 4), x.dtype, (Chunk(Box((0, 0), (3, 4)), x, True),))}
    memory = HostCopy()
    assert copies(lambda: memory.begin(state).finish()) == (1, 0)
    (first,) = memory.begin(state).finish()["x"].chunks
    x.add_(1)
    (second,) = memory.begin(state).finish()["x"].chunks
    assert first.data.data_ptr() == second.data.data_ptr()
    assert second.data.is_pinned()
    assert torch.equal(second.data, x.cpu())


class Blocking(TorchDispatchMode):
    """Notes of each copy from the device whether the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = dict(zip(("self", "src", "non_blocking"), args, strict=False)) | (kwargs or {})
        if func is torch.ops.aten.copy_.default and given["src"].device.type == HPU.type:
            self.found.append(not given.get("non_blocking", False))
        return func(*args, **kwargs or {})


def test_the_host_waits_once_for_all_copies_of_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(devices, "synchronize", waits.append)
    parts = {name: torch.ones(2).to(HPU) for name in "abc"}
    state = {name: Fragment((2,), x.dtype, (Chunk(Box((0,), (2,)), x, True),)) for name, x in parts.items()}
    with Blocking() as copied:
        HostCopy().begin(state)
        devices.begin_read(torch.tensor([1]).to(HPU))
    assert copied.found == [False] * 4
    assert [device.type for device in waits] == ["hpu"]


def test_numbers_of_a_step_are_read_from_pinned_memory() -> None:
    numbers = torch.tensor([1, -5, BEYOND - 1]).to(HPU)
    found: list[list[int]] = []
    assert copies(lambda: found.append(devices.begin_read(numbers)())) == (1, 0)
    assert found == [[1, -5, BEYOND - 1]]


@pytest.mark.parametrize("value", [BEYOND, -BEYOND - 1])
def test_an_int64_that_the_card_cannot_store_is_an_error(value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=f"int64 tensor with the value {value} is copied to the device"):
        torch.tensor([0, value]).to(HPU)
    monkeypatch.setenv("PT_ENABLE_INT64_SUPPORT", "1")
    assert torch.tensor([0, value]).to(HPU).tolist() == [0, value]


def test_an_int64_that_has_grown_on_the_card_is_found_when_it_is_read() -> None:
    count = torch.tensor([BEYOND - 1]).to(HPU) * 2
    for read in (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.item, int):
        with pytest.raises(RuntimeError, match=f"value {2 * BEYOND - 2} is copied to the host"):
            read(count)


def test_gather_of_int64_does_not_compile() -> None:
    index = torch.zeros(2, dtype=torch.int64).to(HPU)
    with pytest.raises(RuntimeError, match="Graph compile failed"):
        torch.arange(4).to(HPU).gather(0, index)
    with pytest.raises(RuntimeError, match="Graph compile failed"):
        torch.gather(torch.arange(4).to(HPU), 0, index, out=torch.empty_like(index))
    assert torch.arange(4.0).to(HPU).gather(0, index).tolist() == [0.0, 0.0]
