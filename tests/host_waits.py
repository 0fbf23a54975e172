"""Operations of a run for which the host waits: on a device they empty its queue, and no CUDA graph can hold them."""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_megatron

PACKAGE = Path(lightning_megatron.__file__).parent
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
    """Reads of whole tensors, which are no operators on the CPU."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.cpu, Tensor.numpy) and place() not in OF_THE_HOST:
            self._found[f"{func.__name__} in {place()}"] += 1
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Operators whose results the host must know."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        unsized = str(func) == "aten.repeat_interleave.Tensor" and not (kwargs or {}).get("output_size")
        waits = name in WAITING or unsized or (name == "index" and _by_mask(args))
        if waits and place() not in OF_THE_HOST:
            self._found[f"{name} in {place()}"] += 1
        return func(*args, **(kwargs or {}))


def _by_mask(args: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def place() -> str:
    """The function of the package nearest to an operation, or of Lightning where none is above it."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(str(PACKAGE)):
            return f"{Path(frame.filename).relative_to(PACKAGE)}:{frame.name}"
    for frame in reversed(traceback.extract_stack()):
        if "lightning" in frame.filename:
            return f"{Path(frame.filename).name}:{frame.name}"
    return "?"
