"""Order in which a rank issues communication and matrix products.

On a device, a collective begins on a stream of its own when it is issued, and the compute stream waits for it where
``wait`` is called. So work that is issued between the two overlaps with it. This order is the program's and needs no
device: it is read here from runs on two processes, from the calls themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.comm.collectives import Pending
from lightning_megatron.recorder.call import Call
from lightning_megatron.testing.trainer import quiet_trainer

LAYERS = 3
SIZES = {
    "config": "llama-tiny",
    "num_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "vocab_size": 61,
    "vocab_multiple": 4,
}
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "linear", "matmul"}

Event = tuple[str, str, int]
"""Kind (``product``, ``issue``, ``wait``, ``mark``), name, and the number of the collective."""


class Order(TorchDispatchMode):
    """Records products and collectives in the order in which the program issues them.

    Attributes:
        events: what was issued, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in PRODUCTS or name.startswith("_mkldnn_linear") or "linear_pointwise" in name:
            self.events.append(("product", name, 0))
        return func(*args, **(kwargs or {}))

    def issued(self, call: Call) -> None:
        """Note that a collective begins."""
        self._kept.append(call)  # so that no other call gets its id
        self._numbers[id(call)] = len(self._numbers) + 1
        self.events.append(("issue", f"{call._name} {call._kind.name.lower()}", self._numbers[id(call)]))

    def awaited(self, call: Call | None) -> None:
        """Note that its result is needed."""
        if id(call) in self._numbers:
            self.events.append(("wait", "", self._numbers[id(call)]))

    def mark(self, name: str) -> None:
        """Note a place of the program."""
        self.events.append(("mark", name, 0))


class Watched(GPTModule):
    """Marks the backward of each micro-batch, and the forward."""

    order = Order()
    reads_parameters = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.order.mark("forward")
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.order.mark("backward")

    def on_after_backward(self) -> None:
        self.order.mark("backward done")


def events_of(strategy: dict[str, Any]) -> list[Event]:
    """What a rank issues in three steps of one micro-batch."""
    seed_everything(11, verbose=False)
    order = Watched.order = Order()
    issue, wait = Call.issue, Pending.wait

    def recorded_issue(self: Call, *args: Any, **kwargs: Any) -> Any:
        order.issued(self)
        return issue(self, *args, **kwargs)

    def recorded_wait(self: Pending) -> torch.Tensor:
        if self._work is not None:
            order.awaited(self._call)
        return wait(self)

    tokens = torch.randint(61, (12, 17), generator=torch.Generator().manual_seed(3))
    rows = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]
    trainer = quiet_trainer(MegatronStrategy(micro_batch_size=2, **strategy), max_epochs=1, max_steps=3)
    with ExitStack() as stack:
        stack.enter_context(patch.object(Call, "issue", recorded_issue))
        stack.enter_context(patch.object(Pending, "wait", recorded_wait))
        stack.enter_context(order)
        trainer.fit(Watched(lr=1e-3, **SIZES), DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    return order.events


def between(events: list[Event], begin: str, end: str, number: int) -> list[Event]:
    """Events from the mark ``begin`` to the next mark ``end``, for the occasion of that number."""
    starts = [i for i, event in enumerate(events) if event[:2] == ("mark", begin)]
    rest = events[starts[number] + 1 :]
    return rest[: next(i for i, event in enumerate(rest) if event[:2] == ("mark", end))]


def overlapped(events: list[Event]) -> list[str]:
    """Names of collectives between whose beginning and whose wait a product is issued."""
    found = []
    for start, (kind, name, number) in enumerate(events):
        if kind == "issue":
            rest = events[start + 1 :]
            end = next((i for i, event in enumerate(rest) if event[0] == "wait" and event[2] == number), len(rest))
            if any(event[0] == "product" for event in rest[:end]):
                found.append(name)
    return found


@pytest.mark.slow
def test_buckets_are_reduced_while_backward_goes_on_and_gathered_while_forward_goes_on(
    ranks: Callable[..., list[Any]],
) -> None:
    for events in ranks(2, events_of, {"bucket_size": 2000}):
        backward = between(events, "backward", "backward done", 1)
        reductions = [i for i, e in enumerate(backward) if e[0] == "issue" and "reduce" in e[1]]
        products = [i for i, e in enumerate(backward) if e[0] == "product"]
        assert len(reductions) > LAYERS
        assert sum(i < products[-1] for i in reductions) >= LAYERS  # one bucket a layer or more, before the end
        assert not [e for e in backward[: products[-1]] if e[0] == "wait"]  # only when all gradients are there
        forward = between(events, "forward", "backward", 1)
        waits = [i for i, e in enumerate(forward) if e[0] == "wait"]
        products = [i for i, e in enumerate(forward) if e[0] == "product"]
        assert sum(i > products[0] for i in waits) >= LAYERS - 1  # later layers' values arrive meanwhile


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_reductions_of_tensor_parallel_layers_are_behind_products_of_weight_gradients(
    ranks: Callable[..., list[Any]], sequence_parallel: bool
) -> None:
    for events in ranks(2, events_of, {"tp": 2, "sequence_parallel": sequence_parallel}):
        backward = between(events, "backward", "backward done", 1)
        behind = overlapped(backward)
        kind = "reduce_scatter" if sequence_parallel else "all_reduce"
        assert sum(kind in name for name in behind) >= 2 * LAYERS, behind  # of qkv and of fc1
        if sequence_parallel:  # the input that is gathered again, behind the product of its own gradient
            assert sum("all_gather" in name for name in behind) >= 2 * LAYERS, behind
