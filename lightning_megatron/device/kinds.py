"""Kinds of device, and the best one of this machine.

The Makefile runs this file by itself, so it imports nothing else of this package.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch


@dataclass(frozen=True)
class DeviceKind:
    """Properties of a kind of device.

    Attributes:
        type: torch's device type.
        backend: torch.distributed backend for tensors of this device.
        supports_fp16_training: True if fp16 training with a loss scale is possible.
        supports_double: True if there is fp64 arithmetic.
        supports_sync_batchnorm: True if torch's ``SyncBatchNorm`` works.
        peak_bf16_flops: matmul FLOP/s of one device by (part of) its marketing name, for MFU; vendor data sheets.
        compiles_shapes: True if the device's software compiles its kernels again for every new shape.
    """

    type: str
    backend: str
    supports_fp16_training: bool
    supports_double: bool
    supports_sync_batchnorm: bool
    peak_bf16_flops: Mapping[str, float]
    compiles_shapes: bool = field(default=False, kw_only=True)


CPU = DeviceKind("cpu", "gloo", False, True, False, {})
CUDA = DeviceKind(
    "cuda",
    "nccl",
    True,
    True,
    True,
    {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12},
)
HPU = DeviceKind("hpu", "hccl", True, False, False, {"GAUDI2": 432e12, "GAUDI3": 1835e12}, compiles_shapes=True)

KINDS = {kind.type: kind for kind in (CPU, CUDA, HPU)}


def kind_of(device: torch.device | str) -> DeviceKind:
    """The :class:`DeviceKind` of a torch device.

    Raises:
        ValueError: if this package does not support the device type.
    """
    name = torch.device(device).type
    if name not in KINDS:
        raise ValueError(f"device type {name!r} is not supported; supported: {', '.join(KINDS)}")
    return KINDS[name]


WEIGHT_SHARING = "PT_HPU_WEIGHT_SHARING"


def prepare_bridge() -> None:
    """Switch off the weight sharing of Gaudi's bridge before its import, unless the user has set the variable.

    In lazy mode its weight sharing would replace parameters when a module moves, and ignore new storage (``param.data =
    x``), so that the optimizer would update its flat buffer while the forward reads another tensor. Weights that this
    package shares are passed from layer to layer, and do not need it.
    """
    if "habana_frameworks.torch" not in sys.modules:
        os.environ.setdefault(WEIGHT_SHARING, "0")


@lru_cache(maxsize=1)
def why_no_hpu() -> str | None:
    """Reason why no Gaudi is available, in words; ``None`` if one is.

    The bridge is imported by the first call, not earlier. It fails with any class of error: ``AssertionError`` or
    ``AttributeError`` for a torch that it was not built for, ``OSError`` for a library that is missing.
    """
    if importlib.util.find_spec("habana_frameworks") is None:
        return "Gaudi's bridge (habana_frameworks, of habana-torch-plugin) is not installed; its containers have it"
    prepare_bridge()
    try:
        hpu = importlib.import_module("habana_frameworks.torch.hpu")
        found = bool(hpu.is_available())
    except Exception as error:
        return f"Gaudi's bridge is installed, but fails with {type(error).__name__}: {error}"
    return None if found else "Gaudi's bridge is installed, but sees no card"


def hpu_available() -> bool:
    """True if Gaudi's bridge is installed, fits this torch and sees a card; the first call imports it."""
    return why_no_hpu() is None


def best_available() -> DeviceKind:
    """Best available kind: Gaudi, CUDA, CPU. Gaudi comes first because its GPU-migration toolkit simulates CUDA."""
    if hpu_available():
        return HPU
    return CUDA if torch.cuda.is_available() else CPU
