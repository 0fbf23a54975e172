from __future__ import annotations

import pytest
from signalling import run


@pytest.mark.exhaustive
def test_jobs_that_are_signalled_save_and_resume_bit_for_bit(tmp_path):
    # One of each kind; sixty are one call: see signalling.py.
    count, times = run(3, 1, tmp_path)
    assert sum(count.values()) == len(times) == 3
