"""One thing that is wrong with a checkpoint: in which file, with which tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN = 3
_LISTED = 10


@dataclass(frozen=True)
class Fault:
    """A fault, in words.

    Attributes:
        file: name of the file inside the checkpoint.
        what: what is wrong with it.
        tensors: keys that it concerns; empty where that is not known, or where it is no tensor.
    """

    file: str
    what: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.tensors:
            return f"{self.file}: {self.what}"
        more = f" and {len(self.tensors) - _SHOWN} more" if len(self.tensors) > _SHOWN else ""
        return f"{self.file}: {self.what} ({', '.join(self.tensors[:_SHOWN])}{more})"


def listed(faults: Sequence[object]) -> str:
    """The first of them, a line each."""
    shown = [f"  - {fault}" for fault in faults[:_LISTED]]
    if len(faults) > _LISTED:
        shown.append(f"  - ... and {len(faults) - _LISTED} more")
    return "\n".join(shown)
