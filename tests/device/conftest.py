"""Collection of this folder: on simulated HPUs everything, on real cards the rules alone (``--hpu-real``).

Elsewhere there are only the tests that start such sessions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import simulated_gaudi as hpu
from simulated_gaudi import real_card

HERE = Path(__file__).parent
STARTERS = ("test_sessions.py", "test_real_cards.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A hook, not a list: this file may be read before the plugin has switched the simulation on."""
    if collection_path.suffix != ".py":
        return None
    if config.getoption(real_card.REAL):
        return True if collection_path.parent == HERE else None
    starts_sessions = collection_path.name in STARTERS
    return True if starts_sessions == hpu.enabled() else None
