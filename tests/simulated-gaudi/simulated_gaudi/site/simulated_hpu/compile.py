"""Compile the extension into a directory, and load it: ``python compile.py DIRECTORY``, run as a separate process."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.utils.cpp_extension import load

NAME = "simulated_hpu_native"

if __name__ == "__main__":
    sources = sorted(str(path) for path in (Path(__file__).parent / "native").glob("*.cpp"))
    load(NAME, sources, build_directory=sys.argv[1], extra_cflags=["-O1", "-w"])
