"""The simulated HPU keeps to its table, in both versions: each in a session of its own, for a process has one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PLUGIN = "lightning_megatron.testing.hpu.plugin"


@pytest.mark.parametrize("profile", ["1.19", "1.21"])
def test_conformance(profile):
    files = sorted(map(str, HERE.glob("test_conformance_*.py")))
    assert files
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "--hpu-sim", profile, *files]
    done = subprocess.run(command, cwd=HERE.parent.parent, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
