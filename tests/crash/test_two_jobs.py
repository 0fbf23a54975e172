from __future__ import annotations

import pytest
from two_jobs import run


@pytest.mark.slow
def test_of_two_jobs_in_one_folder_one_has_it_and_the_other_names_it(tmp_path):
    # A few; a hundred are one call: see two_jobs.py.
    assert sum(run(2, 1, tmp_path).values()) == 2
