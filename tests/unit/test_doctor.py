"""``lightning-megatron doctor`` on simulated machines: a tool on PATH, distributions, limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.machine import gaudi, host
from lightning_megatron.machine.finding import Finding


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a distribution of some version in place of whatever is there."""

    def make(name: str, version: str) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return make


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tool ``hl-smi`` that prints a text."""

    def make(text: str, status: int = 0) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "hl-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
        (folder / "hl-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return make


@pytest.mark.parametrize(("software", "torch"), gaudi.SUPPORT_MATRIX.items())
def test_each_release_goes_with_its_torch_only(install: Any, software: str, torch: str) -> None:
    install(gaudi.BRIDGE, f"{software}.0.555")
    fitting = gaudi.software(f"{torch}.1+hpu")
    too_old = torch == "2.5"
    assert fitting.verdict == ("wrong" if too_old else "ok")
    assert gaudi.software("2.13.0+cpu").verdict == "wrong"
    if too_old:
        assert "Gaudi software 1.20 or newer" in fitting.fault
    else:
        assert f"built for torch {torch}, but torch is 2.13" in gaudi.software("2.13.0+cpu").fault


def test_a_bridge_that_is_no_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gaudi.software("2.10.0") == Finding("Gaudi software", "not installed")
    (tmp_path / "habana_frameworks").mkdir()
    (tmp_path / "habana_frameworks" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = gaudi.software("2.10.0")
    assert found.verdict == "note"
    assert str(tmp_path / "habana_frameworks") in found.fault


def test_an_unknown_release_is_worth_a_note(install: Any) -> None:
    install(gaudi.BRIDGE, "1.31.0.1")
    assert gaudi.software("2.10.0").verdict == "note"


def test_the_driver_must_be_of_the_softwares_release(install: Any, tool: Any) -> None:
    install(gaudi.BRIDGE, "1.21.0.555")
    tool("HL-225, 1.20.1-97136, 98304 MiB\nHL-225, 1.20.1-97136, 98304 MiB")
    cards, driver = gaudi.driver()
    assert cards == Finding("Gaudi cards", "2 x HL-225, 98304 MiB each")
    assert driver.verdict == "wrong"
    assert "1.20.1-97136" in driver.fault
    assert "1.21.0.555" in driver.fault


def test_a_driver_that_fits(install: Any, tool: Any) -> None:
    install(gaudi.BRIDGE, "1.21.0.555")
    tool("HL-225, 1.21.0-abc, 98304 MiB")
    assert [finding.verdict for finding in gaudi.driver()] == ["ok", "ok"]


def test_a_tool_that_fails_and_one_that_is_not_there(install: Any, tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gaudi.driver() == []
    install(gaudi.BRIDGE, "1.21.0.555")
    assert [finding.verdict for finding in gaudi.driver()] == ["note"]
    tool("no driver", status=1)
    assert [finding.verdict for finding in gaudi.driver()] == ["wrong"]


def test_switches_are_told_with_what_they_do() -> None:
    found = {finding.subject: finding for finding in gaudi.environment(
        {"PT_HPU_LAZY_MODE": "1", "HLS_MODULE_ID": "3", "PT_HPU_RECIPE_CACHE_CONFIG": "x", "HOME": "/root"}
    )}  # fmt: skip
    verdicts = {name: finding.verdict for name, finding in found.items()}
    assert verdicts == {"PT_HPU_LAZY_MODE": "note", "HLS_MODULE_ID": "wrong", "PT_HPU_RECIPE_CACHE_CONFIG": "ok"}
    assert gaudi.environment({"PT_HPU_LAZY_MODE": "0"}) == [Finding("PT_HPU_LAZY_MODE", "0")]


def test_shared_memory(tmp_path: Path) -> None:
    assert host.shared_memory(tmp_path, enough=1).verdict == "ok"
    assert host.shared_memory(tmp_path, enough=1 << 60).verdict == "note"
    assert host.shared_memory(tmp_path / "none").verdict == "wrong"


LIMITS = """
import resource, sys
from lightning_megatron.machine import host
soft, hard, ranks = (int(x) for x in sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
before = host.open_files(ranks)
after = host.raise_open_files(ranks)
print(before.verdict, after.verdict, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "expected"),
    [
        (1024, 4096, 128, "ok ok 1024"),  # few ranks: nothing is touched
        (1024, 4096, 129, "wrong wrong 4096"),  # raised as far as possible, and still too few
    ],
)
def test_many_ranks_need_many_files(soft: int, hard: int, ranks: int, expected: str) -> None:
    words = [sys.executable, "-c", LIMITS, str(soft), str(hard), str(ranks)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == expected


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_megatron.cli.main import main

    assert main(["doctor", "--json"]) == 0
    found = {row["subject"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["torch"]["verdict"] == "ok"
    assert found["a Trainer takes"]["value"].startswith("cpu")
    monkeypatch.setenv("HLS_MODULE_ID", "0")
    assert main(["doctor"]) == 1
    assert "unset it" in capsys.readouterr().out
    assert main(["doctor", "--cards", "x"]) == 2
