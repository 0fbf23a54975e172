"""A fact about this machine, with its fault."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A checked fact.

    Attributes:
        subject: name of the fact.
        value: version, size or state.
        fault: the fault and its remedy; empty if there is none.
        harmful: True if training will fail or go wrong; else the fault is only a note.
    """

    subject: str
    value: str
    fault: str = ""
    harmful: bool = True

    @property
    def verdict(self) -> str:
        """``ok``, ``note`` or ``wrong``."""
        return "ok" if not self.fault else "wrong" if self.harmful else "note"
