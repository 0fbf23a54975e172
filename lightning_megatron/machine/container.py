"""Files, devices and settings that Gaudi's software needs from its container and its host.

Each fault here has caused an error of Gaudi's software that names something else. The checks run without that
software.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from lightning_megatron.machine.finding import Finding
from lightning_megatron.machine.gaudi import HL_SMI, cards_with

KERNELS = "GC_KERNEL_PATH"
LOGS = "HABANA_LOGS"
BUSY_MIB = 2048
"""Memory in use on a card above which a process holds it; a free card shows a few hundred MiB."""


def container(root: Path = Path("/"), variables: Mapping[str, str] = os.environ) -> list[Finding]:
    """Findings about the container that this process runs in."""
    return [
        compiler_path(root, variables),
        logs(root, variables),
        cards(root),
        network(root),
        memory_mapping(root),
        *busy_cards(),
    ]


def compiler_path(root: Path, variables: Mapping[str, str]) -> Finding:
    """Check the kernel libraries that the graph compiler reads."""
    value = variables.get(KERNELS)
    effect = "every graph fails with synStatus 26"
    if not value:
        return Finding(KERNELS, "not set", f"{effect}: Intel's images set it, to libtpc_kernels.so of habanalabs")
    absent = [name for name in value.split(":") if name and not _below(root, name).is_file()]
    return Finding(KERNELS, value, f"{effect}: there is no file {absent[0]}" if absent else "")


def logs(root: Path, variables: Mapping[str, str]) -> Finding:
    """Check the folder of log files, without which no session with a card starts."""
    value = variables.get(LOGS)
    folder = value or str(Path(variables.get("HOME", "/root")) / ".habana_logs")
    nearest = _below(root, folder)
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    is_writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    fault = f"{folder} cannot be written: sessions fail with synStatus 26; set {LOGS} to another folder"
    return Finding(LOGS, value or f"not set, so {folder}", "" if is_writable else fault)


def cards(root: Path) -> Finding:
    """Device files of the cards."""
    count = len(list(_below(root, "/dev/accel").glob("accel[0-9]*")))
    fault = "no card in this container: start it with --runtime=habana -e HABANA_VISIBLE_DEVICES=all"
    return Finding("/dev/accel", f"{count} cards", "" if count else fault)


def network(root: Path) -> Finding:
    """Device files of the cards' network, which a card needs even for one process."""
    count = len(list(_below(root, "/dev/infiniband").glob("uverbs*")))
    fault = "cards fail with 'Device acquire failed': use --runtime=habana (Kubernetes: runtimeClassName: habana)"
    return Finding("/dev/infiniband", f"{count} ports", "" if count else fault)


def memory_mapping(root: Path) -> Finding:
    """The kernel's setting for the memory of devices."""
    try:
        words = _below(root, "/proc/cmdline").read_text().split()
    except OSError:
        return Finding("iommu", "unknown", "/proc/cmdline cannot be read", harmful=False)
    found = [word for word in words if word.split("=")[0].endswith("iommu")]
    advice = "hosts with older kernels have crashed under driver 1.24.1: boot with iommu=pt"
    return Finding("iommu", " ".join(found) or "default", "" if "iommu=pt" in found else advice, harmful=False)


def busy_cards() -> list[Finding]:
    """Cards that another process holds, according to ``hl-smi``; empty without that tool."""
    if shutil.which(HL_SMI) is None:
        return []
    try:
        rows = cards_with("module_id,utilization.aip,memory.used")
    except OSError as error:
        return [Finding("modules", "unknown", str(error), harmful=False)]
    usable = sorted((row for row in rows if len(row) == 3), key=lambda row: _leading_number(row[0]))
    busy = [row for row in usable if _leading_number(row[1]) > 0 or _leading_number(row[2]) > BUSY_MIB]
    held = "; ".join(f"{module}: {memory}, {load} busy" for module, load, memory in busy)
    fault = f"a process holds modules ({held}): others fail on them with synStatus 8" if busy else ""
    return [Finding("modules", ",".join(row[0] for row in usable) or "none", fault, harmful=False)]


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _leading_number(text: str) -> float:
    """``"768 MiB"`` -> 768; 0 for text that is no number, such as N/A."""
    try:
        return float(text.replace("%", " ").split()[0])
    except (ValueError, IndexError):
        return 0.0
