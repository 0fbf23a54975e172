"""Checks of torch and of the bridge's library, with the errors of the real bridge's import.

The real bridge is built for one torch, named in ``required_version.txt``, and wants Gaudi's own build of it. This one
runs on any torch, which the file states by ``*``; ``settings().faults`` makes each check fail.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from simulated_hpu.settings import settings

REQUIRED_VERSION = Path(__file__).parent / "required_version.txt"


def check() -> None:
    """Fail as the real import does, if a fault is simulated.

    Raises:
        AssertionError: for a torch of another version, or in lazy mode one that is not Gaudi's.
        AttributeError: for a torch without a local version, as on PyPI.
        OSError: if the library cannot be loaded.
    """
    faults, stated, running = settings().faults, REQUIRED_VERSION.read_text().strip(), torch.__version__
    built_for = running if stated == "*" else stated
    if "version" in faults:
        built_for = f"{int(running.split('.')[0]) - 1}.0.0"
    if built_for.split(".")[:2] != running.split(".")[:2]:
        raise AssertionError(
            f"Error: Compile-time major/minor PyTorch version {built_for} differs from run-time {running}."
        )
    if "no-local-version" in faults:
        local = None
        local.startswith("git")  # type: ignore[attr-defined]
    if settings().is_lazy and "stock" in faults:
        raise AssertionError(f"Stock PyTorch version {running} is not supported in Lazy mode.")
    if "library" in faults:
        ctypes.CDLL(
            str(Path(__file__).parent / "lib" / f"libhabana_pytorch{'' if settings().is_lazy else '2'}_plugin.so")
        )
