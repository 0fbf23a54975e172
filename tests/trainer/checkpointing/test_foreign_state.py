"""Through the Trainer: Megatron's checkpoints as ``ckpt_path``, and optimizer state from one file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy, MixtralModule, TransformerConfig
from lightning_megatron.lightning.pretrained.convert import megatron_to_checkpoint
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

GOLDEN = Path(__file__).parents[2] / "unit" / "checkpoint" / "formats" / "golden" / "megatron.zip"
LLAMA = TransformerConfig(
    4, 8, 4, 21, 8, ffn_hidden_size=12, num_query_groups=2, norm="rmsnorm", activation="swiglu",
    position_embedding="rope", add_bias_linear=False, tie_embeddings=False, vocab_multiple=4,
)  # fmt: skip


def rows(vocabulary: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(vocabulary, (8, 9), generator=torch.Generator().manual_seed(3))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def begins(strategy: dict[str, Any], path: str) -> list[float]:
    """The loss on validation data, and the first losses of a run that begins with a checkpoint."""
    seed_everything(3, verbose=False)
    dp = strategy.pop("dp", 1)
    recorder = Recorder()
    trainer = quiet_trainer(MegatronStrategy(**strategy), max_steps=2, logger=recorder)
    batches, shuffled = (DataLoader(rows(21), batch_size=4 // dp, shuffle=s) for s in (False, True))  # type: ignore[arg-type]
    (found,) = trainer.validate(LlamaModule(LLAMA), batches, ckpt_path=path, verbose=False)
    trainer.fit(LlamaModule(LLAMA, lr=1e-3), shuffled, ckpt_path=path)
    return [found["val_loss"], *recorder.series("train_loss")]


def test_a_run_begins_with_megatrons_weights_in_any_layout(ranks: Any, tmp_path: Path) -> None:
    with zipfile.ZipFile(GOLDEN) as archive:
        archive.extractall(tmp_path)
    source, converted = tmp_path / "llama" / "torch_dist", tmp_path / "a.ckpt"
    megatron_to_checkpoint(source, converted, config=LLAMA)
    expected = ranks(1, begins, {}, str(converted))[0]
    for strategy in ({"tp": 2}, {"pp": 2, "micro_batch_size": 2}):
        for found in ranks(2, begins, strategy, str(source)):
            assert found == pytest.approx(expected, rel=1e-5)
    with pytest.raises(AssertionError, match="--allow-pickle"):
        ranks(1, begins, {}, str(tmp_path / "llama" / "torch"))


class AtStart(Callback):
    """Loads a file before the first step, and writes another one at once."""

    def __init__(self, source: str | None, target: str, level: str) -> None:
        self.source, self.target, self.level = source, target, level
        self.values: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.source is not None:
            trainer.strategy.load_optimizer_state(self.source, self.level, ranks_per_node=1)
            trainer.strategy.export_optimizer_state(self.target, self.level, ranks_per_node=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.source is None:
            trainer.strategy.export_optimizer_state(self.target, self.level)


def with_file(strategy: dict[str, Any], source: str | None, target: str, level: str) -> list[float]:
    seed_everything(3 if source is None else 4, verbose=False)
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2}
    sizes |= {"ffn_hidden_size": 16, "vocab_size": 31, "vocab_multiple": 4, "num_experts": 2}
    options = dict(strategy)
    dp = options.pop("dp", 1)
    recorder = Recorder()
    trainer = quiet_trainer(
        MegatronStrategy(micro_batch_size=1, **options),
        max_steps=2,
        logger=recorder,
        callbacks=[AtStart(source, target, level)],
        precision="bf16-mixed" if source is None else "32-true",
    )
    batches: Any = DataLoader(rows(31), batch_size=4 // dp, shuffle=True)  # type: ignore[arg-type]
    trainer.fit(MixtralModule("mixtral-tiny", lr=1e-2 if source is None else 1e-3, **sizes), batches)
    return [group["lr"] for group in trainer.optimizers[0].param_groups] + recorder.series("train_loss")


def test_a_run_takes_over_the_optimizers_of_another_layout_from_one_file(ranks: Any, tmp_path: Path) -> None:
    first, second = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")
    ranks(2, with_file, {"dp": 2, "ep": 2}, None, first, "serial_per_node")
    losses = []
    for strategy, level in (
        ({"tp": 2, "ep": 2, "etp": 1}, "parallel_multi_node"),
        ({"pp": 2}, "serial_per_dp_groups"),
        ({"dp": 2, "distributed_optimizer": False}, "parallel_node_0"),
    ):
        results = ranks(2, with_file, strategy, first, second, level)
        assert Path(second).read_bytes() == Path(first).read_bytes(), strategy
        losses += [result[-2:] for result in results]
        assert set(results[0][:-2]) == {1e-2}, "groups have the learning rate of the file"
    for found in losses:
        assert found == pytest.approx(losses[0], rel=1e-5), "parameters are the main values of the file"


def test_there_is_nothing_to_export_outside_of_fit() -> None:
    strategy = MegatronStrategy()
    with pytest.raises(RuntimeError, match="on_train_start"):
        strategy.export_optimizer_state("x.safetensors")
