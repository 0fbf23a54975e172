"""Weight sharing of the lazy mode, on by default: parameters of modules that move to the device become wrappers.

The bridge says that "changing parameters data tensors in HPU is impossible" under it, and users report that a copy by
``.data`` does not reach what the forward reads. The simulation does this: a parameter copies the values that are
assigned to its ``data``, and keeps its own memory.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor, nn

_data: Any = vars(torch._C.TensorBase)["data"]


class HabanaParameterWrapper(nn.Parameter):
    """A parameter on the device."""

    @property
    def data(self) -> Tensor:
        """The values, without a gradient."""
        values: Tensor = _data.__get__(self)
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        own = _data.__get__(self)
        if values.device == own.device and values.shape == own.shape:
            own.copy_(values)
        else:
            _data.__set__(self, values)


def _wrap_parameters(module: nn.Module) -> None:
    seen: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            if type(parameter) is not nn.Parameter or parameter.device.type != "hpu":
                continue
            new = seen.get(id(parameter))
            if new is None:  # a new object: attributes that Python code has given the old one are lost
                new = nn.Parameter(parameter.detach(), parameter.requires_grad)
                new.__class__ = HabanaParameterWrapper
                seen[id(parameter)] = new
            setattr(each, name, new)


def enable_weight_sharing() -> None:
    """Wrap ``Module.to``, unless ``PT_HPU_WEIGHT_SHARING=0`` is in the environment."""
    if os.environ.get("PT_HPU_WEIGHT_SHARING", "1") == "0":
        return
    original = nn.Module.to

    @functools.wraps(original)
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        moved: nn.Module = original(self, *args, **kwargs)
        _wrap_parameters(moved)
        return moved

    nn.Module.to = to  # type: ignore[assignment, method-assign]
