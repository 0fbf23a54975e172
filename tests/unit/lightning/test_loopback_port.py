"""The port of a job on one machine belongs to it before another process knows of it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_megatron.comm.loopback import ADDRESS, LoopbackPort


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind((ADDRESS, port))
        except OSError:
            return False
    return True


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> LoopbackPort:
    monkeypatch.setenv("MASTER_PORT", "0")  # so that it is put back
    monkeypatch.delenv("MASTER_PORT")
    return LoopbackPort()


def test_nobody_else_gets_a_port_that_was_chosen(port: LoopbackPort) -> None:
    environment = LightningEnvironment()
    port.take(lambda: environment.main_port)
    assert os.environ["MASTER_PORT"] == str(environment.main_port)
    assert not is_free(environment.main_port)
    store = port.store(environment.main_port, 0, 1, timedelta(seconds=10))
    store.set("key", "value")
    port.free()  # it is the store's now
    assert store.get("key") == b"value"
    assert not is_free(environment.main_port)


def test_a_port_that_was_known_before_stays(port: LoopbackPort) -> None:
    environment = LightningEnvironment()
    known = environment.main_port
    port.take(lambda: environment.main_port)
    assert not is_free(known)
    port.free()
    assert is_free(known)


def test_a_port_in_use_is_an_error(port: LoopbackPort, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        other.bind((ADDRESS, 0))
        other.listen()
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(OSError, match="in use"):
            port.take(lambda: LightningEnvironment().main_port)
