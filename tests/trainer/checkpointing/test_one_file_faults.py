"""Saves of one file that fail on some rank: the error is raised on all of them, and the file before stays whole."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy, VerifyCheckpoint
from lightning_megatron.checkpoint import CheckpointError, saving_file, verify
from lightning_megatron.checkpoint.formats.torch_file import TorchFile
from lightning_megatron.testing.trainer import quiet_trainer
from tests.tiny import tiny_llama

Ranks = Callable[..., list[Any]]
ROWS = [{"tokens": torch.arange(9), "labels": torch.arange(1, 10)}] * 4


class Fails:
    """Calls a function, and raises instead at one of its calls."""

    def __init__(self, function: Callable[..., Any], at: int, error: Exception) -> None:
        self.function, self.left, self.error = function, at, error

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.function(*args)


def cannot_be_read(patch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 1:
        patch.setattr(saving_file, "as_bytes", Fails(saving_file.as_bytes, 3, RuntimeError("the device is lost")))


def disk_is_full(patch: pytest.MonkeyPatch) -> None:
    failing = Fails(TorchFile.add, 3, OSError(errno.ENOSPC, "No space left on device"))
    patch.setattr(TorchFile, "add", lambda *given: failing(*given))


def host_is_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(saving_file, "total_memory_bytes", lambda kind: 1000)


def disk_changes_a_bit(patch: pytest.MonkeyPatch) -> None:
    close = saving_file.sync_file

    def changed(path: Path) -> None:
        close(path)
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 1
        path.write_bytes(whole)

    patch.setattr(saving_file, "sync_file", changed)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "read": (cannot_be_read, "the device is lost"),
    "full": (disk_is_full, "No space left on device"),
    "small": (host_is_small, "is whole on rank 0 while it is written to one file: that takes"),
    "bit": (disk_changes_a_bit, "what was written is damaged"),
}


class SavesAroundAFault(Callback):
    """Saves, saves with a fault, and once more: the error, and if the first file stays and the last is a new one."""

    def __init__(self, fault: str, path: str) -> None:
        self.breaks_it, self.path = FAULTS[fault][0], path
        self.told, self.stays, self.is_new = "", False, False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first = self.save(trainer)
        with pytest.MonkeyPatch.context() as patch:
            self.breaks_it(patch)
            with pytest.raises(CheckpointError) as error:
                self.save(trainer)
        self.told, self.stays = str(error.value), Path(self.path).stat().st_ino == first and not verify(self.path)
        trainer.strategy.barrier()
        self.is_new = self.save(trainer) != first and not verify(self.path)

    def save(self, trainer: Trainer) -> int:
        """Save on all ranks, and return what tells the file from another one of its name."""
        trainer.save_checkpoint(self.path)
        trainer.strategy.barrier()
        return Path(self.path).stat().st_ino


def train(fault: str, path: str) -> tuple[str, bool, bool]:
    strategy = MegatronStrategy(tp=dist.get_world_size(), save_distributed_checkpoint=False)
    saves = SavesAroundAFault(fault, path)
    trainer = quiet_trainer(strategy, max_steps=1, callbacks=[VerifyCheckpoint(), saves])
    trainer.fit(LlamaModule(tiny_llama(), lr=0.01), DataLoader(ROWS, batch_size=2))  # type: ignore[arg-type]
    return saves.told, saves.stays, saves.is_new


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_fails_anywhere_fails_everywhere_and_the_file_before_stays(
    ranks: Ranks, tmp_path: Path, fault: str
) -> None:
    path = tmp_path / "a.ckpt"
    for told, stays, is_new in ranks(2, train, fault, str(path)):
        assert FAULTS[fault][1] in told
        assert str(path) in told
        assert stays
        assert is_new
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
