"""The state of Gaudi's software: versions that must fit each other, and switches in the environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
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
    "1.24.1": "2.11",
}
"""torch of releases of Gaudi's software (docs.habana.ai, "Support Matrix"; for 1.24.1 the name of its image).

For hints alone: a release does not determine torch. The bridge itself states the torch that it was built for.
"""
OLDEST_TORCH = (2, 6)
LAZY_BEFORE = (1, 22)
"""First release that is eager where ``PT_HPU_LAZY_MODE`` is not set."""
_LAZY = "PT_HPU_LAZY_MODE"

# (variable, value or any, effect, harmful)
_SWITCHES: tuple[tuple[str, str | None, str, bool], ...] = (
    (
        _LAZY,
        "1",
        "lazy mode: legacy; steps are marked where it needs them, torch.compile is not possible",
        False,
    ),
    ("PT_HPU_GPU_MIGRATION", "1", "CUDA seems to be available although it is not", False),
    ("HLS_MODULE_ID", None, "pins every process started from here to one card: unset it", True),
    ("PT_HPU_EMULATE_DISTRIBUTED", "1", "collectives are imitated on one card: for tests of the software only", True),
    ("CUDA_DEVICE_MAX_CONNECTIONS", None, "has no effect on Gaudi", False),
)

BRIDGE = "habana-torch-plugin"
_MODULE = "habana_frameworks"
HL_SMI = "hl-smi"


def minor(text: str) -> str:
    """``"1.21.0.555"`` -> ``"1.21"``."""
    return ".".join(text.split("+")[0].split(".")[:2])


def installed(package: str) -> str | None:
    """Version of a distribution, ``None`` if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def has_bridge() -> bool:
    """True if there is a bridge to import, of a package or not."""
    return find_spec(_MODULE) is not None


@contextmanager
def without_autoload(variables: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Keep ``import torch`` in the block from loading Gaudi's bridge: one for another torch would fail that import."""
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    before = variables.get(name)
    variables[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del variables[name]
        else:
            variables[name] = before


def required_torch() -> str | None:
    """Version of the torch that the bridge was built for, from its own file; ``None`` if there is none.

    The bridge compares it with the running torch when it is imported. Here nothing is imported.
    """
    found = find_spec(_MODULE)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        try:
            text = (Path(folder) / "torch" / "required_version.txt").read_text().strip()
        except OSError:
            continue
        if text[:1].isdigit():  # the simulation's file accepts any torch
            return text
    return None


def software(torch_version: str) -> Finding:
    """Version of the bridge, with a fault if it was built for another torch."""
    bridge = installed(BRIDGE)
    if bridge is None:
        return _software_without_release()
    stated = required_torch()
    wanted = stated or _torch_of(bridge)
    if wanted is None:
        fault = f"{BRIDGE} does not state its torch, and {minor(bridge)} is not in the table of releases known here"
        return Finding("Gaudi software", bridge, f"{fault}: {', '.join(SUPPORT_MATRIX)}", harmful=False)
    if _number(minor(wanted)) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        release = next(name for name, torch in SUPPORT_MATRIX.items() if torch == oldest)
        fault = (
            f"brings torch {minor(wanted)}, and this package needs {oldest} or newer: Gaudi software {release} or newer"
        )
        return Finding("Gaudi software", bridge, fault)
    if minor(wanted) == minor(torch_version):
        return Finding("Gaudi software", bridge)
    origin = "its required_version.txt" if stated else "the table of releases known here"
    fault = (
        f"built for torch {minor(wanted)} ({origin}), but torch is {minor(torch_version)}: do not reinstall torch over"
    )
    fault += f" Gaudi's own{_fitting_releases(torch_version)}"
    return Finding("Gaudi software", bridge, fault, harmful=stated is not None)


def _torch_of(release: str) -> str | None:
    """torch of a release according to the table."""
    return SUPPORT_MATRIX.get(".".join(release.split(".")[:3])) or SUPPORT_MATRIX.get(minor(release))


def _fitting_releases(torch_version: str) -> str:
    releases = [release for release, torch in SUPPORT_MATRIX.items() if torch == minor(torch_version)]
    return f"; the software for torch {minor(torch_version)} is {' or '.join(releases)}" if releases else ""


def _software_without_release() -> Finding:
    found = find_spec(_MODULE)
    if found is None or found.origin is None:
        return Finding("Gaudi software", "not installed")
    fault = f"{_MODULE} is imported from {Path(found.origin).parent}: a simulation or a copy, not {BRIDGE}"
    return Finding("Gaudi software", "no release known", fault, harmful=False)


def mode(variables: Mapping[str, str] = os.environ) -> list[Finding]:
    """Execution mode of Gaudi's software and its cost; empty without the software."""
    release = installed(BRIDGE)
    if release is None:
        return []
    is_old = _number(minor(release)) < LAZY_BEFORE
    if variables.get(_LAZY, "1" if is_old else "0") != "0":
        newer = ".".join(map(str, LAZY_BEFORE))
        unset = f"the default before {newer}: set {_LAZY}=0, else compile=True is refused"
        return [Finding("Gaudi mode", "lazy", "" if _LAZY in variables else unset, harmful=False)]
    cost = (
        "eager without compile=True runs op by op, several times slower than Intel's recipes, which compile or are lazy"
    )
    return [Finding("Gaudi mode", "eager", cost, harmful=False)]


def cards_with(fields: str) -> list[list[str]]:
    """These fields of each card, according to ``hl-smi``.

    Raises:
        OSError: if it fails.
    """
    asked = [HL_SMI, "-Q", fields, "-f", "csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise OSError(f"{' '.join(asked)} failed: {error}") from None
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def driver() -> list[Finding]:
    """Cards and driver according to ``hl-smi``; empty without it and without Gaudi's software."""
    bridge = installed(BRIDGE)
    if shutil.which(HL_SMI) is None:
        fault = f"no {HL_SMI} on PATH: the driver's version is not known"
        return [Finding("Gaudi driver", "unknown", fault, harmful=False)] if bridge is not None else []
    try:
        rows = cards_with("name,driver_version,memory.total")
    except OSError as error:
        return [Finding("Gaudi driver", "unknown", str(error))]
    if not rows:
        return [Finding("Gaudi cards", "0", f"{HL_SMI} lists none")]
    cards = Finding("Gaudi cards", f"{len(rows)} x {rows[0][0]}, {rows[0][-1]} each")
    drivers = sorted({row[1] for row in rows if len(row) > 1})
    return [cards, Finding("Gaudi driver", ", ".join(drivers), *_driver_fault(drivers, bridge))]


def _driver_fault(drivers: Sequence[str], bridge: str | None) -> tuple[str, bool]:
    """The fault of drivers beside a bridge, and True if it stops every run."""
    if bridge is None:
        return "", False
    unlike = [name for name in drivers if minor(name) != minor(bridge)]
    if unlike:
        return f"driver {unlike[0]} does not fit the software {bridge}: install one release of both", True
    newer = [name for name in drivers if _number(_release(name)) > _number(_release(bridge))]
    if newer:
        return f"driver {newer[0]} is newer than the software {bridge}: a graph may fail with synStatus 26", False
    return "", False


def _release(text: str) -> str:
    """``"1.24.1-abc"`` and ``"1.24.1.17"`` -> ``"1.24.1"``."""
    return ".".join(re.split(r"[-+]", text)[0].split(".")[:3])


def environment(variables: Mapping[str, str] = os.environ) -> list[Finding]:
    """Variables that are set, with their effect on a run."""
    found = [Finding(name, variables[name], effect, harmful) for name, value, effect, harmful in _SWITCHES
             if name in variables and value in (None, variables[name])]  # fmt: skip
    told = {finding.subject for finding in found}
    prefixes = ("PT_HPU_", "PT_ENABLE_", "HABANA_", "HCCL_", "HLS_", "PT_TE_", "LIGHTNING_MEGATRON_")
    rest = sorted(name for name in variables if name.startswith(prefixes) and name not in told)
    return found + [Finding(name, variables[name]) for name in rest]


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
