"""Epochs of ``max_epochs`` are Megatron's: one shuffled index over all of them, read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron import MegatronDataModule, MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter, build_gpt_datasets
from lightning_megatron.testing.trainer import quiet_trainer

LENGTH, SAMPLES, EPOCHS = 8, 12, 3


class Seen(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, list[list[int]]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows.setdefault(self.current_epoch, []).extend(batch["tokens"].tolist())
        return self.layer.weight.sum()


def write(path: Path, seed: int = 0) -> str:
    with IndexedDatasetWriter(str(path), np.dtype(np.uint16)) as writer:
        for tokens in np.random.RandomState(seed).randint(0, 9999, (4, SAMPLES * LENGTH // 4 + 1)):
            writer.add_document(tokens, [len(tokens)])
    return str(path)


def rows_of(
    data: MegatronDataModule, path: Path | None = None, ckpt_path: Path | None = None, **options: Any
) -> dict[int, list[list[int]]]:
    module = Seen()
    trainer = quiet_trainer(MegatronStrategy(), limit_val_batches=0, **{"max_epochs": EPOCHS, **options})
    trainer.fit(module, data, ckpt_path=ckpt_path)
    if path is not None:
        trainer.save_checkpoint(path)
    return module.rows


@pytest.mark.parametrize("reload", [0, 1])
def test_epochs_are_parts_of_one_shuffled_index(tmp_path: Path, reload: int) -> None:
    path = write(tmp_path / "a")
    seen = rows_of(MegatronDataModule(path, LENGTH, 2, "1,0,0"), reload_dataloaders_every_n_epochs=reload)
    index, *_ = build_gpt_datasets(path, seq_length=LENGTH, split="1,0,0", num_samples=(EPOCHS * SAMPLES, 0, 0))
    assert index is not None
    expected = [index[item]["tokens"].tolist() for item in range(EPOCHS * SAMPLES)]
    assert [row for epoch in seen.values() for row in epoch] == expected
    assert [len(rows) for rows in seen.values()] == [SAMPLES] * EPOCHS
    assert seen[0] != seen[1] != seen[2]


def test_a_weighted_blend_and_an_overfit_one(tmp_path: Path) -> None:
    blend = [0.7, write(tmp_path / "a"), 0.3, write(tmp_path / "b", 1)]
    seen = rows_of(MegatronDataModule(blend, LENGTH, 2, "1,0,0"))
    assert len({len(rows) for rows in seen.values()}) == 1
    assert seen[0] != seen[1] != seen[2]
    same = rows_of(MegatronDataModule(blend, LENGTH, 2, "1,0,0"), overfit_batches=2)
    assert same[0] == same[1] == same[2], "the same batches again, as Lightning wants them"


def test_epochs_end_a_run_also_where_max_steps_may_end_it_earlier(tmp_path: Path) -> None:
    """``max_epochs`` draws the order; ``max_steps`` cuts it, and a run without them goes on in it."""
    path = write(tmp_path / "a")
    whole = [row for epoch in rows_of(MegatronDataModule(path, LENGTH, 2, "1,0,0")).values() for row in epoch]
    for steps in (100, 8):
        rows = rows_of(MegatronDataModule(path, LENGTH, 2, "1,0,0"), tmp_path / "cut", max_steps=steps)
        assert [row for epoch in rows.values() for row in epoch] == whole[: 2 * steps]
    rest = rows_of(MegatronDataModule(path, LENGTH, 2, "1,0,0"), ckpt_path=tmp_path / "cut")
    assert [row for epoch in rest.values() for row in epoch] == whole[16:24], "Lightning counts the cut epoch as done"


def test_an_epoch_that_is_read_again_has_another_order(tmp_path: Path) -> None:
    data = MegatronDataModule(write(tmp_path / "a"), LENGTH, 2, "1,0,0", train_samples=SAMPLES)
    first, second, third = rows_of(data).values()
    assert sorted(first) == sorted(second) == sorted(third)
    assert first != second != third != first
