"""``lightning-megatron doctor`` on simulated machines: a tool on PATH, distributions, limits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron import device as devices
from lightning_megatron.device.hpu_bridge import missing
from lightning_megatron.machine import container, gaudi, host
from lightning_megatron.machine.finding import Finding
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.tools.cli.doctor.findings import bridge_import as bridge_findings
from lightning_megatron.tools.cli.doctor.findings import findings
from lightning_megatron.tools.cli.doctor.findings import visible_modules_setting as module_findings

SHARING = "PT_HPU_WEIGHT_SHARING"


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


@pytest.fixture
def stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a bridge there that states the torch it was built for, and raises an error when it is imported."""

    def make(torch: str, error: str = "") -> None:
        folder = tmp_path / "site" / "habana_frameworks" / "torch"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / "__init__.py").write_text(error)
        (folder / "required_version.txt").write_text(f"{torch}\n")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    yield make
    for name in [name for name in sys.modules if name.startswith("habana_frameworks")]:
        del sys.modules[name]
    devices.why_no_hpu.cache_clear()


@pytest.mark.parametrize(("software", "torch"), gaudi.SUPPORT_MATRIX.items())
def test_the_table_of_releases_is_a_hint(install: Any, software: str, torch: str) -> None:
    install(gaudi.BRIDGE, software if software.count(".") == 2 else f"{software}.0.555")
    fitting, other = gaudi.software(f"{torch}.1+hpu"), gaudi.software("2.13.0+cpu")
    if torch == "2.5":
        assert (fitting.verdict, other.verdict) == ("wrong", "wrong")
        assert "Gaudi software 1.20 or newer" in fitting.fault
    else:
        assert (fitting.verdict, other.verdict) == ("ok", "note")
        assert f"built for torch {torch} (the table of releases known here), but torch is 2.13" in other.fault


def test_the_bridges_own_file_decides_which_torch_fits(install: Any, stated: Any) -> None:
    """1.24.0 is built for torch 2.10, and 1.24.1 for 2.11: a minor release does not determine torch."""
    install(gaudi.BRIDGE, "1.24.1.555")
    stated("2.11.0a0+git009b5f6")
    assert gaudi.software("2.11.0a0+git009b5f6") == Finding("Gaudi software", "1.24.1.555")
    other = gaudi.software("2.10.0a0+git")
    assert other.verdict == "wrong"
    assert "built for torch 2.11 (its required_version.txt), but torch is 2.10: do not reinstall" in other.fault
    assert other.fault.endswith("the software for torch 2.10 is 1.24")
    assert "habana_frameworks.torch" not in sys.modules


def test_the_file_is_read_for_releases_that_are_not_in_the_table(install: Any, stated: Any) -> None:
    install(gaudi.BRIDGE, "1.31.0.1")
    stated("2.14.0")
    assert gaudi.software("2.14.1").verdict == "ok"
    assert gaudi.software("2.13.0").verdict == "wrong"


@pytest.mark.parametrize(
    "error",
    [
        "assert False, 'Compile-time major/minor PyTorch version differs'",
        "None.startswith('git')",
        "import ctypes; ctypes.CDLL('no/libhabana_pytorch2_plugin.so')",
        "raise RuntimeError('synStatus 26')",
        "import habana_frameworks.nothing",
    ],
)
def test_a_bridge_that_fails_is_reported_whatever_it_raises(stated: Any, error: str) -> None:
    stated("2.10.0", error)
    devices.why_no_hpu.cache_clear()
    assert not devices.hpu_available()
    kinds = ("AssertionError", "AttributeError", "OSError", "RuntimeError", "ModuleNotFoundError")
    reason = devices.why_no_hpu()
    assert reason is not None
    assert any(f"fails with {kind}: " in reason for kind in kinds), reason
    (found,) = bridge_findings()
    assert found.verdict == "wrong"
    assert found.fault == reason
    assert "cannot be imported: " in str(missing("hpex.kernels", "FusedSDPA"))


@pytest.mark.parametrize("reason", [devices.why_no_hpu, lambda: missing("hpex.kernels", "FusedSDPA")])
@pytest.mark.parametrize(("own", "seen"), [(None, "0"), ("1", "1")])
def test_the_bridge_is_imported_without_weight_sharing(
    stated: Any, monkeypatch: pytest.MonkeyPatch, own: str | None, seen: str, reason: Any
) -> None:
    """In lazy mode it would give modules other parameters than those that the optimizer updates."""
    monkeypatch.setenv(SHARING, "1")
    if own is None:
        monkeypatch.delenv(SHARING)
    stated("2.10.0", f"import os; raise RuntimeError('shares: ' + os.environ.get({SHARING!r}, 'unset'))")
    devices.why_no_hpu.cache_clear()
    assert f"RuntimeError: shares: {seen}" in str(reason())


def test_torch_is_imported_without_the_bridge_and_children_with_it() -> None:
    variables = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    with gaudi.without_autoload(variables):
        assert variables == {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert variables == {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    variables = {}
    with gaudi.without_autoload(variables):
        pass
    assert variables == {}


def test_the_doctor_imports_torch_where_the_bridge_would_end_that(tmp_path: Path) -> None:
    said = "import os; raise RuntimeError('autoload ' + os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD', '1'))"
    (tmp_path / "torch.py").write_text(said)
    words = [sys.executable, "-m", "lightning_megatron.tools.cli.main", "doctor"]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    env = own_environment(PYTHONPATH=path)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr.endswith("RuntimeError: autoload 0\n")


@pytest.mark.parametrize(
    ("software", "variables", "value", "words"),
    [
        ("1.21.0.5", {}, "lazy", "set PT_HPU_LAZY_MODE=0"),
        ("1.21.0.5", {"PT_HPU_LAZY_MODE": "0"}, "eager", "eager without compile=True"),
        ("1.24.0.5", {}, "eager", "eager without compile=True"),
        ("1.24.0.5", {"PT_HPU_LAZY_MODE": "1"}, "lazy", ""),  # told by the variable
    ],
)
def test_the_mode_is_told_with_its_cost(
    install: Any, software: str, variables: dict[str, str], value: str, words: str
) -> None:
    assert gaudi.mode(variables) == []
    install(gaudi.BRIDGE, software)
    (found,) = gaudi.mode(variables)
    assert found.value == value
    assert words in found.fault
    assert found.verdict == ("note" if words else "ok")


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


def test_a_driver_that_is_newer_than_the_software_is_worth_a_note(install: Any, tool: Any) -> None:
    install(gaudi.BRIDGE, "1.24.0.555")
    tool("HL-225, 1.24.1-abc, 98304 MiB")
    assert [finding.verdict for finding in gaudi.driver()] == ["ok", "note"]
    assert "synStatus 26" in gaudi.driver()[1].fault


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


@pytest.fixture
def healthy(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A file system and an environment like those of Intel's container."""
    for name in ("dev/accel/accel0", "dev/accel/accel1", "dev/infiniband/uverbs0", "lib/libtpc_kernels.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cmdline").write_text("BOOT_IMAGE=/vmlinuz intel_iommu=on iommu=pt quiet\n")
    (tmp_path / "log").mkdir()
    return tmp_path, {"GC_KERNEL_PATH": "/lib/libtpc_kernels.so", "HABANA_LOGS": "/log/habana", "HOME": "/"}


def container_findings(healthy: tuple[Path, dict[str, str]]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in container.container(*healthy)}


def test_a_healthy_container(healthy: tuple[Path, dict[str, str]]) -> None:
    found = container_findings(healthy)
    assert [finding.verdict for finding in found.values()] == ["ok"] * 5
    assert found["/dev/accel"].value == "2 cards"
    assert not (healthy[0] / "log" / "habana").exists(), "nothing is changed"


@pytest.mark.parametrize(
    ("subject", "break_it", "verdict", "words"),
    [
        ("GC_KERNEL_PATH", lambda root, env: env.pop("GC_KERNEL_PATH"), "wrong", "synStatus 26"),
        ("GC_KERNEL_PATH", lambda root, env: (root / "lib/libtpc_kernels.so").unlink(), "wrong", "there is no file"),
        ("HABANA_LOGS", lambda root, env: (root / "log/habana").touch(), "wrong", "cannot be written"),
        ("/dev/accel", lambda root, env: shutil.rmtree(root / "dev/accel"), "wrong", "--runtime=habana"),
        ("/dev/infiniband", lambda root, env: shutil.rmtree(root / "dev/infiniband"), "wrong", "runtimeClassName"),
        ("iommu", lambda root, env: (root / "proc/cmdline").write_text("quiet"), "note", "iommu=pt"),
        ("iommu", lambda root, env: (root / "proc/cmdline").unlink(), "note", "cannot be read"),
    ],
)
def test_what_stops_first_users_is_told(
    healthy: tuple[Path, dict[str, str]], subject: str, break_it: Any, verdict: str, words: str
) -> None:
    break_it(*healthy)
    found = container_findings(healthy)
    assert (found[subject].verdict, words in found[subject].fault) == (verdict, True)
    assert [finding.subject for finding in found.values() if finding.fault] == [subject]


def test_cards_that_a_process_holds(tool: Any) -> None:
    tool("3, 0 %, 768 MiB\n0, 97 %, 40960 MiB\n1, N/A, 512 MiB")
    (found,) = container.busy_cards()
    assert found.value == "0,1,3"
    assert found.verdict == "note"
    assert "(0: 40960 MiB, 97 % busy)" in found.fault
    assert "synStatus 8" in found.fault


def test_all_of_it_is_told_where_there_is_gaudis_software(
    install: Any, stated: Any, tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(gaudi.BRIDGE, "1.24.1.555")
    install("lightning-habana", "1.6.0")
    stated("2.11.0", "raise RuntimeError('synStatus 26')")
    tool("3, 0 %, 768 MiB")
    monkeypatch.setenv(devices.VISIBLE, "2,3")
    monkeypatch.setenv("HLS_MODULE_ID", "3")
    devices.why_no_hpu.cache_clear()
    software = {"Gaudi software", "Gaudi bridge", "Gaudi cards", "Gaudi driver", "Gaudi mode", "lightning-habana"}
    files = {"GC_KERNEL_PATH", "HABANA_LOGS", "/dev/accel", "/dev/infiniband", "iommu", "modules", "/dev/shm"}
    found = [finding.subject for finding in findings(ranks=1)]
    assert software | files | {devices.VISIBLE, "HLS_MODULE_ID", "a Trainer takes", "open files"} <= set(found)
    assert len(found) == len(set(found)), "nothing is told twice"


def test_cards_cannot_be_asked_for(tool: Any) -> None:
    assert container.busy_cards() == []
    tool("no driver", status=1)
    assert [finding.verdict for finding in container.busy_cards()] == ["note"]


@pytest.mark.parametrize(
    ("value", "verdict", "words"),
    [
        ("2,3", "ok", ""),
        ("4,5,6,7", "ok", ""),
        ("7", "ok", ""),
        ("1,2", "note", "0,1 or 2,3 or 4,5 or 6,7"),
        ("0,1,2", "note", "0,1 or 2,3"),
        ("all", "wrong", "no word such as 'all'"),
        ("", "wrong", "unset the variable"),
        ("1,1", "wrong", "names a card twice"),
    ],
)
def test_visible_modules_are_checked(monkeypatch: pytest.MonkeyPatch, value: str, verdict: str, words: str) -> None:
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    assert module_findings() == []
    monkeypatch.setenv(devices.VISIBLE, value)
    (found,) = module_findings()
    assert found.verdict == verdict
    assert words in found.fault


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
    from lightning_megatron.tools.cli.main import main

    assert main(["doctor", "--json"]) == 0
    found = {row["subject"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["torch"]["verdict"] == "ok"
    assert found["a Trainer takes"]["value"].startswith(devices.best_available().type)
    monkeypatch.setenv("HLS_MODULE_ID", "0")
    assert main(["doctor"]) == 1
    assert "unset it" in capsys.readouterr().out
    assert main(["doctor", "--cards", "x"]) == 2
