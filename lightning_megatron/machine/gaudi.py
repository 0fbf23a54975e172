"""The state of Gaudi's software: versions that must fit each other, and switches in the environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from lightning_megatron.machine.finding import Finding

SUPPORT_MATRIX: Mapping[str, str] = {
    "1.19": "2.5",
    "1.20": "2.6",
    "1.21": "2.6",
    "1.22": "2.7",
    "1.23": "2.9",
    "1.24": "2.10",
}
"""torch of each release of Gaudi's software: docs.habana.ai, "Support Matrix"; the bridge checks it when imported."""
OLDEST_TORCH = (2, 6)

# (variable, value or any, effect, harmful)
_SWITCHES: tuple[tuple[str, str | None, str, bool], ...] = (
    (
        "PT_HPU_LAZY_MODE",
        "1",
        "lazy mode: legacy; steps are marked where it needs them, torch.compile is not possible",
        False,
    ),
    ("PT_HPU_GPU_MIGRATION", "1", "CUDA seems to be available although there is none", False),
    ("HLS_MODULE_ID", None, "pins every process started from here to one card: unset it", True),
    ("PT_HPU_EMULATE_DISTRIBUTED", "1", "collectives are imitated on one card: for tests of the software only", True),
    ("CUDA_DEVICE_MAX_CONNECTIONS", None, "means nothing on Gaudi", False),
)

BRIDGE = "habana-torch-plugin"
_MODULE = "habana_frameworks"
_TOOL = "hl-smi"


def minor(text: str) -> str:
    """``"1.21.0.555"`` -> ``"1.21"``."""
    return ".".join(text.split("+")[0].split(".")[:2])


def installed(package: str) -> str | None:
    """Version of a distribution, ``None`` if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def software(torch_version: str) -> Finding:
    """Version of the bridge, with a fault if it was built for another torch."""
    bridge = installed(BRIDGE)
    if bridge is None:
        return _software_without_release()
    wanted = SUPPORT_MATRIX.get(minor(bridge))
    fault, harmful = "", True
    if wanted is None:
        known = f"{min(SUPPORT_MATRIX, key=_number)} to {max(SUPPORT_MATRIX, key=_number)}"
        fault, harmful = f"not in the table of releases known here, {known}", False
    elif wanted != minor(torch_version):
        fault = f"{BRIDGE} {minor(bridge)} was built for torch {wanted}, but torch is {minor(torch_version)}: do not"
        fault += " reinstall torch over Gaudi's own"
    if wanted is not None and _number(wanted) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        release = next(name for name, torch in SUPPORT_MATRIX.items() if torch == oldest)
        fault = f"brings torch {wanted}, and this package needs {oldest} or newer: Gaudi software {release} or newer"
    return Finding("Gaudi software", bridge, fault, harmful)


def _software_without_release() -> Finding:
    found = find_spec(_MODULE)
    if found is None or found.origin is None:
        return Finding("Gaudi software", "not installed")
    fault = f"{_MODULE} is imported from {Path(found.origin).parent}: a simulation or a copy, not {BRIDGE}"
    return Finding("Gaudi software", "no release known", fault, harmful=False)


def driver() -> list[Finding]:
    """Cards and driver according to ``hl-smi``; empty without it and without Gaudi's software."""
    bridge = installed(BRIDGE)
    if shutil.which(_TOOL) is None:
        fault = f"no {_TOOL} on PATH: the driver's version is not known"
        return [Finding("Gaudi driver", "unknown", fault, harmful=False)] if bridge is not None else []
    asked = [_TOOL, "-Q", "name,driver_version,memory.total", "-f", "csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [Finding("Gaudi driver", "unknown", f"{' '.join(asked)} failed: {error}")]
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    if not rows:
        return [Finding("Gaudi cards", "0", f"{_TOOL} lists none")]
    cards = Finding("Gaudi cards", f"{len(rows)} x {rows[0][0]}, {rows[0][-1]} each")
    drivers = sorted({row[1] for row in rows if len(row) > 1})
    unlike = [name for name in drivers if bridge is not None and minor(name) != minor(bridge)]
    fault = f"driver {unlike[0]} does not fit the software {bridge}: install one release of both" if unlike else ""
    return [cards, Finding("Gaudi driver", ", ".join(drivers), fault)]


def environment(variables: Mapping[str, str] = os.environ) -> list[Finding]:
    """Variables that are set, with their effect on a run."""
    found = [Finding(name, variables[name], effect, harmful) for name, value, effect, harmful in _SWITCHES
             if name in variables and value in (None, variables[name])]  # fmt: skip
    told = {finding.subject for finding in found}
    prefixes = ("PT_HPU_", "PT_ENABLE_", "HABANA_", "HCCL_", "HLS_", "PT_TE_", "LIGHTNING_MEGATRON_")
    rest = sorted(name for name in variables if name.startswith(prefixes) and name not in told)
    return found + [Finding(name, variables[name]) for name in rest]


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
