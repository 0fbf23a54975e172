"""Checks 27-35, without 32: stock checkpointing callbacks, and resuming, on every layout."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import (
    DP2,
    LAYOUTS,
    ONE,
    PP2,
    STOCK,
    TP2,
    TP2PP2,
    Layout,
    Ranks,
    assert_close,
    fit,
    language_model,
    loader,
    on_all,
    since_2_6,
    trained,
    trainer_for,
)
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint

from lightning_megatron import MegatronDataModule
from lightning_megatron.checkpoint import verify
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.testing.trainer import Recorder

# 27


SAVERS: dict[str, dict[str, Any]] = {
    "top 2 of a metric": {"monitor": "val_loss", "save_top_k": 2},
    "every 2 steps": {"every_n_train_steps": 2, "save_top_k": -1},
    "by time": {"train_time_interval": timedelta(0), "save_top_k": -1},
    "last": {"save_last": True},
    "last as a link": {"save_last": "link"},
    "weights only": {"save_weights_only": True},
    "on exception": {"save_on_exception": True, "every_n_epochs": 99},
}


class Fails(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("on purpose")


def saves(layout: Layout, folder: str, wish: str, strategy: dict[str, Any] | None = None) -> Any:
    """Best and last checkpoint of the callback, and the best score."""
    here = Path(folder) / wish
    saver = ModelCheckpoint(here, filename="{epoch}-{step}", **SAVERS[wish])
    if wish == "on exception":
        with pytest.raises(RuntimeError, match="on purpose"):
            trained(layout, Fails(), saver, strategy=strategy)
    else:
        trained(layout, saver, strategy=strategy, max_epochs=3)
    names = [Path(name).name for name in (saver.best_model_path, saver.last_model_path, *saver.best_k_models)]
    return names, None if saver.best_model_score is None else float(saver.best_model_score)


def contents(folder: Path) -> dict[str, str | None]:
    """Names, and where links lead. Not for a rank to ask: rank 0 removes, and the others do not wait."""
    return {path.name: os.readlink(path) if path.is_symlink() else None for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("wish", SAVERS)
def test_27_model_checkpoint_saves_what_it_does_in_stock(ranks: Ranks, tmp_path: Path, wish: str) -> None:
    names, score = on_all(ranks, STOCK, saves, str(tmp_path / "stock"), wish)
    there = contents(tmp_path / "stock" / wish)
    assert there
    for layout, in_background in ((TP2PP2, False), (DP2, False), (DP2, True)):
        folder = tmp_path / f"{layout} {in_background}"
        our_names, our_score = on_all(ranks, layout, saves, str(folder), wish, {"async_save": in_background})
        assert our_names == names
        assert contents(folder / wish) == there
        if score is not None:
            assert_close(our_score, score)
        for path in (folder / wish).iterdir():
            assert verify(path) == []


# 28, 29


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("data") / "tokens")
    random = np.random.default_rng(1)
    with IndexedDatasetWriter(path, np.dtype(np.uint16)) as writer:
        for _ in range(40):
            writer.add_item(random.integers(0, 32, 50).astype(np.uint16))
            writer.end_document()
    return path


def scheduled(layout: Layout, prefix: str, folder: str, workers: int, ckpt_path: str | None) -> dict[str, list[float]]:
    recorder = Recorder()
    saver = ModelCheckpoint(Path(folder), filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = trainer_for(
        layout, logger=recorder, max_steps=6, callbacks=[saver], enable_checkpointing=True, limit_val_batches=0
    )
    module = language_model(lr=1e-2, lr_schedule="cosine", hidden_dropout=0.1, attention_dropout=0.1)
    data = MegatronDataModule(prefix, 12, layout.batch_size, train_samples=60, num_workers=workers, cache_dir=folder)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return {name: recorder.series(name) for name in ("train_loss", "lr")}


def interrupted(
    layout: Layout, prefix: str, folder: str, workers: int = 0
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    whole = scheduled(layout, prefix, folder, workers, None)
    return whole, scheduled(layout, prefix, folder, workers, f"{folder}/step=3.ckpt")


@pytest.mark.parametrize("layout", [ONE, TP2, PP2, DP2], ids=str)
def test_28_29_a_run_resumed_in_mid_epoch_has_the_losses_and_the_rate_of_the_whole_one(
    ranks: Ranks, prefix: str, tmp_path: Path, layout: Layout
) -> None:
    whole, resumed = on_all(ranks, layout, interrupted, prefix, str(tmp_path))
    assert len(set(whole["lr"])) == 6
    assert resumed == {name: values[3:] for name, values in whole.items()}


@pytest.mark.gate
@pytest.mark.slow
def test_28_with_workers_that_load_ahead(prefix: str, tmp_path: Path) -> None:
    # Not on the pool's ranks: a process of the pool may have no children.
    whole, resumed = interrupted(ONE, prefix, str(tmp_path), workers=2)
    assert resumed == {name: values[3:] for name, values in whole.items()}


# 30


LAYOUTS_OF_30: dict[str, tuple[Layout, dict[str, Any]]] = {str(layout): (layout, {}) for layout in LAYOUTS}
LAYOUTS_OF_30 |= {"pp2 vpp2": (PP2, {"vpp": 2}), "tp2 ep2 etp1": (Layout(tp=2, ep=2), {"etp": 1})}


def resumes(layout: Layout, strategy: dict[str, Any], folder: str, name: str, sources: list[str]) -> dict[str, Any]:
    """Save after the first of two epochs; or go on for the second one from each of the sources."""
    found = {}
    for source in sources or [None]:
        saver = ModelCheckpoint(Path(folder), filename=f"{name}-{{epoch}}", save_top_k=-1 if source is None else 0)
        recorder = Recorder()
        trainer = trainer_for(
            layout, strategy, logger=recorder, max_epochs=2, callbacks=[saver], enable_checkpointing=True
        )
        ckpt_path = None if source is None else f"{folder}/{source}-epoch=0.ckpt"
        trainer.fit(language_model(num_layers=4), loader(layout, 16), ckpt_path=ckpt_path)
        found[source] = recorder.series("train_loss"), recorder.series("grad_norm")
    return found


@pytest.mark.exhaustive
def test_30_any_layout_resumes_under_any_other(ranks: Ranks, tmp_path: Path) -> None:
    layouts = LAYOUTS_OF_30
    folder = str(tmp_path)
    expected = None
    for name, (layout, strategy) in layouts.items():
        whole = on_all(ranks, layout, resumes, strategy, folder, name, [])[None]
        expected = expected or whole
        assert_close(whole, expected)
    for _, (layout, strategy) in layouts.items():
        found = on_all(ranks, layout, resumes, strategy, folder, "again", list(layouts))
        for ours in found.values():
            assert_close(ours, tuple(values[2:] for values in expected))


# 31


def resolved(layout: Layout, folder: str) -> dict[str, Any]:
    """Metrics for each way of naming a checkpoint, or the step from which ``fit`` continues."""
    saver = ModelCheckpoint(Path(folder), filename="{epoch}", monitor="val_loss", save_last=True)
    validation = loader(layout, 16)
    trainer, _ = trained(layout, saver, max_epochs=2, default_root_dir=folder)
    trainer.save_checkpoint(f"{folder}/hpc_ckpt_1.ckpt")

    def evaluated(ckpt_path: str) -> float:
        return trainer.validate(language_model(), validation, ckpt_path=ckpt_path, verbose=False)[0]["val_loss"]

    found: dict[str, Any] = {name: evaluated(name) for name in ("best", "last", "hpc", saver.best_model_path)}
    found["path"] = found.pop(saver.best_model_path)
    for name in ("last", "hpc", f"{folder}/last.ckpt"):
        again, recorder = fit_on(layout, folder, name)
        found[f"fit {Path(name).name}"] = again.global_step, len(recorder.series("train_loss"))
    return found


def fit_on(layout: Layout, folder: str, ckpt_path: str) -> tuple[Any, Recorder]:
    saver = ModelCheckpoint(Path(folder), filename="{epoch}", save_top_k=0)
    recorder = Recorder()
    options: dict[str, Any] = {"logger": recorder, "default_root_dir": folder, "callbacks": [saver]}
    trainer = trainer_for(layout, max_epochs=3, enable_checkpointing=True, **options)
    trainer.fit(language_model(), loader(layout), ckpt_path=ckpt_path)
    return trainer, recorder


@pytest.mark.slow
def test_31_best_last_hpc_and_a_path_are_found(ranks: Ranks, tmp_path: Path) -> None:
    expected = on_all(ranks, STOCK, resolved, str(tmp_path / "stock"))
    assert expected["fit last"] == (12, 4)
    for layout in (TP2PP2, DP2):
        assert_close(on_all(ranks, layout, resolved, str(tmp_path / str(layout))), expected)


# 33


def averaged(layout: Layout, folder: str, ckpt_path: str | None = None) -> dict[str, Any]:
    """Two epochs with a checkpoint after the first, or the second one alone."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    recorder = Recorder()
    saver = ModelCheckpoint(Path(folder), filename="{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [callbacks.EMAWeightAveraging(decay=0.5), saver], "logger": recorder}
    trainer = trainer_for(layout, max_epochs=2, enable_checkpointing=True, **options)
    module = language_model(lr=1e-2)
    trainer.fit(module, loader(layout), loader(layout, 16), ckpt_path=ckpt_path)
    final = trainer.validate(module, loader(layout, 16), verbose=False)[0]["val_loss"]
    plain, fresh, stored_at = trainer_for(layout, logger=False), language_model(), f"{folder}/epoch=0.ckpt"
    stored = plain.validate(fresh, loader(layout, 16), ckpt_path=stored_at, verbose=False)[0]["val_loss"]
    return {"train": recorder.series("train_loss"), "val": recorder.series("val_loss"), "end": final, "saved": stored}


def averaged_and_resumed(layout: Layout, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    whole = averaged(layout, folder)
    return whole, averaged(layout, folder, f"{folder}/epoch=0.ckpt")


@since_2_6
@pytest.mark.slow
def test_33_averaged_weights_are_validated_saved_and_resumed(ranks: Ranks, tmp_path: Path) -> None:
    expected = on_all(ranks, STOCK, averaged, str(tmp_path / "stock"))
    assert expected["saved"] == expected["val"][0] != expected["val"][1]
    for layout in (TP2, PP2, DP2):
        whole, resumed = on_all(ranks, layout, averaged_and_resumed, str(tmp_path / str(layout)))
        assert_close(whole, expected)
        assert_close(resumed["train"], whole["train"][4:])
        assert_close(resumed["val"], whole["val"][1:])
        assert_close(resumed["end"], whole["end"])


# 34


def with_finder(layout: Layout, folder: str, finds: bool, in_background: bool) -> list[float]:
    finder = [LearningRateFinder(num_training_steps=4, update_attr=False)] if finds else []
    options: dict[str, Any] = {"default_root_dir": folder, "enable_checkpointing": True, "max_epochs": 2}
    _, recorder = fit(layout, callbacks=finder, strategy={"async_save": in_background}, **options)
    return recorder.series("train_loss")[-8:]


@pytest.mark.slow
def test_34_the_learning_rate_finder_leaves_training_as_it_is(ranks: Ranks, tmp_path: Path) -> None:
    for layout in (ONE, TP2, DP2):
        folder = tmp_path / str(layout)
        expected = on_all(ranks, layout, with_finder, str(folder), False, False)
        for in_background in (False, True):
            assert on_all(ranks, layout, with_finder, str(folder), True, in_background) == expected
        assert not list(folder.rglob(".lr_find*"))


# 35


def on_exception(layout: Layout, folder: str) -> list[str]:
    with pytest.raises(RuntimeError, match="on purpose"):
        trained(layout, Fails(), OnExceptionCheckpoint(folder))
    return sorted(path.name for path in Path(folder).iterdir())


def test_35_a_failure_of_all_ranks_leaves_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    for layout in (TP2PP2, DP2):
        folder = tmp_path / str(layout)
        assert on_all(ranks, layout, on_exception, str(folder)) == ["on_exception.ckpt"]
        assert verify(folder / "on_exception.ckpt") == []


ONE_RANK_FAILS = """
import sys
from datetime import timedelta
import lightning as L
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning_megatron import MegatronStrategy
sys.path.insert(0, {tests!r})
from layouts import TP2, language_model, loader

class FailsAlone(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2 and trainer.global_rank == 1:
            raise RuntimeError("on purpose")

trainer = L.Trainer(accelerator="cpu", devices=2, strategy=MegatronStrategy(tp=2, timeout=timedelta(seconds=30)),
                    max_epochs=1, logger=False, enable_progress_bar=False,
                    callbacks=[FailsAlone(), OnExceptionCheckpoint("saved")])
trainer.fit(language_model(), loader(TP2))
"""


@pytest.mark.slow
@pytest.mark.long
def test_35_a_failure_of_one_rank_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ONE_RANK_FAILS.format(tests=str(Path(__file__).parent)))
    begun = time.monotonic()
    command, env = [sys.executable, str(script)], own_environment()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "on purpose" in done.stderr
    assert time.monotonic() - begun < 240
    assert not list(tmp_path.glob("saved/*.ckpt")), "half of the ranks make no checkpoint"
