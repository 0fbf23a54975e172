"""Every function of docs/walks.md exists, and folders are counted right."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

from tests.walks import WALKS, steps_of, text_of


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_functions_that_exist_and_counts_their_folders(walk: str) -> None:
    steps = steps_of(walk)
    assert len(steps) == len(re.findall(r"^\d+\. ", text_of(walk), re.MULTILINE)) >= 12
    assert all(callable(step.resolve()) for step in steps)
    folders = {PurePosixPath(step.module).parent for step in steps} - {PurePosixPath(".")}
    assert f"These are {len(folders)} folders" in text_of(walk)


def test_there_are_four() -> None:
    assert len(WALKS) == 4
