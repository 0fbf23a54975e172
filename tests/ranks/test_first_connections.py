"""Ranks that connect at their first collective or message do so at the start, and the log says how long it took."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron import device as devices
from lightning_megatron.comm.p2p import greet_neighbours
from lightning_megatron.device import collectives, memory
from lightning_megatron.mesh import Axis
from lightning_megatron.recorder.call import Call
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer
from tests.tiny import tiny_llama

pytestmark = pytest.mark.skipif(kind_in_tests() is not devices.CPU, reason="replaces the behaviour of gloo")


def axis_of_all() -> Axis:
    size = dist.get_world_size()
    return Axis("pp", size, dist.get_rank(), tuple(range(size)), dist.group.WORLD)


def greet_by_rotation() -> list[str]:
    """Messages of neighbours on an axis that rotates, as the recorder names them."""
    told: list[str] = []
    issue = Call.issue

    def named(call: Call, *args: Any, **kwargs: Any) -> Any:
        told.append(str(call))
        return issue(call, *args, **kwargs)

    with mock.patch.object(Call, "issue", named):
        greet_neighbours(axis_of_all(), torch.device("cpu"), True, rotates=True)
    return told


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_rotate_greet_each_other_by_the_messages_of_a_rotation(ranks: Any, size: int) -> None:
    """Two of them use the group's communicator, which single messages of a pair would leave unconnected."""
    for rank, told in enumerate(ranks(size, greet_by_rotation)):
        after, before = (rank + 1) % size, (rank - 1) % size
        assert sorted(told) == [f"receive over pp with rank {before}", f"send over pp with rank {after}"]


def greet(is_ring: bool) -> list[tuple[str, int]]:
    """Messages of this rank, in order; each waits for its other end, as NCCL's first one does."""
    told, axis = [], axis_of_all()
    for name in ("send", "recv"):
        real = getattr(dist, name)

        def message(x: torch.Tensor, peer: int, group: Any = None, name: str = name, real: Any = real) -> None:
            told.append((name, peer))
            real(x, peer, group=group)
            other, back = torch.zeros(1), (dist.irecv if name == "send" else dist.isend)
            back(other, peer, group=group).wait()

        mock.patch.object(dist, name, message).start()
    try:
        greet_neighbours(axis, torch.device("cpu"), is_ring)
    finally:
        mock.patch.stopall()
    return told


@pytest.mark.parametrize(
    ("size", "is_ring", "peers"),
    [
        (2, False, [{1}, {0}]),
        (4, False, [{1}, {0, 2}, {1, 3}, {2}]),
        (3, True, [{1, 2}, {0, 2}, {0, 1}]),
        (4, True, [{1, 3}, {0, 2}, {1, 3}, {0, 2}]),
    ],
)
def test_neighbours_greet_each_other_although_each_message_waits_for_its_other_end(
    ranks: Any, size: int, is_ring: bool, peers: list[set[int]]
) -> None:
    assert [{peer for _, peer in told} for told in ranks(size, greet, is_ring)] == peers


def greet_wrongly() -> str:
    axis = axis_of_all()
    if axis.rank == 0:
        dist.send(torch.full((1,), 7.0), 1)
        return ""
    with pytest.raises(RuntimeError) as caught:
        greet_neighbours(axis, torch.device("cpu"), False)
    return str(caught.value)


def test_a_wrong_number_is_the_fault_of_the_network(ranks: Any) -> None:
    assert ranks(2, greet_wrongly)[1] == (
        "the first message over pp is wrong: rank 0 sent 0, and 7 has come. The network or a device is at fault, not "
        "the model"
    )


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage())


def started(layout: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Names of what has connected before the model was configured, and what was logged."""
    names, lines, logger = [], Lines(), logging.getLogger("lightning.pytorch.utilities.rank_zero")

    class Model(GPTModule):
        def configure_model(self) -> None:
            names.extend(self.trainer.strategy.mesh.connect_seconds)
            super().configure_model()

    late = collectives.CollectiveTraits(connects_at_first_use=True, wait_blocks=True, copies_pieces=True)
    logger.addHandler(lines)
    logger.setLevel("INFO")
    free = mock.patch.object(devices, "free_memory_bytes", return_value=3 << 30)
    with mock.patch.object(collectives, "_GLOO", late), free:
        data = torch.utils.data.DataLoader([{"tokens": torch.arange(8), "labels": torch.arange(8)}] * 8)
        trainer = quiet_trainer(MegatronStrategy(**layout), devices=dist.get_world_size(), max_steps=1)
        trainer.fit(Model(tiny_llama()), data)
    logger.removeHandler(lines)
    return names, [line for line in lines.kept if "the first" in line]


def test_groups_and_neighbours_connect_before_the_model_is_built(ranks: Any) -> None:
    """Held against Gaudi's rule, with messages and memory added."""
    found = ranks(4, started, {"pp": 2, "cp": 2})
    for names, _ in found:
        assert names[0] == "world"
        assert {"pp", "cp"} < set(names)
        assert names[-2:] == ["pp messages", "cp messages"]
    logged = found[0][1]
    assert len(logged) == len(found[0][0])
    assert logged[-1].startswith("cp (2 ranks): the first messages took 0.")
    assert logged[-1].endswith(" s, and 3.0 GiB are free")
    assert ranks(2, started, {"cp": 2, "cp_comm_type": "a2a"})[0][0] == ["world"]


def test_the_behaviour_of_nccl_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against torch's source: nothing here runs on CUDA."""
    card = torch.device("cuda", 0)
    traits = devices.collective_traits(card)
    assert traits.connects_at_first_use
    assert traits.exit_waits
    assert not traits.wait_blocks
    limit = traits.timeout
    assert devices.backend_timeout(card, limit) > limit
    assert devices.backend_timeout(torch.device("cpu"), limit) == limit
    environment: dict[str, str] = {}
    monkeypatch.setattr(collectives.os, "environ", environment)
    devices.keep_flight_records(torch.device("cpu"), "run")
    assert not environment
    devices.keep_flight_records(card, "run")
    assert set(environment.values()) == {"run/nccl-of-rank-"}
    environment = {"TORCH_FR_DUMP_TEMP_FILE": "mine"}
    monkeypatch.setattr(collectives.os, "environ", environment)
    devices.keep_flight_records(card, "run")
    assert environment == {"TORCH_FR_DUMP_TEMP_FILE": "mine"}
    assert memory.free_memory_bytes(torch.device("cpu")) is None
