"""Check 32: a job that dies during a save in the background leaves a checkpoint to go on from.

That the files are those of a save at once is shown in ``tests/trainer/checkpointing/test_async_save.py``; random
moments in ``tests/crash``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from layouts import DP2, PP2, TP2, Layout, Ranks, language_model, on_all, shard, texts, trainer_for
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron.checkpoint import saving, verify
from lightning_megatron.checkpoint.background import writer as background
from lightning_megatron.checkpoint.dcp import fragments as transfer
from lightning_megatron.checkpoint.dcp.box_writer import BoxWriter
from lightning_megatron.checkpoint.directory import atomic_dir as publish
from lightning_megatron.data import MegatronSampler, ResumableDataLoader
from lightning_megatron.testing.trainer import Recorder
from lightning_megatron.testing.workers import WorkerError


class DiesWriting(BoxWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        file = Path(self.path) / "__1_0.distcp"
        if file.parent.name.startswith("step=4.ckpt.") and dist.get_rank() == 1:
            file.write_bytes(b"half")
            os._exit(9)
        return super().write_data(plan, planner)


def dies(path: Path) -> None:
    os._exit(9)


def publishes_once(temporary: Path, path: Path) -> None:
    if path.name == "step=4.ckpt":
        os._exit(9)
    publish.publish(temporary, path)


DEATHS: dict[str, tuple[Any, str, Any]] = {
    "while it is written": (transfer, "BoxWriter", DiesWriting),
    "before it has its name": (saving, "publish", publishes_once),
    "before the older one goes": (background, "remove", dies),
}


def killed(layout: Layout, folder: str, death: str | None, ckpt_path: str | None = None) -> list[float]:
    """Six steps, a checkpoint after every second; with ``death`` the second one is the last thing that happens."""
    saver = ModelCheckpoint(Path(folder), filename="{step}", every_n_train_steps=2, save_top_k=1, save_last="link")
    recorder = Recorder()
    options: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True, "logger": recorder}
    trainer = trainer_for(layout, {"async_save": True}, **options)
    module = language_model(lr=1e-2, hidden_dropout=0.1, attention_dropout=0.1)
    with pytest.MonkeyPatch.context() as patch:
        if death is not None:
            patch.setattr(*DEATHS[death])
        rows = shard(layout, texts(48))
        batches = MegatronSampler(len(rows), batch_size=layout.batch_size)
        trainer.fit(module, ResumableDataLoader(rows, batch_sampler=batches), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    return recorder.series("train_loss")


@pytest.mark.slow
@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("layout", [TP2, PP2, DP2], ids=str)
def test_32_a_crash_during_an_async_save_leaves_a_checkpoint(
    ranks: Ranks, tmp_path: Path, layout: Layout, death: str
) -> None:
    whole = on_all(ranks, layout, killed, str(tmp_path / "whole"), None)
    folder = tmp_path / "killed"
    with pytest.raises(WorkerError):
        ranks(2, killed, layout, str(folder), death)
    names = {path.name for path in folder.glob("*.ckpt")}
    newest = "step=4.ckpt" if death == "before the older one goes" else "step=2.ckpt"
    assert names == {"last.ckpt", "step=2.ckpt", newest}
    assert os.readlink(folder / "last.ckpt") == newest
    assert all(verify(folder / name) == [] for name in names)
    resumed = on_all(ranks, layout, killed, str(folder), None, "last")
    assert resumed == whole[int(newest[5]) :]
