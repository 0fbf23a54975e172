"""Registration of ops with torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import library as operators

from simulated_hpu import calls, faults
from simulated_hpu.settings import settings

_hpu_ops = operators.Library("hpu", "FRAGMENT")  # ops live as long as this does


def define_op(schema: str, body: Callable[..., Any], shapes: Callable[..., Any] | None = None) -> None:
    """Define ``hpu::<schema>`` for tensors of the device only, without a gradient, and count its calls.

    In eager mode the bridge also has kernels for meta tensors, for whole graphs of ``torch.compile``.

    Args:
        schema: name, arguments and returns, without the namespace.
        body: called with the arguments.
        shapes: called with meta tensors; ``None`` for ``body``, if that reads no values.
    """
    name = schema.split("(")[0]

    @functools.wraps(body)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.count(f"hpu::{name}")
        faults.before(name)
        with torch.no_grad():
            return faults.after(name, body(*args, **kwargs))

    _hpu_ops.define(schema)
    _hpu_ops.impl(name, counted, "HPU")
    if not settings().is_lazy:
        _hpu_ops.impl(name, shapes or body, "Meta")


def differentiate(name: str, forward: Callable[..., Any]) -> None:
    """Give an op a gradient: ``forward`` is called instead of it where a gradient may be wanted."""
    _hpu_ops.impl(name, forward, "AutogradHPU")
