from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron.lightning.streams import dataloaders
from lightning_megatron.machine.host import shared_memory


def test_workers_with_little_shared_memory_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    there = 1 << 60
    monkeypatch.setattr(dataloaders, "shared_memory", partial(shared_memory, tmp_path, enough=there))
    rows: list[int] = [1, 2]
    dataloaders.start_workers_safely(DataLoader(rows), torch.device("cpu"))  # type: ignore[arg-type]
    assert not recwarn.list
    dataloaders.start_workers_safely(DataLoader(rows, num_workers=1), torch.device("cpu"))  # type: ignore[arg-type]
    (warning,) = recwarn.list
    assert "start the container with --shm-size" in str(warning.message)
    monkeypatch.setattr(dataloaders, "shared_memory", partial(shared_memory, tmp_path, enough=1))
    dataloaders.start_workers_safely(DataLoader(rows, num_workers=1), torch.device("cpu"))  # type: ignore[arg-type]
    assert len(recwarn.list) == 1
