"""Resuming and the data: the order of samples whatever the number of ranks, and other data refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import LlamaModule, MegatronDataModule, MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing.trainer import quiet_trainer

TINY: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2}
TINY |= {"num_query_groups": 2, "vocab_size": 131, "max_position_embeddings": 16, "vocab_multiple": 4}
LENGTH, GLOBAL_BATCH, STEPS = 6, 8, 9
SAMPLES = GLOBAL_BATCH * STEPS
Leg = dict[str, Any]


def write(prefix: str, seed: int) -> str:
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for length in random.integers(3, 40, 40):
            writer.add_item(random.integers(0, 131, length).astype(np.uint16))
            writer.end_document()
    return prefix


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("data")
    return [0.7, write(str(folder / "a"), 1), 0.3, write(str(folder / "b"), 2)]


Steps = dict[int, list[list[bytes]]]
"""The samples of each optimizer step, batch by batch."""


class Seen(Callback):
    """Samples that this rank was given, identified by their content."""

    def __init__(self) -> None:
        self.steps: Steps = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        found = [sample.cpu().numpy().tobytes() for sample in batch["tokens"]]
        self.steps.setdefault(trainer.global_step, []).append(found)


def data_module(data_path: Any, folder: str, **options: Any) -> MegatronDataModule:
    """One epoch of blended, shuffled samples that each stand in it once or more often."""
    given: dict[str, Any] = {"seq_length": LENGTH, "train_samples": SAMPLES, "cache_dir": folder, "split": "1"}
    return MegatronDataModule(data_path, **given | options)


def leg(data_path: Any, folder: str, number: int, layout: Leg, last: int, killed: bool = False) -> tuple[int, Steps]:
    """Train up to a step, from where the leg before has stopped; what this dp rank saw.

    A run that is killed saves at that step and takes one more, which is lost.
    """
    seed_everything(7, verbose=False)
    options = dict(layout)
    dp, accumulate = options.pop("dp", 1), options.pop("accumulate", 1)
    data = data_module(data_path, folder, batch_size=GLOBAL_BATCH // dp // accumulate)
    seen = Seen()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=last, save_top_k=-1)
    trainer = quiet_trainer(
        MegatronStrategy(**options),
        max_steps=last + killed,
        callbacks=[seen, saver] if killed else [seen],
        accumulate_grad_batches=accumulate,
        enable_checkpointing=killed,
    )
    before = None if number == 0 else f"{folder}/{number - 1}.ckpt"
    trainer.fit(LlamaModule("llama-tiny", **TINY), data, ckpt_path=before)
    if killed:
        seen.steps.pop(last, None)
        if trainer.is_global_zero:
            Path(f"{folder}/step={last}.ckpt").rename(f"{folder}/{number}.ckpt")
    else:
        trainer.save_checkpoint(f"{folder}/{number}.ckpt")
    return trainer.strategy.data_parallel_rank, seen.steps


def digest(samples: list[bytes]) -> str:
    return hashlib.sha256(b"".join(samples)).hexdigest()


def expected(data_path: Any, folder: str) -> dict[int, str]:
    """The order of the data set itself."""
    data = data_module(data_path, folder)
    data.setup("fit")
    dataset = data.train_dataloader().dataset
    samples = [dataset[i]["tokens"].numpy().tobytes() for i in range(SAMPLES)]
    assert len(set(samples)) > SAMPLES // 2, "a wrong order would not show"
    return {step: digest(samples[step * GLOBAL_BATCH :][:GLOBAL_BATCH]) for step in range(STEPS)}


CHAINS: dict[str, list[tuple[int, Leg]]] = {
    "dp 1, 2, 4": [(1, {}), (2, {"dp": 2, "micro_batch_size": 2}), (4, {"dp": 4, "micro_batch_size": 1})],
    "dp 4, 1, 2": [(4, {"dp": 4}), (1, {"micro_batch_size": 4}), (2, {"dp": 2, "distributed_optimizer": False})],
    "dp instead of accumulation": [
        (1, {"accumulate": 4}),
        (4, {"dp": 4, "micro_batch_size": 1}),
        (2, {"dp": 2, "accumulate": 2}),
    ],
    "dp 2, tp 2, dp 2 with tp 2": [
        (2, {"dp": 2}),
        (2, {"tp": 2, "micro_batch_size": 2}),
        (4, {"dp": 2, "tp": 2, "micro_batch_size": 1}),
    ],
}


@pytest.mark.parametrize(
    "killed", [pytest.param(True, id="killed"), pytest.param(False, marks=pytest.mark.slow, id="prolonged")]
)
@pytest.mark.parametrize("chain", CHAINS)
def test_the_order_of_samples_survives_another_number_of_replicas(ranks, data_path, tmp_path, chain, killed):
    found: dict[int, str] = {}
    for number, (size, layout) in enumerate(CHAINS[chain]):
        last = (number + 1) * STEPS // 3
        results = ranks(size, leg, data_path, str(tmp_path), number, layout, last, killed)
        by_replica = dict(results)  # ranks of one replica saw the same
        assert all(by_replica[replica] == steps for replica, steps in results)
        for step in results[0][1]:
            assert step not in found, "a step is run once"
            # One batch of all replicas after the other.
            batches = zip(*(by_replica[replica][step] for replica in sorted(by_replica)), strict=True)
            found[step] = digest([sample for batch in batches for part in batch for sample in part])
    assert found == expected(data_path, str(tmp_path))


def test_a_prolonged_run_reads_on(data_path, tmp_path):
    """In one process: Lightning saves after ``max_steps`` with an epoch that it counts as done."""
    found: dict[int, str] = {}
    for number, last in enumerate((4, 7)):
        _, steps = leg(data_path, str(tmp_path), number, {}, last)
        found |= {step: digest(batch) for step, (batch,) in steps.items()}
    right = expected(data_path, str(tmp_path))
    assert found == {step: right[step] for step in range(7)}


def resume(data_path: Any, folder: str, other: dict[str, Any], source: str = "0.ckpt") -> int:
    trainer = quiet_trainer(MegatronStrategy(), max_steps=4)
    options = {"batch_size": GLOBAL_BATCH, **other}
    data = data_module(options.pop("data_path", data_path), folder, **options)
    trainer.fit(LlamaModule("llama-tiny", **TINY), data, ckpt_path=f"{folder}/{source}")
    return trainer.global_step


def test_other_data_is_refused_and_named_unless_asked_for(data_path, tmp_path):
    folder = str(tmp_path)
    leg(data_path, folder, 0, {}, 3)
    moved = [0.7, write(f"{folder}/moved", 1), 0.3, write(f"{folder}/too", 2)]
    assert resume(data_path, folder, {"data_path": moved}) == 4
    other = [0.6, data_path[1], 0.4, write(f"{folder}/c", 3)]
    with pytest.raises(ConfigError) as raised:
        resume(data_path, folder, {"data_path": other, "seed": 5})
    arguments = [problem.argument for problem in raised.value.problems]
    assert {"data_path.weights[0]", "data_path.weights[1]", "data_path.files[1].index", "seed"} < set(arguments)
    assert not [name for name in arguments if "files[0]" in name]
    assert arguments[-1] == "allow_other_data"
    assert resume(data_path, folder, {"data_path": other, "seed": 5, "allow_other_data": True}) == 4
    with pytest.warns(UserWarning, match="145 samples are drawn for training now, and 73 were before"):
        resume(data_path, folder, {"train_samples": 2 * SAMPLES})


def test_weights_alone_go_on_with_any_data(data_path, tmp_path):
    folder = str(tmp_path)
    leg(data_path, folder, 0, {}, 3)
    other = data_module(write(f"{folder}/c", 3), folder, split="1,1", val_samples=4)
    module = LlamaModule("llama-tiny", **TINY)
    (result,) = quiet_trainer(MegatronStrategy()).validate(module, other, ckpt_path=f"{folder}/0.ckpt", verbose=False)
    assert np.isfinite(result["val_loss"])


def refused(data_path: Any, folder: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        resume(data_path, folder, {"seed": 5, "batch_size": GLOBAL_BATCH // 2})
    return [problem.argument for problem in raised.value.problems]


def test_a_refusal_reaches_every_rank(ranks, data_path, tmp_path):
    ranks(2, leg, data_path, str(tmp_path), 0, {"dp": 2}, 3)
    assert ranks(2, refused, data_path, str(tmp_path)) == [["seed", "allow_other_data"]] * 2
