"""Functions whose operations follow from the shapes of their arguments: calls with equal shapes do equal work.

Blockwise attention, or a product for each expert, is thousands of small operations. Code that counts operations and
needs no values can run such a function once for each set of shapes. The mark makes the function overridable like those
of torch (https://docs.pytorch.org/docs/stable/torch.overrides.html): a ``TorchFunctionMode`` sees its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "depends_on_shapes"


def by_shape(function: F) -> F:
    """Mark a function without gradients whose operations depend on the shapes of its tensors, and on no value in them.

    It must not communicate or draw random numbers. It returns newly allocated tensors, and may write only values that
    depend on activations or weights into its arguments.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and has_torch_function(args):
            return handle_torch_function(call, args, *args, **kwargs)
        return function(*args, **kwargs)

    setattr(call, _MARK, True)
    return call  # type: ignore[return-value]


def is_by_shape(function: Callable[..., Any]) -> bool:
    """True for a function that :func:`by_shape` has marked."""
    return getattr(function, _MARK, False)
