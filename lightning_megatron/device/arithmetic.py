"""Arithmetic of a device: its speed, and the formats that it multiplies natively."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_megatron.device.cards import device_name
from lightning_megatron.device.kinds import CPU, CUDA, kind_of


def peak_flops(device: torch.device) -> float | None:
    """bf16 matmul FLOP/s of one device according to its vendor, ``None`` if unknown."""
    kind = kind_of(device)
    if kind is CPU:
        return None
    name = device_name(device).upper()
    known = sorted(kind.peak_bf16_flops.items(), key=lambda item: -len(item[0]))
    return next((flops for part, flops in known if part.upper() in name), None)


_BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx10_1", "avx10_2", "bf16")


def _multiplies_bf16(capabilities: Mapping[str, Any]) -> bool:
    answers = [bool(capabilities[name]) for name in _BF16_INSTRUCTIONS if name in capabilities]
    return any(answers) or not answers


def cpu_capabilities(cpu: object = torch.cpu) -> Mapping[str, Any]:
    """Capabilities of this CPU; empty if torch does not report them, as the oldest supported torch does not.

    Args:
        cpu: the module ``torch.cpu``.
    """
    found: Mapping[str, Any] = getattr(cpu, "get_capabilities", dict)()
    return found


# Read at import: reading it inside a function that torch.compile traces would break the graph.
_CPU_MULTIPLIES_BF16 = _multiplies_bf16(cpu_capabilities())


def has_bf16_arithmetic(device: torch.device, capabilities: Mapping[str, Any] | None = None) -> bool:
    """True if ``device`` multiplies bf16 natively, without converting every element to fp32.

    Assumed for devices other than CPUs, and for CPUs whose capabilities torch does not report.

    Args:
        device: device of the product.
        capabilities: capabilities of the CPU, named as in ``torch.cpu.get_capabilities()``; ``None`` means this CPU's.
    """
    if device.type != CPU.type:
        return True
    return _CPU_MULTIPLIES_BF16 if capabilities is None else _multiplies_bf16(capabilities)


def multiplies_bf16(x: Tensor) -> bool:
    """:func:`has_bf16_arithmetic` of a tensor's device; a ``TorchFunctionMode`` may answer for another device."""
    if not torch.compiler.is_compiling() and has_torch_function((x,)):
        answer: bool = handle_torch_function(multiplies_bf16, (x,), x)
        return answer
    return has_bf16_arithmetic(x.device)


_ADDS_WIDER = "dtype_out" in torch.ops.aten.addmm.overloads()  # read at import, as above


def adds_products(device_type: str) -> bool:
    """True if one kernel adds a product of 16-bit matrices to an fp32 sum: on CUDA, from torch 2.8 on."""
    return device_type == CUDA.type and _ADDS_WIDER


def _cpu_vendor() -> str:
    """Vendor of this machine's processor as Linux on x86 names it; empty elsewhere."""
    with suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "vendor_id":
                return value.strip()
    return ""


# Read at import, as above.
_CPU_VENDOR = _cpu_vendor()


def mkl_is_slow(vendor: str | None = None) -> bool:
    """True if Intel's MKL is torch's choice for fp32 products, and the processor is of another vendor.

    Args:
        vendor: vendor as in ``/proc/cpuinfo``; ``None`` means this processor's.
    """
    return torch.backends.mkl.is_available() and (_CPU_VENDOR if vendor is None else vendor) in _OTHER_VENDORS


_OTHER_VENDORS = ("AuthenticAMD", "HygonGenuine")


@dataclass(frozen=True)
class Fp8Arithmetic:
    """Capabilities of a card's fp8 matmul; the defaults hold for every Gaudi from Gaudi 2 on.

    Attributes:
        largest_e4m3: largest magnitude of its E4M3 format.
        mixes_formats: True if the operands of a product may have different formats.
    """

    largest_e4m3: float = 240.0
    mixes_formats: bool = False


_FP8_ARITHMETIC = {"GAUDI3": Fp8Arithmetic(448.0, True)}


def fp8_arithmetic(device: torch.device) -> Fp8Arithmetic:
    """The fp8 arithmetic of a card, by its name; an unknown card gets the defaults."""
    name = device_name(device).upper()
    return next((known for part, known in _FP8_ARITHMETIC.items() if part in name), Fp8Arithmetic())
