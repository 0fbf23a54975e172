"""A run that was interrupted goes on as if it had not been: stock ModelCheckpoint, mid-epoch, dropout on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import LlamaModule, MegatronDataModule, MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

TINY = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 131,
    "max_position_embeddings": 16,
    "vocab_multiple": 4,
}
STEPS = 6


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("data") / "tokens")
    random = np.random.default_rng(1)
    with IndexedDatasetWriter(path, np.dtype(np.uint16)) as writer:
        for _ in range(40):
            writer.add_item(random.integers(0, 131, 50).astype(np.uint16))
            writer.end_document()
    return path


def train(
    prefix: str, directory: str, strategy: dict[str, Any], dropout: float, ckpt_path: str | None, fields: dict[str, Any]
) -> dict[str, list[float]]:
    """Loss, gradient norm and learning rate of each step that this call runs."""
    torch.use_deterministic_algorithms(False)
    seed_everything(7, verbose=False)
    dp = strategy.pop("dp", 1)
    module = LlamaModule(
        "llama-tiny", lr=1e-2, lr_schedule="cosine", hidden_dropout=dropout, attention_dropout=dropout, **TINY | fields
    )
    data = MegatronDataModule(prefix, 16, batch_size=4 // dp, train_samples=4 * STEPS + 8, cache_dir=directory)
    recorder = Recorder()
    saver = ModelCheckpoint(Path(directory), filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = quiet_trainer(
        MegatronStrategy(**strategy),
        max_steps=STEPS,
        logger=recorder,
        enable_checkpointing=True,
        callbacks=[saver],
        gradient_clip_val=1.0,
        limit_val_batches=0,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return {name: recorder.series(name) for name in ("train_loss", "grad_norm", "lr")}


def interrupted(
    prefix: str,
    directory: str,
    strategy: dict[str, Any],
    other: dict[str, Any] | None,
    dropout: float,
    fields: dict[str, Any] | None = None,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The last steps of a whole run, and those of one resumed from its middle, perhaps under another layout."""
    whole = train(prefix, directory, dict(strategy), dropout, None, fields or {})
    again, path = dict(strategy if other is None else other), f"{directory}/step=3.ckpt"
    resumed = train(prefix, directory, again, dropout, path, fields or {})
    return {name: values[3:] for name, values in whole.items()}, resumed


LAYOUTS = {
    "one": (1, {}),
    "one, micro-batches": (1, {"micro_batch_size": 2}),
    "tp2": (2, {"tp": 2}),
    "dp2": (2, {"dp": 2}),
    "pp2": (2, {"pp": 2, "micro_batch_size": 1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_layout_resumes_bit_for_bit_with_dropout(ranks, prefix, tmp_path, layout):
    size, strategy = LAYOUTS[layout]
    for whole, resumed in ranks(size, interrupted, prefix, str(tmp_path), strategy, None, 0.1):
        assert len(resumed["train_loss"]) == STEPS - 3
        assert resumed == whole


@pytest.mark.parametrize(
    ("size", "first", "second"),
    [
        (2, {"tp": 2}, {"pp": 2, "micro_batch_size": 1}),
        (2, {"pp": 2, "micro_batch_size": 2}, {"dp": 2, "distributed_optimizer": False}),
        (2, {"dp": 2}, {"tp": 2, "sequence_parallel": False}),
    ],
)
def test_another_layout_goes_on_with_the_same_numbers(ranks, prefix, tmp_path, size, first, second):
    for whole, resumed in ranks(size, interrupted, prefix, str(tmp_path), first, second, 0.0):
        for name, values in whole.items():
            assert resumed[name] == pytest.approx(values, rel=1e-5), name


# What routers remember is part of a checkpoint: a bias that follows the load, and bins that are cut anew by their use.
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_router_score": "sigmoid", "moe_expert_bias_update_rate": 0.01}
EXPERTS |= {"moe_aux_loss_coeff": 0.1, "moe_capacity_bins": 3, "moe_capacity_bins_alignment": 1}
EXPERTS |= {"moe_capacity_bins_interval": 2}
EP2, TP2EP2 = {"dp": 2, "ep": 2, "micro_batch_size": 1}, {"tp": 2, "ep": 2, "etp": 1, "micro_batch_size": 1}


def test_experts_resume_bit_for_bit_with_dropout(ranks, prefix, tmp_path):
    for whole, resumed in ranks(2, interrupted, prefix, str(tmp_path), EP2, None, 0.1, EXPERTS):
        assert resumed == whole


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param(EP2, TP2EP2, marks=pytest.mark.gate), (TP2EP2, {"pp": 2, "micro_batch_size": 1})],
)
def test_experts_go_on_under_another_layout_with_the_same_numbers(ranks, prefix, tmp_path, first, second):
    for whole, resumed in ranks(2, interrupted, prefix, str(tmp_path), first, second, 0.0, EXPERTS):
        for name, values in whole.items():
            assert resumed[name] == pytest.approx(values, rel=1e-5), name
