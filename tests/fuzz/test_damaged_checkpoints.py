"""A few of the cases: five hundred are one call, see ``damaged_checkpoints.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaged_checkpoints import DAMAGES, check


@pytest.mark.slow
def test_no_damaged_checkpoint_is_trained_on(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    table = check(len(DAMAGES), 1, ranks, tmp_path)
    assert sum(sum(counts.values()) for counts in table.values()) == len(DAMAGES)
