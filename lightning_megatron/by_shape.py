"""Functions whose operations follow from the shapes of their arguments: calls with equal shapes do equal work.

Blockwise attention, or a product for each expert, is thousands of small operations. Code that counts operations and
needs no values can run such a function once for each set of shapes: it passes a runner to :func:`calls_go_to`. Without
a runner the mark has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


class Runner(Protocol):
    """Callback that runs a marked function in place of its caller."""

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``function(*args, **kwargs)``."""
        ...


_RUNNER: ContextVar[Runner | None] = ContextVar("runner of functions by shape", default=None)


def by_shape(function: F) -> F:
    """Mark a function without gradients whose operations depend on the shapes of its tensors, and on no value in them.

    It must not communicate or draw random numbers. It returns newly allocated tensors, and may write only values that
    depend on activations or weights into its arguments.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        runner = _RUNNER.get()
        return function(*args, **kwargs) if runner is None else runner(function, args, kwargs)

    return call  # type: ignore[return-value]


@contextmanager
def calls_go_to(runner: Runner) -> Iterator[None]:
    """Let ``runner`` execute the functions that :func:`by_shape` marks, within the block."""
    token = _RUNNER.set(runner)
    try:
        yield
    finally:
        _RUNNER.reset(token)
