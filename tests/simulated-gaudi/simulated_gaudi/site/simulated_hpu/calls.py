"""Number of calls of each op and function in this process, for tests that check the path taken."""

from __future__ import annotations

from collections import Counter

from simulated_hpu.native_extension import native

_counts: Counter[str] = Counter()
_expert_rows: Counter[str] = Counter()


def count(name: str) -> None:
    """Count one call."""
    _counts[name] += 1


def counts() -> Counter[str]:
    """Calls so far by name of the op or function; a copy."""
    own = {name: number for name, number in native().hccl_counts().items() if number}
    return Counter(_counts) + Counter(own)


def add_expert_rows(kernel: str, rows: int) -> None:
    """Count rows that a kernel of the experts' op has multiplied in a forward, each by one expert."""
    _expert_rows[kernel] += rows


def expert_rows() -> Counter[str]:
    """Rows so far, by kernel: ``"dense"`` or ``"ranged"``; a copy."""
    return Counter(_expert_rows)


def reset() -> None:
    """Start from zero."""
    _counts.clear()
    _expert_rows.clear()
    native().reset_hccl_counts()
