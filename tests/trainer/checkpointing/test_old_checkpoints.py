"""Checkpoints that earlier versions wrote load bit for bit, and their runs go on with the losses that they had then.

Processors round differently, and Adam makes more of it: losses are compared with a margin, the loaded state is not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.old_checkpoints import CHECKPOINTS, EXPORT, KINDS, SAVED, train, unpack

from lightning_megatron import load_module, read_checkpoint
from lightning_megatron.checkpoint import Progress, candidates, verify
from lightning_megatron.checkpoint.integrity.manifest import read_manifest
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import kind_in_tests

EXPECTED: dict[str, Any] = json.loads((CHECKPOINTS / "expected.json").read_text())
ROUNDING = 1e-5
pytestmark = pytest.mark.skipif(kind_in_tests() is not CPU, reason="the runs that wrote them were on CPUs")

OTHER: dict[str, tuple[int, dict[str, Any]]] = {
    "one-process": (2, {"tp": 2}),
    "tp2": (1, {}),
    "async-dp2": (2, {"cp": 2}),
    "dropout": (2, {}),
    "lightning": (2, {"tp": 2}),
    "format-2": (2, {"distributed_optimizer": False}),
}
"""A layout for each kind that a run goes on from, beside its own: ranks and arguments of the strategy."""


def expected_state(name: str) -> str:
    """Hash of the optimizer state; Lightning's own strategy, which exports none, had that of one process."""
    state: str = EXPECTED["one-process" if name == "lightning" else name]["state"]
    return state


@pytest.mark.parametrize("name", [name for name in KINDS if name != "lightning"])
def test_verify_finds_no_fault(name: str, tmp_path: Path) -> None:
    assert verify(unpack(name, tmp_path)) == []


@pytest.mark.parametrize("name", OTHER)
def test_a_run_goes_on_as_it_did(ranks: Any, name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    source, strategy = unpack(name, tmp_path), kind.strategy or {}
    (losses, state), *_ = ranks(kind.ranks, train, tmp_path, strategy, dropout=kind.dropout, ckpt_path=source)
    known = EXPECTED[name]["losses"][SAVED:]
    assert len(losses) == len(known)
    if not kind.dropout:  # its masks came from streams that had states of their own then
        assert losses == pytest.approx(known, rel=ROUNDING)
    assert state == expected_state(name)


@pytest.mark.parametrize("name", OTHER)
def test_another_layout_has_the_same_bits_and_goes_on(ranks: Any, name: str, tmp_path: Path) -> None:
    number, strategy = OTHER[name]
    source, dropout = unpack(name, tmp_path), KINDS[name].dropout
    (losses, state), *_ = ranks(number, train, tmp_path, strategy, dropout=dropout, ckpt_path=source)
    assert state == expected_state(name)
    known = EXPECTED[name]["losses"][SAVED:]
    assert len(losses) == len(known)
    if not dropout:  # generators of another layout start anew
        assert losses == pytest.approx(known, rel=ROUNDING)


def test_an_export_of_optimizer_state_comes_back_byte_for_byte(ranks: Any, tmp_path: Path) -> None:
    unpack("one-process", tmp_path)
    source = (tmp_path / EXPORT).rename(tmp_path / "source.safetensors")
    for _, state in ranks(2, train, tmp_path, {"tp": 2}, state=source):
        assert state == EXPECTED["one-process"]["state"]


def test_weights_alone_are_those_of_the_run(tmp_path: Path) -> None:
    weights, whole = unpack("weights-only", tmp_path), unpack("one-process", tmp_path)
    known = read_checkpoint(whole)["state_dict"]
    for found in (read_checkpoint(weights)["state_dict"], load_module(weights).state_dict()):
        assert found.keys() == known.keys()
        assert all(tensor.equal(known[name]) for name, tensor in found.items())


def test_the_newest_of_old_checkpoints_is_found(tmp_path: Path) -> None:
    old, new = unpack("format-2", tmp_path), unpack("tp2", tmp_path)
    assert read_manifest(old).version == 2
    found = candidates([(tmp_path, ".ckpt")])
    assert [one.path for one in found] == [new, old], "a run that says its generation is newer than one that does not"
    assert [one.progress for one in found] == [Progress(1, SAVED), Progress(0, SAVED)]
