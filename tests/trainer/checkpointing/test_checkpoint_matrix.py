"""Every layout saves, every other one loads: the same bits, and the losses of the run that was not interrupted."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import MegatronDataModule, MegatronStrategy, MixtralModule
from lightning_megatron.checkpoint import local_tensors, model_state
from lightning_megatron.checkpoint.optimizer_export.export import Collectors, export_state
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.params import spec_registry
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

BATCH, LENGTH, VOCABULARY, SEED = 4, 8, 61, 7
BEFORE, AFTER = 3, 5
ROUNDING = 1e-6

Sizes = dict[str, Any]
LAYOUTS: dict[str, Sizes] = {
    "one": {},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "dp2 unsharded": {"dp": 2, "distributed_optimizer": False},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "dp2 ep2": {"dp": 2, "ep": 2},
    "tp2 ep2 etp1": {"tp": 2, "ep": 2, "etp": 1},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 dp2 ep2 etp2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    "cp2 dp2 ep4 unsharded": {"cp": 2, "dp": 2, "ep": 4, "distributed_optimizer": False},
}


def world_size(name: str) -> int:
    return int(torch.Size([LAYOUTS[name].get(axis, 1) for axis in ("tp", "pp", "dp", "cp")]).numel())


def module() -> MixtralModule:
    seed_everything(SEED, verbose=False)
    sizes: Sizes = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2}
    sizes |= {"ffn_hidden_size": 16, "vocab_size": VOCABULARY, "vocab_multiple": 4, "num_experts": 4, "init_std": 0.1}
    return MixtralModule("mixtral-tiny", lr=1e-3, moe_aux_loss_coeff=0.01, lr_schedule="cosine", **sizes)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("data") / "tokens")
    random = np.random.default_rng(1)
    with IndexedDatasetWriter(path, np.dtype(np.uint16)) as writer:
        writer.add_item(random.integers(0, VOCABULARY, 400).astype(np.uint16))
        writer.end_document()
    return path


class Digests(Callback):
    """Hashes of the whole model and of all optimizer state, which no layout changes: at a step, and where it begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.at: dict[int, list[str]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.take(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == BEFORE:
            self.take(trainer)

    def take(self, trainer: Trainer) -> None:
        strategy: Any = trainer.strategy
        pl_module, mesh = trainer.lightning_module, strategy.mesh
        strategy.finish_param_gather()
        specs = spec_registry(pl_module)
        state = model_state(local_tensors(pl_module), specs, mesh)
        experts = {f"model.{name}" for name, spec in specs.items() if spec.is_expert}
        through = Collectors(mesh, "parallel_node_0", mesh.world.size)
        export_state(self.folder / "model", state, experts, through)
        strategy.export_optimizer_state(self.folder / "optimizer", "parallel_node_0")
        found = [hashlib.sha256((self.folder / name).read_bytes()).hexdigest() for name in ("model", "optimizer")]
        strategy.barrier()
        self.at[trainer.global_step] = found


def run(name: str, prefix: str, folder: str, source: str | None) -> tuple[list[str], list[float]]:
    """Train all steps and save on the way, or go on from what a layout has saved; digests there, losses after it."""
    sizes = dict(LAYOUTS[name])
    dp = sizes.pop("dp", 1)
    digests, recorder = Digests(Path(folder)), Recorder()
    kept = 0 if source else -1
    saver = ModelCheckpoint(folder, filename=f"{name}-{{step}}", every_n_train_steps=BEFORE, save_top_k=kept)
    trainer = quiet_trainer(
        MegatronStrategy(micro_batch_size=1, bucket_size=3000, **sizes),
        max_steps=BEFORE + AFTER,
        callbacks=[digests, saver],
        logger=recorder,
        enable_checkpointing=True,
        gradient_clip_val=1.0,
    )
    data = MegatronDataModule(prefix, LENGTH, BATCH // dp, split="1", train_samples=40)
    trainer.fit(module(), data, ckpt_path=None if source is None else f"{folder}/{source}-step={BEFORE}.ckpt")
    return digests.at[BEFORE], recorder.series("train_loss")[-AFTER:]


@pytest.mark.exhaustive
def test_any_layout_goes_on_with_what_any_other_saved(
    ranks: Any, prefix: str, tmp_path: Path, record_property: Any
) -> None:
    begun, folder = time.monotonic(), str(tmp_path)
    saved = {name: ranks(world_size(name), run, name, prefix, folder, None)[0] for name in LAYOUTS}
    wrong, worst = [], 0.0
    for after in LAYOUTS:
        for before, (bits, losses) in saved.items():
            if before == after:
                continue
            for found, ours in ranks(world_size(after), run, after, prefix, folder, before):
                deviation = max(abs(a - b) / abs(b) for a, b in zip(ours, losses, strict=True))
                worst = max(worst, deviation)
                if found != bits or not deviation <= ROUNDING or len(ours) != AFTER:
                    wrong.append(f"{before} -> {after}: bits {found == bits}, losses differ by {deviation:.1e}")
        print(
            f"into {after} after {(time.monotonic() - begun) / 60:.1f} minutes: worst {worst:.1e}, {len(wrong)} wrong"
        )
    minutes = (time.monotonic() - begun) / 60
    record_property("worst_relative_deviation", worst)
    print(f"{len(LAYOUTS) * (len(LAYOUTS) - 1)} pairs in {minutes:.1f} minutes, worst deviation of a loss {worst:.1e}")
    assert not wrong, "\n".join(dict.fromkeys(wrong))
