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


def enable(profile: str = "1.21", devices: int = 8) -> None:
    """Simulate HPUs from now on, in this process and in its children.

    Call it before the first tensor is created: torch decides once if there are HPUs. Children find the simulation as
    they would find the real software: through an entry point of torch, when they import it.

    Args:
        profile: version of the Gaudi software, ``"1.19"`` or ``"1.21"`` for that and newer.
        devices: number of HPUs of the machine.

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
            raise RuntimeError("the real habana_frameworks is installed here; it is not simulated beside itself")
        sys.path.insert(0, here)
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = here if not path else os.pathsep.join((here, path))
    os.environ[PROFILE], os.environ[DEVICES] = profile, str(devices)
    importlib.invalidate_caches()
    importlib.import_module("habana_frameworks.torch")
    device.hpu_available.cache_clear()


def enabled() -> bool:
    """True if this process simulates HPUs."""
    return PROFILE in os.environ and device.hpu_available()


def calls() -> Counter[str]:
    """Number of calls of the simulated software in this process, by name; see :func:`reset_calls`."""
    return importlib.import_module("simulated_hpu.calls").counts()


def reset_calls() -> None:
    """Reset the numbers of calls."""
    importlib.import_module("simulated_hpu.calls").reset()
