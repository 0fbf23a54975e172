"""``ops_on_hpu.py`` on a simulated HPU, in a process of its own for each version of the Gaudi software."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("profile", ["1.19", "1.21"])
def test_ops_on_a_simulated_hpu(profile: str) -> None:
    tests = Path(__file__).with_name("ops_on_hpu.py")
    plugin = ["-p", "lightning_megatron.testing.hpu.plugin", "--hpu-sim", profile]
    words = [sys.executable, "-m", "pytest", "-q", *plugin, str(tests)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
