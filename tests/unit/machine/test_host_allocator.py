from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from lightning_megatron.device import keep_freed_memory

CPU = torch.device("cpu")
FAULTS = """
import resource, sys, torch
from lightning_megatron.device import keep_freed_memory
assert keep_freed_memory(torch.device("cpu")) is (sys.argv[1] == "kept")
for turn in range(16):  # the heap grows for some turns, until its pieces fit
    if turn == 12:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(size << 18) for size in (1, 16, 40)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_other_devices_and_the_choice_of_a_user_are_left_alone() -> None:
    assert not keep_freed_memory(torch.device("meta"), {})
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        assert not keep_freed_memory(CPU, {name: "1"})


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own function")
def test_pages_of_freed_blocks_are_not_filled_again() -> None:
    def faults(kept: bool) -> int:
        choice = {} if kept else {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))} | choice
        words = [sys.executable, "-c", FAULTS, "kept" if kept else "given back"]
        return int(subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout)

    pages = 4 * (57 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults(kept=False) > pages // 2
    assert faults(kept=True) < pages // 100
