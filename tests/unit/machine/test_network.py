"""The interface for gloo, by the host's name, the interfaces of the machine, and the route to where ranks meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.machine import network
from lightning_megatron.testing.ports import free_port

INTERFACES = {"127.0.0.1": "lo", "10.0.0.4": "eth0", "10.1.0.4": "ib0", "fd00::4": "eth0"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what the host's name resolves to, and the source addresses of packets."""

    def set_up(own: list[str], sources: dict[str, str], interfaces: dict[str, str] = INTERFACES) -> None:
        monkeypatch.setattr(network, "addresses_of", lambda host: own)
        monkeypatch.setattr(network, "own_interfaces", lambda: interfaces)
        monkeypatch.setattr(network, "source_address", sources.get)

    return set_up


@pytest.mark.parametrize(
    ("own", "sources", "name"),
    [
        (["10.0.0.4"], {}, None),  # as it should be
        (["127.0.1.1"], {"head": "10.1.0.4"}, "ib0"),  # Debian's /etc/hosts
        (["127.0.0.1"], {"head": "fd00::4"}, "eth0"),
        (["10.9.9.9"], {"head": "10.0.0.4"}, "eth0"),  # an address of no interface, as of another container
        ([], {"head": "10.0.0.4"}, "eth0"),
        (["10.9.9.9", "10.0.0.4"], {}, None),  # gloo takes the first that is here
        (["127.0.0.1", "10.0.0.4"], {"head": "10.0.0.4"}, "eth0"),
        (["127.0.1.1"], {"head": "127.0.0.1", network._ELSEWHERE: "10.0.0.4"}, "eth0"),  # the head itself
    ],
)
def test_the_interface_leads_to_where_ranks_meet(
    machine: Any, own: list[str], sources: dict[str, str], name: str | None
) -> None:
    machine(own, sources)
    found, finding = network.gloo_interface("head", {})
    assert found == name
    assert finding.verdict == "ok"
    assert name is None or finding.value.startswith(f"{name} in a job on several machines, since ")


def test_what_cannot_be_found_is_named_and_what_the_user_says_stays(machine: Any) -> None:
    machine(["127.0.1.1"], {})
    found, finding = network.gloo_interface("head", {})
    assert (found, finding.verdict) == (None, "note")
    assert "resolves to 127.0.1.1, by which other machines cannot reach it: in a job on several machines set" in (
        finding.fault
    )
    found, finding = network.gloo_interface("head", {network.VARIABLE: "ib1"})
    assert (found, finding.value) == (None, "GLOO_SOCKET_IFNAME=ib1")
    machine(["127.0.1.1"], {}, {})  # a system that does not tell its interfaces
    assert network.gloo_interface("head", {})[1].verdict == "ok"


def test_this_machine_reaches_itself_by_its_loopback_interface() -> None:
    interfaces = network.own_interfaces()
    if interfaces:  # not on a system that does not tell
        assert network.choose_interface("127.0.0.1", interfaces) == interfaces["127.0.0.1"]
    assert network.addresses_of("127.0.0.2") == ["127.0.0.2"]
    assert network.addresses_of("no.such.host.invalid") == []


NODE = """
import json, os, sys
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_megatron import MegatronStrategy
from lightning_megatron.machine import network

network.addresses_of = lambda host: ["127.0.1.1"]
trainer = Trainer(
    accelerator="cpu", devices=1, num_nodes=2, strategy=MegatronStrategy(), max_steps=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    default_root_dir=sys.argv[1],
)
trainer.fit(BoringModel())
print(json.dumps(os.environ.get("GLOO_SOCKET_IFNAME")))
"""


@pytest.mark.slow
def test_two_nodes_that_meet_at_a_second_loopback_address_use_its_interface(tmp_path: Path) -> None:
    """Both are told that their name resolves to 127.0.1.1, as on Debian."""
    if "127.0.0.1" not in network.own_interfaces():
        pytest.skip("this system does not tell its interfaces")
    common = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    given = {name: value for name, value in os.environ.items() if name != network.VARIABLE}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE, str(tmp_path)],
            env=given | common | {"NODE_RANK": str(node)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    for node in nodes:
        out, errors = node.communicate(timeout=900)
        assert node.returncode == 0, errors
        assert json.loads(out.splitlines()[-1]) == network.own_interfaces()["127.0.0.1"]
        assert "address of this machine: lo in a job on several machines, since" in errors
