"""Workers of a DataLoader neither keep a rank that has failed nor outlive one that is gone."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from torch.utils.data import DataLoader, Dataset

from lightning_megatron.lightning.stopping.worker_signals import let_workers_outlive_signals
from lightning_megatron.testing.workers import PRELOAD

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(PRELOAD)
HELD: list[Any] = []


class Rows(Dataset[Any]):
    """One sample that raises, or never comes."""

    def __init__(self, folder: Path, raises: bool) -> None:
        self._folder, self._raises = folder, raises

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        (self._folder / f"{os.getpid()}.worker").touch()
        if self._raises:
            raise ValueError("no such sample")
        time.sleep(600)


def rank(folder: Path, raises: bool) -> None:
    loader = DataLoader(Rows(folder, raises), num_workers=1, multiprocessing_context="fork")
    let_workers_outlive_signals(loader)
    HELD.append(iter(loader))  # as a traceback does
    if raises:
        with pytest.raises(ValueError, match="no such sample"):
            next(HELD[0])
        return
    while not any(folder.iterdir()):
        time.sleep(0.02)
    os._exit(1)


def is_running(pid: int) -> bool:
    """False for what nobody has waited for, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("raises", [True, False])
def test_a_rank_with_a_bad_worker_ends_and_leaves_none(tmp_path: Path, raises: bool) -> None:
    process = SERVER.Process(target=rank, args=(tmp_path, raises))
    process.start()
    process.join(PATIENCE)
    ended = not process.is_alive()
    process.kill()
    assert ended
    assert process.exitcode == (0 if raises else 1)
    (worker,) = (int(file.stem) for file in tmp_path.iterdir())
    end = time.monotonic() + PATIENCE
    while is_running(worker) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(worker)
