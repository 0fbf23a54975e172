"""Results of autograd functions, as ``torch.compile`` can take them."""

from __future__ import annotations

import torch
from torch import Tensor


def result(x: Tensor) -> Tensor:
    """What the ``forward`` of an autograd function returns: ``x``, or in a trace a view of it.

    ``torch.compile`` of torch 2.11 loses the gradient of a function whose result an operation has given back that it
    was given, as ``x.mul_(y)`` does, or ``x.to(dtype)`` of that dtype
    (https://github.com/pytorch/pytorch/issues/180642). A view is a tensor of its own.
    """
    return x.view_as(x) if torch.compiler.is_compiling() else x
