"""The private names of torch that a rehearsal needs, in one place; see the table in ``lightning/compat/_private.py``.

Fake tensors have shape, dtype, device and strides, and no memory (https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html).
The ``fake`` backend of process groups is one that sends nothing, for one process that plays one of many ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

# Importing the module registers the backend "fake".
from torch.testing._internal.distributed.fake_pg import FakeStore

# Where torch's own documentation of modes ("Extending PyTorch") has it.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DATA_DEPENDENT",
    "FAKE_BACKEND",
    "ITEM",
    "FakeStore",
    "FakeTensorMode",
    "Signature",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "is_summing",
    "signature_of",
    "without_fake_tensors",
]

FAKE_BACKEND = "fake"
ITEM = torch.ops.aten._local_scalar_dense.default
"""Operator behind ``tensor.item()``."""

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of fake tensors where a result, or its shape, depends on values."""


def without_fake_tensors() -> AbstractContextManager[Any]:
    """Context in which tensors have memory again."""
    return unset_fake_temporarily()


class Signature(NamedTuple):
    """Arguments that an operator writes.

    Attributes:
        written: numbers of the positional arguments that it writes to.
        written_names: names of the arguments that it writes to.
        is_view: True if its result is a view of an argument.
    """

    written: tuple[int, ...]
    written_names: tuple[str, ...]
    is_view: bool


def signature_of(operator: Any) -> Signature:
    """Signature of an operator, as a dispatch mode gets it."""
    schema = operator._schema
    arguments: Sequence[Any] = schema.arguments
    writes = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return Signature(tuple(i for i, _ in writes), tuple(name for _, name in writes), is_view)


def is_summing(reduce_op: Any) -> bool:
    """True if the reduction that an operator of ``c10d`` got is a sum."""
    return bool(reduce_op.op() == torch.distributed.ReduceOp.SUM)
