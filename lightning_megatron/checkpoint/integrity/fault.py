"""A fault of a checkpoint, with its file and its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN = 3


@dataclass(frozen=True)
class Fault:
    """A fault, in words.

    Attributes:
        file: name of the file inside the checkpoint.
        what: description of the fault.
        tensors: keys of the tensors concerned; empty if they are not known, or for other values.
    """

    file: str
    what: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.tensors:
            return f"{self.file}: {self.what}"
        more = f" and {len(self.tensors) - _SHOWN} more" if len(self.tensors) > _SHOWN else ""
        return f"{self.file}: {self.what} ({', '.join(self.tensors[:_SHOWN])}{more})"


def listed(faults: Sequence[object], most: int = 10) -> str:
    """The first faults, one a line."""
    shown = [f"  - {fault}" for fault in faults[:most]]
    if len(faults) > most:
        shown.append(f"  - ... and {len(faults) - most} more")
    return "\n".join(shown)
