"""Everything in this folder on the newest version and Gaudi 2, and a covering part on the other versions and products:
each in a session of its own, as a process has one for good. The long sessions are exhaustive tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.machine.job_environment import own_environment

HERE = Path(__file__).parent
PLUGIN = "simulated_gaudi.plugin"
RULES = "rules"
COLLECTIVES = "--deselect=tests/device/rules/test_conformance_hccl.py"
QUICK = ("-m", "not slow and not exhaustive")
EXPERTS = ("test_simulated_experts.py", "test_experts_on_ranks.py", "-m", "not exhaustive", "-k", "not numbers_do")
SLOW = ("-m", "slow and not exhaustive")
SESSIONS: dict[str, tuple[str, ...]] = {
    "1.24 GAUDI2": (".", f"--ignore={HERE / RULES}", *QUICK),
    "1.24 GAUDI2 rules": (RULES, *QUICK),
    "1.24 GAUDI2 slow": (".", *SLOW),
    "1.24 GAUDI2 exhaustive": (".", "-m", "exhaustive"),
    "1.19 GAUDI2": (".", *QUICK),
    "1.21 GAUDI2": (RULES, COLLECTIVES, "test_accelerator.py", "test_ops.py", *QUICK),
    "1.21 GAUDI2 experts": EXPERTS,
    "1.22 GAUDI3": (RULES, COLLECTIVES, *QUICK),
    "1.22 GAUDI3 experts": EXPERTS,
    "1.24 GAUDI3": (RULES, COLLECTIVES, "test_ops.py", "test_families.py", "test_fp8_training.py", *QUICK),
    "1.24 GAUDI3 long fp8": ("test_fp8_training.py", "-k", "200_steps"),
}
"""Tests by version and product; docs/evidence.py reads the names."""
IN_EVERY_RUN = (
    "1.24 GAUDI2",
    "1.24 GAUDI2 rules",
    "1.22 GAUDI3",
    "1.21 GAUDI2 experts",
)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.exhaustive) for name in SESSIONS],
)
def test_on_a_simulated_hpu(name: str) -> None:
    (profile, product, *_), words = name.split(), SESSIONS[name]
    chosen = [str(HERE / word) if (HERE / word).exists() else word for word in words]
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "--hpu-sim", profile, "--hpu-sim-device", product]
    environment = own_environment()
    environment.pop("PT_HPU_LAZY_MODE", None)  # each version has its default
    done = subprocess.run(
        [*command, *chosen],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
