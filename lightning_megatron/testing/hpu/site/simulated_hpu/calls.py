"""How often this process has used what: for tests that want to know which path ran."""

from __future__ import annotations

from collections import Counter

_counts: Counter[str] = Counter()


def count(name: str) -> None:
    """Note one call."""
    _counts[name] += 1


def counts() -> Counter[str]:
    """Calls so far by name of the op or function; a copy."""
    return Counter(_counts)


def reset() -> None:
    """Start from zero."""
    _counts.clear()
