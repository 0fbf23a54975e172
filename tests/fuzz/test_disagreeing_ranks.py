from __future__ import annotations

import pytest
from disagreeing_ranks import cases, run


@pytest.mark.slow
def test_what_ranks_were_given_differently_is_named_before_the_first_step(tmp_path):
    # A few; all of them are one call: see disagreeing_ranks.py.
    assert len(cases()) >= 57
    named, trained, _ = run(8, 1, tmp_path)
    assert named + trained == 8
