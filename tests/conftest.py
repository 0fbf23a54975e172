from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_megatron.testing.workers import WorkerPool

Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def _pool() -> Iterator[WorkerPool]:
    with WorkerPool(size=8) as pool:
        yield pool


@pytest.fixture
def ranks(_pool: WorkerPool) -> Ranks:
    """``ranks(4, function, *args)`` runs a function on four gloo ranks and returns their results."""
    return _pool.run
