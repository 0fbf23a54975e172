"""Functions whose work follows from the shapes of their arguments: a rehearsal runs such a function once.

Attention block by block, or a product for each expert, is thousands of small operations, and on tensors without memory
each costs as much time as a large one. A rehearsal that has run :func:`by_shape` functions once knows what each later
call of the same shapes does to memory, and makes only its results (``rehearsal/known_calls.py``). Everywhere else they
are called as if they were not marked.
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
    """Callback that calls functions in place of their callers."""

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of a function."""
        ...


_RUNNER: ContextVar[Runner | None] = ContextVar("runner of functions by shape", default=None)


def by_shape(function: F) -> F:
    """Mark a function without gradients whose operations depend on the shapes of its tensors, and on no value in them.

    It must not communicate, nor draw random numbers. It returns tensors of its own, and may write to its arguments what
    depends on activations or weights.
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
    """Context in which a runner calls the functions that :func:`by_shape` marks."""
    token = _RUNNER.set(runner)
    try:
        yield
    finally:
        _RUNNER.reset(token)
