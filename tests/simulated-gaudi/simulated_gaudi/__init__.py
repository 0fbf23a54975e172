"""Simulated Gaudi: the ``hpu`` device, HCCL and ``habana_frameworks`` on the host.

Code for HPUs runs on it unchanged, in this process and its children, and it refuses the same things as Gaudi's
software. Its limits are described in ``docs/simulated-hpu.md``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from pathlib import Path

import torch

from lightning_megatron import device

SITE = Path(__file__).parent / "site"
PROFILE = "LIGHTNING_MEGATRON_HPU_SIM"
DEVICES = "LIGHTNING_MEGATRON_HPU_SIM_DEVICES"
DEVICE_NAME = "LIGHTNING_MEGATRON_HPU_SIM_DEVICE_NAME"
AS_REAL = "LIGHTNING_MEGATRON_HPU_SIM_AS_REAL"
"""If it is set, the simulation counts as a real card: for tests of code for real cards."""
FAULTS = "LIGHTNING_MEGATRON_HPU_SIM_FAULTS"
"""Faults of the installation, joined by commas, for processes started later; see ``simulated_hpu/settings.py``."""
PROFILES = ("1.19", "1.21", "1.22", "1.24")
DEVICE_NAMES = ("GAUDI2", "GAUDI3")


def enable(profile: str = "1.24", devices: int = 8, device_name: str = "GAUDI2") -> None:
    """Simulate HPUs from now on, in this process and in its children.

    Call it before the first tensor is created: torch decides once if there are HPUs. Child processes load the
    simulation as they would load the real software: through an entry point, when they import torch.

    Args:
        profile: version of the Gaudi software: ``"1.19"`` or ``"1.21"``, lazy unless ``PT_HPU_LAZY_MODE`` is 0;
            ``"1.22"`` or ``"1.24"``, eager unless it is 1.
        devices: number of HPUs of the machine.
        device_name: product, ``"GAUDI2"`` or ``"GAUDI3"``.

    Raises:
        RuntimeError: if torch has looked for HPUs already, or was built for CUDA, or the real software is installed.
    """
    if torch.version.cuda is not None:
        raise RuntimeError(
            f"torch {torch.__version__} was built for CUDA, and differentiates on no other accelerator: install its CPU"
            " build to simulate HPUs"
        )
    here = str(SITE)
    if here not in sys.path:
        if importlib.util.find_spec("habana_frameworks") is not None:
            raise RuntimeError("the real habana_frameworks is installed here: the simulation cannot replace it")
        sys.path.insert(0, here)
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = here if not path else os.pathsep.join((here, path))
    os.environ[PROFILE], os.environ[DEVICES], os.environ[DEVICE_NAME] = profile, str(devices), device_name
    importlib.invalidate_caches()
    device.prepare_bridge()
    importlib.import_module("habana_frameworks.torch")
    device.why_no_hpu.cache_clear()


def enabled() -> bool:
    """True if this process simulates HPUs."""
    return PROFILE in os.environ and AS_REAL not in os.environ and device.hpu_available()


def calls() -> Counter[str]:
    """Number of calls of the simulated software in this process, by name; see :func:`reset_calls`."""
    return importlib.import_module("simulated_hpu.calls").counts()


def reset_calls() -> None:
    """Reset the numbers of calls."""
    importlib.import_module("simulated_hpu.calls").reset()


def fall_back(op_name: str) -> None:
    """Count a fallback to the host, as the software does for an op without a kernel; for tests of code that reads them.

    Args:
        op_name: name such as ``"aten::foo.out"``.
    """
    events = importlib.import_module("simulated_hpu.events")
    events.emit(events.CPU_FALLBACK, op_name=op_name)
