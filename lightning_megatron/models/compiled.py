"""Parts of a model that ``torch.compile`` can compile one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


class CompilablePart(nn.Module):
    """A module whose calls run through ``torch.compile`` after :meth:`compile`.

    Tracing fails on a parameter whose gradient has another dtype, such as a bf16 parameter with an fp32 gradient. So
    these gradients are detached from the parameters during a call, which does not need them.
    """

    is_compiled = False

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Run calls through ``torch.compile``, which gets these arguments."""
        super().compile(*args, **kwargs)
        self.is_compiled = True

    def run_context(self) -> AbstractContextManager[Any]:
        """Context of a compiled call."""
        return nullcontext()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, compiled or not."""
        if not self.is_compiled:
            return super().__call__(*args, **kwargs)
        given = (item for item in (*args, *kwargs.values()) if isinstance(item, nn.Parameter))
        with self.run_context(), _without_other_gradients((*self.parameters(), *given)):
            return super().__call__(*args, **kwargs)


@contextmanager
def _without_other_gradients(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Set gradients of another dtype than their parameters' to ``None`` within the context, and restore them."""
    taken = [(param, param.grad) for param in params if param.grad is not None and param.grad.dtype != param.dtype]
    for param, _ in taken:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in taken:
            param.grad = grad


def without_graphs(parts: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Context in which compiled parts run eagerly."""
    if any(isinstance(part, CompilablePart) and part.is_compiled for part in parts):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()  # do not import the compiler if nothing is compiled
