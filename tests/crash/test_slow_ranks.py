from __future__ import annotations

import pytest
from slow_ranks import SOON, run


@pytest.mark.exhaustive
def test_slow_ranks_are_named_and_nobody_else(tmp_path):
    # 10,000 steps and more trials are one call: see slow_ranks.py.
    quiet, delays = run(300, 3, 1, "dp2", tmp_path)
    assert quiet["found"] == []
    assert quiet["skipped"] == 0
    assert max(delays) <= SOON
