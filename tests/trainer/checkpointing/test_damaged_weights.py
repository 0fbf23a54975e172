"""A bit that has flipped in a tensor: refused by default on every way into a model, or passed over by "last"."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.integrity.metadata import items_of
from lightning_megatron.checkpoint.integrity.metadata_file import read_metadata
from lightning_megatron.lightning.modules.load_module import load_module, read_checkpoint
from lightning_megatron.lightning.pretrained.convert import checkpoint_to_hf
from lightning_megatron.testing.trainer import quiet_trainer
from tests.tiny import tiny_llama

KEY = "model.model.layers.0.mlp.fc1.weight"


def rows() -> Any:
    tokens = torch.randint(40, (8, 9), generator=torch.Generator().manual_seed(3))
    return DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in tokens], batch_size=4)  # type: ignore[arg-type]


def module() -> LlamaModule:
    return LlamaModule(tiny_llama(), lr=1e-2)


def trainer(**options: Any) -> Any:
    strategy = MegatronStrategy(verify_on_load=options.pop("verify_on_load", True))
    return quiet_trainer(strategy, **{"max_steps": 2, **options})


def flip(path: Path) -> None:
    """One bit of one element of a matrix."""
    (item,) = (found for found in items_of(read_metadata(path)) if found.key == KEY)
    content = bytearray((path / item.file).read_bytes())
    content[(item.start + item.end) // 2] ^= 1
    (path / item.file).write_bytes(content)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the steps 1 and 2, and ``last.ckpt``."""
    folder = tmp_path_factory.mktemp("saved")
    seed_everything(3, verbose=False)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
    run = trainer(enable_checkpointing=True, callbacks=[saver])
    run.fit(module(), rows())
    return folder


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(saved, tmp_path / "damaged", symlinks=True)
    flip(folder / "last.ckpt")
    return folder / "last.ckpt"


def fits(path: Path, **options: Any) -> None:
    trainer(max_steps=3, **options).fit(module(), rows(), ckpt_path=path)


def begins_with(path: Path) -> None:
    trainer().fit(LlamaModule.load_from_checkpoint(path), rows())


WAYS: dict[str, Callable[[Path], Any]] = {
    "fit": fits,
    "validate": lambda path: trainer().validate(module(), rows(), ckpt_path=path),
    "test": lambda path: trainer().test(module(), rows(), ckpt_path=path),
    "predict": lambda path: trainer().predict(module(), rows(), ckpt_path=path),
    "load_from_checkpoint": begins_with,
    "load_module": load_module,
    "read_checkpoint": read_checkpoint,
    "convert ckpt-to-hf": lambda path: checkpoint_to_hf(path, path.parent / "hf"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_bit_is_refused(damaged: Path, way: str) -> None:
    path = damaged.rename(damaged.parent / "some.ckpt")  # what is not called last is not passed over
    with pytest.raises(CheckpointError, match=r"some\.ckpt: the checkpoint is damaged:\n  - __0_0\.distcp: altered"):
        WAYS[way](path)


def test_last_goes_on_from_the_newest_one_whose_content_is_right(damaged: Path) -> None:
    flip(damaged.parent / "step=2.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saver = ModelCheckpoint(damaged.parent, save_last=True)
        run = trainer(max_steps=3, enable_checkpointing=True, callbacks=[saver])
        run.fit(module(), rows(), ckpt_path="last")
    (told,) = (str(w.message) for w in caught if "newest good checkpoint" in str(w.message))
    assert str(damaged.parent / "step=1.ckpt") in told
    for name in ("last", "step=2"):
        assert f"{name}.ckpt: __0_0.distcp: altered" in told


def test_the_way_out_loads_it_as_it_is(saved: Path, damaged: Path) -> None:
    def weight(path: Path, **options: Any) -> torch.Tensor:
        own = module()
        trainer(**options).validate(own, rows(), ckpt_path=path, verbose=False)
        found: torch.Tensor = own.get_parameter(KEY.removeprefix("model.")).detach().cpu()
        return found

    other = weight(damaged, verify_on_load=False)
    assert (other != weight(saved / "last.ckpt")).sum() == 1
