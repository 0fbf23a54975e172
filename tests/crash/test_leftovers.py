"""Three jobs that are ended in mid-work; all kinds and signals are one call: see leftovers.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from leftovers import run

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["fit with loading workers", "preprocess", "torchrun"])
def test_a_job_that_is_ended_leaves_nothing(tmp_path, kind):
    assert not run(1, 2, tmp_path, kind)
