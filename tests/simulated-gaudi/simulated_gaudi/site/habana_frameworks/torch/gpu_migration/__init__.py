"""The migration toolkit, for a module's own code only: once imported, "cuda" means HPU in this thread.

The real one also rewrites nccl, inductor and much else; the simulation rewrites the devices of tensors and modules, and
the devices that ``torch.cuda`` reports.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import habana_frameworks.torch.hpu as hpu


def _migrated(value: Any) -> Any:
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "hpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("hpu")
    return value


class _Migration(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _migrated(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0].to("hpu")
        return func(*map(_migrated, args), **kwargs)


def _module_to_hpu(module: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    return module.to("hpu")


torch.cuda.is_available = hpu.is_available
torch.cuda.device_count = hpu.device_count
torch.cuda.current_device = hpu.current_device
torch.nn.Module.cuda = _module_to_hpu  # type: ignore[assignment, method-assign]
_Migration().__enter__()
