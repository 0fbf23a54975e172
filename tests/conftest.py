from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import leaks
import pytest
import selection
import simulated_gaudi
import torch
from costs import Costs
from hypothesis import HealthCheck, settings
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_only as pl_rank_zero_only
from selection import Selection
from simulated_gaudi import real_card, rules

from lightning_megatron import device
from lightning_megatron.testing.workers import WorkerPool

# A busy machine is no fault of the code. The gate has the same examples each time, `make test-all` random ones.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("random", **UNTIMED)
settings.register_profile("gate", derandomize=True, database=None, **UNTIMED)
settings.load_profile("gate")

Ranks = Callable[..., list[Any]]
POOL = pytest.StashKey[WorkerPool]()
LONGEST = 24 * 3600.0
"""Seconds that no session takes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)
    text = "show the stacks of ranks that have not answered after that time, and go on with new ones"
    parser.addoption("--patience", type=float, default=600.0, metavar="SECONDS", help=text)
    parser.addoption("--costs", type=Path, metavar="FILE", help="write the CPU seconds of each test there, as JSON")
    text = "print so many files, those whose tests took most CPU seconds"
    parser.addoption("--dearest", type=int, default=0, metavar="FILES", help=text)
    real_card.add_options(parser)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    return real_card.supervise(config)


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the tests in the background has them ignore Ctrl-C, a service the end of a terminal, and so
    # would processes that they start: what is ignored is inherited, a handler is not.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    # Tensors of tests are tiny: threads of torch's would mostly wait for one another, at five times the CPU.
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    _own_temporary_folder(config)
    config.pluginmanager.register(Selection(config), "selection")
    if (part := config.getoption(real_card.PART)) is not None:
        config.pluginmanager.register(rules.Recorder(**part), "recorder")
    if (costs := Costs(config.getoption("--costs"), config.getoption("--dearest"))).file or costs.dearest:
        config.pluginmanager.register(costs, "costs")


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay: a collection that looks at them takes half a second


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()  # so do the modules, compiled graphs and caches that a file's tests have loaded
    return result


def _own_temporary_folder(config: pytest.Config) -> None:
    """Make every file that is left visible. Folders of pytest's and the compiler's cache stay where they were."""
    shared = tempfile.gettempdir()
    get_temp_dir()  # the folder of multiprocessing's sockets lives longer than the session
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", shared)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{shared}/torchinductor_tests_{os.getuid()}")
    for old in Path(shared).glob("lm-tests-*"):  # of sessions that were killed
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > LONGEST:
                shutil.rmtree(old, ignore_errors=True)
    folder = tempfile.TemporaryDirectory(prefix="lm-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["TMPDIR"] = tempfile.tempdir = folder.name


@pytest.fixture(autouse=True)
def _rank_of_lightning() -> Iterator[None]:
    """A test that takes another rank in this process would silence Lightning's warnings in the tests behind it."""
    kept = [(each, getattr(each, "rank", None)) for each in (rank_zero_only, pl_rank_zero_only)]
    yield
    for each, rank in kept:
        each.rank = rank  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def _pool(pytestconfig: pytest.Config) -> Iterator[WorkerPool]:
    patience, real = pytestconfig.getoption("--patience"), pytestconfig.getoption(real_card.REAL)
    size = min(8, device.device_count(device.HPU)) if real else 8
    kind = device.HPU if real or simulated_gaudi.enabled() else device.CPU
    with WorkerPool(size=size, timeout=patience, kind=kind, takes_cards=real) as pool:
        pytestconfig.stash[POOL] = pool
        yield pool


@pytest.fixture
def ranks(_pool: WorkerPool, pytestconfig: pytest.Config) -> Ranks:
    """``ranks(4, function, *args)`` runs a function on four gloo ranks and returns their results."""
    if not pytestconfig.getoption(real_card.REAL):
        return _pool.run

    def run(world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
        if world_size > _pool.size:
            pytest.skip(f"needs {world_size} cards, and there are {_pool.size}")
        return _pool.run(world_size, *args, **kwargs)

    return run


@pytest.fixture(autouse=True)
def _nothing_is_left(pytestconfig: pytest.Config) -> Iterator[None]:
    """No process group, thread, variable, temporary file or process outlives a test."""
    if pytestconfig.getoption(real_card.REAL):  # the real software keeps threads of its own
        yield
        return

    def pool() -> list[int]:
        return pytestconfig.stash[POOL].process_ids if POOL in pytestconfig.stash else []

    before, environment = leaks.look(pool()), dict(os.environ)
    yield
    found = leaks.left(before, pool())
    kept = {name: value for name, value in os.environ.items() if name in leaks.OF_LIBRARIES}
    os.environ.clear()
    os.environ.update(environment | kept)
    if "process group the default one" in found:
        torch.distributed.destroy_process_group()
    assert not found, f"left behind: {', '.join(found)}"
