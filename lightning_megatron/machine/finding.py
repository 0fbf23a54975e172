"""One fact about this machine, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What was looked at.

    Attributes:
        subject: what it is.
        value: how it stands.
        fault: what does not fit, and what to do; empty if nothing.
        harmful: whether training will fail or go wrong for the fault; else it is worth knowing.
    """

    subject: str
    value: str
    fault: str = ""
    harmful: bool = True

    @property
    def verdict(self) -> str:
        """``ok``, ``note`` or ``wrong``."""
        return "ok" if not self.fault else "wrong" if self.harmful else "note"
