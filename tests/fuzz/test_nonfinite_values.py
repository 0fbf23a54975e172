"""A few of the cases: a hundred are one call, see ``nonfinite_values.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nonfinite_values import check

from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import kind_in_tests


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(kind_in_tests() is not CPU, reason="they expect answers at once, as a CPU gives them")
def test_a_bad_value_is_named_on_all_ranks_wherever_it_is_put(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert sum(check(12, 2, ranks, tmp_path, largest=2).values()) == 12
