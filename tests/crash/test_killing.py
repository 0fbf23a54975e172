from __future__ import annotations

import pytest
from killing import run


@pytest.mark.slow
def test_killed_jobs_resume_bit_for_bit_and_leave_nothing_half_written(tmp_path):
    # A few; sixty are one call: see killing.py.
    assert sum(run(4, 1, tmp_path).values()) == 4


@pytest.mark.slow
def test_killed_jobs_that_save_single_files_do_so_too(tmp_path):
    assert sum(run(4, 2, tmp_path, one_file=True).values()) == 4
