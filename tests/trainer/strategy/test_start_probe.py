"""Folders that ranks do not share are found before the model is built. Kinds of faults: tests/unit/lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing.trainer import quiet_trainer


class Built(BoringModel):
    is_built = False

    def configure_model(self) -> None:
        self.is_built = True


def start(root: Path, saved: Path, **options: Any) -> tuple[str, bool, float]:
    """Error of a fit, True if the model was built, and the seconds until then."""
    rank, module = dist.get_rank(), Built()
    folders = [Path(str(folder).format(rank=rank)) for folder in (root, saved)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    trainer = quiet_trainer(
        MegatronStrategy(**options),
        max_steps=1,
        default_root_dir=folders[0],
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folders[1])],
    )
    try:
        trainer.fit(module)
    except ConfigError as error:
        return str(error), module.is_built
    return "", module.is_built


def test_a_rank_with_another_folder_is_an_error_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    apart = tmp_path / "rank {rank}"
    for root, saved, name in (
        (apart, tmp_path, "trainer.default_root_dir"),
        (tmp_path, apart, "ModelCheckpoint.dirpath"),
    ):
        said = ranks(2, start, root, saved)
        assert said[0][0] == said[1][0]
        for text, is_built in said:
            assert f"{name}='{tmp_path}/rank 1'" in text
            assert "rank 1 on " in text
            assert not is_built


def test_a_folder_that_may_differ_and_one_under_two_names(ranks: Any, tmp_path: Path) -> None:
    apart = tmp_path / "rank {rank}"
    assert [text for text, *_ in ranks(2, start, apart, tmp_path, may_differ=["trainer.default_root_dir"])] == ["", ""]
    (tmp_path / "same").mkdir()
    for rank in range(2):
        (tmp_path / f"name {rank}").symlink_to("same")
    named = tmp_path / "name {rank}"
    assert [text for text, *_ in ranks(2, start, named, named)] == ["", ""]
    assert not list((tmp_path / "same").glob(".lightning-megatron-probe*"))
