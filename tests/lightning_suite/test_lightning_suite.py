"""A part of Lightning's own tests with our strategy in place of its own, where a checkout of them can be had."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from swapped_suite import main

CHECKOUT = os.environ.get("LIGHTNING_CHECKOUT")
PART = ("loops/optimization", "loops/test_training_loop.py", "models/test_hooks.py", "trainer/optimization")


@pytest.mark.exhaustive
@pytest.mark.skipif(CHECKOUT is None, reason="LIGHTNING_CHECKOUT names no checkout of Lightning's repository")
def test_what_fails_with_our_strategy_alone_stands_on_the_list() -> None:
    assert main([str(Path(str(CHECKOUT)).absolute()), *PART]) == 0
