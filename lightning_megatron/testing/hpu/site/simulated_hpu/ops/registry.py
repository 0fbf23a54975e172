"""How an op comes to torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import library as operators

from simulated_hpu import calls

_hpu_ops = operators.Library("hpu", "FRAGMENT")  # ops live as long as this does


def define_op(schema: str, body: Callable[..., Any]) -> None:
    """Define ``hpu::<schema>`` for tensors of the device alone, with no gradient, and count its calls.

    Args:
        schema: name, arguments and returns, without the namespace.
        body: called with the arguments.
    """
    name = schema.split("(")[0]

    @functools.wraps(body)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.count(f"hpu::{name}")
        with torch.no_grad():
            return body(*args, **kwargs)

    _hpu_ops.define(schema)
    _hpu_ops.impl(name, counted, "HPU")


def differentiate(name: str, forward: Callable[..., Any]) -> None:
    """Give an op a gradient: ``forward`` is called instead of it where a gradient may be wanted."""
    _hpu_ops.impl(name, forward, "AutogradHPU")
