from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from lightning_megatron.testing.workers import WorkerPool

settings.register_profile("untimed", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("untimed")

Ranks = Callable[..., list[Any]]
BUDGET = pytest.StashKey[float]()
BEGUN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "skip what has not begun after that many minutes, and exhaustive tests after half of them"
    parser.addoption("--budget", type=float, default=float("inf"), metavar="MINUTES", help=text)


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the tests in the background has them ignore Ctrl-C, and processes that they start as well.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[BUDGET] = 60 * config.getoption("--budget")
    config.stash[BEGUN] = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def patience(item: pytest.Item) -> int:
        return next((n for n, mark in enumerate(("exhaustive", "slow")) if item.get_closest_marker(mark)), 2)

    items.sort(key=patience, reverse=True)  # what is left out is at the end


def pytest_runtest_setup(item: pytest.Item) -> None:
    spent, budget = time.monotonic() - item.config.stash[BEGUN], item.config.stash[BUDGET]
    share = 0.5 if item.get_closest_marker("exhaustive") is not None else 1.0
    if spent > share * budget:
        pytest.skip(f"no time left: {spent / 60:.0f} of --budget {budget / 60:.0f} minutes are spent")


@pytest.fixture(scope="session")
def _pool() -> Iterator[WorkerPool]:
    with WorkerPool(size=8) as pool:
        yield pool


@pytest.fixture
def ranks(_pool: WorkerPool) -> Ranks:
    """``ranks(4, function, *args)`` runs a function on four gloo ranks and returns their results."""
    return _pool.run
