"""Loaders of litdata and mosaicml-streaming, as ``examples/streaming`` uses them: who reads what, and from where on."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

Ranks = Callable[..., list[Any]]

TINY: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2}
TINY |= {"num_query_groups": 2, "vocab_size": 512, "max_position_embeddings": 16, "vocab_multiple": 4}
LENGTH, SAMPLES, GLOBAL_BATCH = 8, 48, 4
EPOCH = SAMPLES // GLOBAL_BATCH
STEPS = EPOCH * 2 + 2
MODULES = {"litdata": "LitDataTokens", "mosaic": "MosaicTokens"}


def library(name: str) -> Any:
    return importlib.import_module(f"examples.streaming.{name}_tokens")


@pytest.fixture(scope="module", params=["litdata", "mosaic"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A library, and a folder of it with samples of which no two begin with the same token."""
    pytest.importorskip({"litdata": "litdata", "mosaic": "streaming"}[request.param])
    folder = tmp_path_factory.mktemp("streaming")
    with IndexedDatasetWriter(folder / "corpus", np.dtype(np.uint16)) as writer:
        writer.add_document(np.arange(SAMPLES * LENGTH + 1, dtype=np.uint16), [SAMPLES * LENGTH + 1])
    library(request.param).write(str(folder / "corpus"), str(folder / "data"), LENGTH, SAMPLES)
    return request.param, str(folder / "data")


class Seen(Callback):
    """First tokens of the samples of each step, as numbers of samples."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append([int(row[0]) // LENGTH for row in batch["tokens"]])


class Asks(LlamaModule):
    """A module with which the loader is made before the checkpoint is read."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == STEPS
        return super().configure_optimizers()


Run = tuple[int, list[list[int]], list[float]]


def train(data: tuple[str, str], folder: str, layout: dict[str, Any], **options: Any) -> Run:
    """Number of the replica, samples and losses of each step; each step is saved, unless it was resumed."""
    name, path = data
    dp = options.get("dp", 1)
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}  # torchrun's
    seed_everything(7, verbose=False)
    resumed = options.get("step")
    seen, log = Seen(), Recorder()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(
        MegatronStrategy(**layout),
        max_steps=STEPS,
        callbacks=[seen] if resumed else [seen, saver],
        enable_checkpointing=not resumed,
        logger=log,
    )
    module = getattr(library(name), MODULES[name])(
        path,
        batch_size=options.get("batch_size", GLOBAL_BATCH // dp),
        seed=options.get("seed", 42),
        num_workers=options.get("workers", 0),
    )
    model = (Asks if options.get("asks") else LlamaModule)("llama-tiny", **TINY)
    # mosaicml-streaming leaves its locks in the folder for temporary files.
    with patch.dict(os.environ, variables), patch.object(tempfile, "tempdir", folder):
        trainer.fit(model, module, ckpt_path=f"{folder}/step={resumed}.ckpt" if resumed else None)
    return trainer.strategy.data_parallel_rank, seen.steps, log.series("train_loss")


def check_epochs(replicas: list[list[list[int]]]) -> None:
    """Each epoch has all samples once, shared by the replicas, in an order of its own."""
    steps = [[*chain(*parts)] for parts in zip(*replicas, strict=True)]
    assert len(steps) == STEPS
    assert all(len(step) == GLOBAL_BATCH for step in steps)
    first, second = ([*chain(*steps[start : start + EPOCH])] for start in (0, EPOCH))
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second != sorted(second)


LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "dp 2": (2, {}, 2),
    "tp 2": (2, {"tp": 2}, 1),
    "cp 2": (2, {"cp": 2}, 1),
    "pp 2": (2, {"pp": 2, "micro_batch_size": 2}, 1),
    "dp 2, tp 2": (4, {"tp": 2}, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_share_the_samples_and_a_resumed_run_has_equal_losses(
    data: tuple[str, str], layout: str, ranks: Ranks, tmp_path: Path
) -> None:
    size, arguments, dp = LAYOUTS[layout]
    whole = ranks(size, train, data, str(tmp_path), arguments, dp=dp)
    by_replica = {replica: steps for replica, steps, _ in whole}
    assert len(by_replica) == dp
    assert all(steps == by_replica[replica] for replica, steps, _ in whole), "ranks of a replica read the same samples"
    check_epochs(list(by_replica.values()))
    for step in (3, EPOCH, EPOCH + 1):
        rest = ranks(size, train, data, str(tmp_path), arguments, dp=dp, step=step)
        assert [run[0] for run in rest] == [run[0] for run in whole]
        assert [run[1] for run in rest] == [run[1][step:] for run in whole]
        assert [run[2] for run in rest] == [run[2][step:] for run in whole]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_one_process_resumes_with_equal_losses(data: tuple[str, str], workers: int, tmp_path: Path) -> None:
    # A process of its own: threads of mosaicml-streaming end with it, and unlike those of the pool it may have workers.
    with ProcessPoolExecutor(1, get_context("spawn")) as process:

        def fit(**options: Any) -> Run:
            return process.submit(train, data, str(tmp_path), {}, workers=workers, **options).result()

        _, steps, losses = fit()
        check_epochs([steps])
        places = ((3, True), (EPOCH, False), (EPOCH + 1, False))
        for step, asks in places if not workers else places[:1]:
            assert fit(step=step, asks=asks)[1:] == (steps[step:], losses[step:]), step


def refused(data: tuple[str, str], folder: str, layout: dict[str, Any], **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        train(data, folder, layout, **options)
    return str(error.value)


@pytest.mark.slow
def test_other_batches_and_layouts_are_refused(data: tuple[str, str], tmp_path: Path, ranks: Ranks) -> None:
    ranks(2, train, data, str(tmp_path), {}, dp=2)
    (found,) = ranks(1, refused, data, str(tmp_path), {}, step=3)
    assert "dp=1" in found
    assert "batch_size=4" in found
    assert "the checkpoint was saved with 2" in found
    found = ranks(2, refused, data, str(tmp_path), {}, dp=2, batch_size=1, step=3)[0]
    assert "dp=" not in found
    assert "batch_size=1" in found
    if data[0] == "mosaic":  # litdata refuses by itself
        assert "seed=43" in ranks(2, refused, data, str(tmp_path), {}, dp=2, seed=43, step=3)[0]
        found = ranks(4, refused, data, str(tmp_path), {"pp": 2, "micro_batch_size": 1}, dp=2)[0]
        assert "pp=2: with dp 2: mosaicml-streaming gives equal samples to neighbouring ranks alone" in found
