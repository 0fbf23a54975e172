"""Everything in this folder, on both versions of the simulated software: each in a session of its own, as a process
has one for good.

What is slow of it runs on the newer version alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.testing.jobs import own_environment

HERE = Path(__file__).parent
PLUGIN = "lightning_megatron.testing.hpu.plugin"


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["1.19", "1.21"])
def test_on_a_simulated_hpu(profile: str) -> None:
    few = [] if profile == "1.21" else ["-m", "not slow"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "--hpu-sim", profile, *few, str(HERE)]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=own_environment(), capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
