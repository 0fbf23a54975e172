"""Operations of a run for which the host waits: on a device they empty its queue, and no CUDA graph can hold them."""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import ExitStack
from os import sep
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_megatron
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import kind_in_tests

KIND = kind_in_tests()
ROOTS = (Path(lightning_megatron.__file__).parent, Path(__file__).parent / "simulated-gaudi")
"""Folders of the package and of the simulated Gaudi, whose own functions a test can leave out."""
WAITING = {
    "_local_scalar_dense",  # item, float, bool
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""Operators whose result, or its shape, the host must know before it goes on."""
OF_THE_HOST = {"rng.py:draw"}
"""Functions that read a tensor of the host on every device."""


class HostWaits:
    """Finds operations for which the host waits, where it is entered as a context.

    Attributes:
        found: number of times by operation and the package's function that called it: ``tolist in moe/x.py:count``.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._stack = ExitStack()

    def __enter__(self) -> HostWaits:
        self._stack.enter_context(_Reads(self.found))
        self._stack.enter_context(_Operators(self.found))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _Reads(TorchFunctionMode):
    """Reads of whole tensors, which are no operators on the CPU, and numbers that are put on a device."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if KIND is CPU and func in (Tensor.tolist, Tensor.cpu, Tensor.numpy) and place() not in OF_THE_HOST:
            self._found[f"{func.__name__} in {place()}"] += 1
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, Tensor.new_tensor) and out.device.type != CPU.type and place() not in OF_THE_HOST:
            self._found[f"{func.__name__} in {place()}"] += 1
        return out


class _Operators(TorchDispatchMode):
    """Operators whose results the host must know."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        unsized = str(func) == "aten.repeat_interleave.Tensor" and not (kwargs or {}).get("output_size")
        waits = name in WAITING or unsized or (name == "index" and _by_mask(args))
        if (waits and _may_wait(args)) or (name in ("_to_copy", "copy_") and _is_blocking_copy(args, kwargs or {})):
            self._found[f"{name} in {place()}"] += 1
        return func(*args, **(kwargs or {}))


def _may_wait(args: Any) -> bool:
    """True unless the operation reads what lies on the host on every device, or on a device that is no CPU."""
    is_on_device = KIND is CPU or any(x.device.type != CPU.type for x in tree_leaves(args) if isinstance(x, Tensor))
    return is_on_device and place() not in OF_THE_HOST


def _is_blocking_copy(args: Any, kwargs: Any) -> bool:
    """True for a copy between host and device that the host waits for; on a CPU there is none."""
    given = dict(zip(("to", "src", "non_blocking"), args, strict=False)) | kwargs
    other = given["src"].device if "src" in given else given.get("device") or given["to"].device
    apart = torch.device(other).type != given["to"].device.type
    return apart and not given.get("non_blocking") and place() not in OF_THE_HOST


def _by_mask(args: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def place() -> str:
    """The function of the package, the simulated Gaudi or Lightning nearest to an operation."""
    for frame in reversed(traceback.extract_stack()):
        file = Path(frame.filename)
        for root in ROOTS:
            if file.is_relative_to(root):
                return f"{file.relative_to(root)}:{frame.name}"
        if f"{sep}lightning{sep}" in frame.filename:
            return f"{file.name}:{frame.name}"
    return "?"
