"""Causes of memory that both a formula and a rehearsal can name.

A formula knows the purpose of a tensor, a rehearsal the module that made it; these causes are common to both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lightning_megatron.tools.planning.memory.formulas import BATCH, COMMUNICATION, FP8, PIPELINE

OWNED = ("parameters", "gradients", "main parameters", "optimizer state")
WORK = "activations, their gradients, temporaries"
REST = "batch, tables and all else"
COMMON = (*OWNED, FP8, WORK, PIPELINE, COMMUNICATION, REST)
"""The causes, in the order in which reports list them."""
_REST = {BATCH, "other", "setup", "optimizer step"}


def common_cause(cause: str) -> str:
    """The common name of a cause of ``memory_of`` or of a rehearsal."""
    if cause in COMMON:
        return cause
    if cause in _REST:
        return REST
    return COMMUNICATION if cause.startswith("pieces of sums") else WORK


def by_common_cause(by_cause: Mapping[str, int]) -> dict[str, int]:
    """Bytes by common cause, without causes of 0 bytes."""
    found: Counter[str] = Counter()
    for cause, size in by_cause.items():
        found[common_cause(cause)] += size
    return {cause: found[cause] for cause in COMMON if found[cause]}
