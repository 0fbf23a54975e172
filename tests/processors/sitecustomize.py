"""Makes every Python process believe that it runs on another processor: ``make test FAKE_PROCESSOR=old``.

Python imports this module when it starts, if its folder is in ``PYTHONPATH``. torch and oneDNN then use no instruction
that the named processor lacks, and torch reports its capabilities. Instructions that this machine lacks stay unused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple


class Processor(NamedTuple):
    """A kind of processor.

    Attributes:
        vendor: name in ``/proc/cpuinfo``; empty where there is none.
        capabilities: answer of ``torch.cpu.get_capabilities``.
        limits: variables that limit torch's own kernels and oneDNN's.
    """

    vendor: str
    capabilities: dict[str, Any]
    limits: dict[str, str]


AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
PROCESSORS = {
    "old": Processor(
        "AuthenticAMD", {"architecture": "x86_64", "avx2": True, "avx512_f": False, "avx512_bf16": False}, AVX2
    ),
    "bf16": Processor(
        "GenuineIntel",
        {"architecture": "x86_64", "avx2": True, "avx512_f": True, "avx512_bf16": True, "amx_bf16": False},
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    ),
    "arm": Processor("", {"architecture": "aarch64", "neon": True, "bf16": False}, AVX2),
}


class Disguise(MetaPathFinder):
    """Changes two modules after Python has loaded them: what torch reports, and the vendor that is read at import."""

    def __init__(self, processor: Processor) -> None:
        self.of_module = {
            "torch.cpu": ("get_capabilities", lambda: processor.capabilities),
            "lightning_megatron.device.arithmetic": ("_CPU_VENDOR", processor.vendor),
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual spec of a module, with a loader that changes it; ``None`` for all others."""
        if fullname not in self.of_module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                setattr(module, *self.of_module[fullname])

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if name := os.environ.get("FAKE_PROCESSOR"):
    os.environ.update(PROCESSORS[name].limits)
    sys.meta_path.insert(0, Disguise(PROCESSORS[name]))
