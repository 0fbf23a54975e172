"""Numbers of bytes as users write and read them: ``500MB``, ``80GiB``."""

from __future__ import annotations

import re

from lightning_megatron.errors import Problem

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes of a text such as ``500MB`` or ``80GiB``.

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B|)", text.strip().upper())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ValueError(f"{text!r} is no size such as 500MB or 5GB")
    return size


def told_bytes(size: float) -> str:
    """A number of bytes as text: ``61.20 GiB``, or ``1.25 MiB`` below 1 GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def memory_bytes(given: int | str | None) -> int | None:
    """Bytes of an argument that may be a number, a text or ``None``."""
    return parse_bytes(given) if isinstance(given, str) else given


def memory_problems(name: str, given: int | str | None) -> list[Problem]:
    """Faults of an argument of :func:`memory_bytes`."""
    reason = "must be a number of bytes of at least 1, or a text such as '80GB' or '80GiB'"
    fault = [Problem(name, given, reason, ("80GB", "80GiB"))]
    if isinstance(given, str):
        try:
            parse_bytes(given)
        except ValueError:
            return fault
        return []
    return [] if given is None or given >= 1 else fault
