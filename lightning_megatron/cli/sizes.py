"""Numbers of bytes on a command line."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_in_bytes(text: str) -> int:
    """Bytes of a text such as ``500MB`` or ``5GB``.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B|)", text.strip().upper())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MB or 5GB")
    return size
