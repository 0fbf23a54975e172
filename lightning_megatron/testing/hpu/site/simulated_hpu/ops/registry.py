"""How an op comes to torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from simulated_hpu import calls

# Ops live as long as their library does.
_library = torch.library.Library("hpu", "FRAGMENT")


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

    _library.define(schema)
    _library.impl(name, counted, "HPU")


def differentiate(name: str, forward: Callable[..., Any]) -> None:
    """Give an op a gradient: ``forward`` is called instead of it where a gradient may be wanted."""
    _library.impl(name, forward, "AutogradHPU")
