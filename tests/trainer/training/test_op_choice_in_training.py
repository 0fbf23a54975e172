"""``ops=`` of the strategy in a run: numbers, refusals, and the report beside the logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.errors import ConfigError
from lightning_megatron.ops.registry import SELECTABLE, Ops
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

STEPS, BATCH, LENGTH, VOCABULARY = 3, 4, 10, 61


def train(folder: Path | None, strategy: dict[str, Any], **options: Any) -> list[float]:
    """Losses of a few steps."""
    seed_everything(5, verbose=False)
    small = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    module = GPTModule("llama-tiny", lr=1e-2, **small)
    tokens = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    loader: DataLoader[Any] = DataLoader(rows, batch_size=BATCH, shuffle=True)
    recorder = Recorder()
    trainer = quiet_trainer(
        MegatronStrategy(micro_batch_size=2, **strategy),
        max_epochs=1,
        **{"logger": recorder, "default_root_dir": folder} | options,
    )
    trainer.fit(module, loader)
    return recorder.series("train_loss")


def test_a_run_on_references_learns_the_same(tmp_path: Path) -> None:
    off = train(tmp_path, {"ops": dict.fromkeys(SELECTABLE, "off")})
    assert off == pytest.approx(train(tmp_path, {}), rel=1e-5)
    assert off[-1] < off[0]
    assert not list(tmp_path.rglob("*.json")), "without a logger's folder nothing is written unasked"


def test_the_report_lies_beside_the_logs(tmp_path: Path) -> None:
    train(None, {"ops": "rms_norm=off"}, logger=CSVLogger(tmp_path, name="run", version=0), accelerator="cpu")
    folder = tmp_path / "run" / "version_0"
    report = json.loads((folder / "op_report.json").read_text())
    assert (report["device"], report["modes"]) == ("cpu", "rms_norm=off")
    norm, *_ = report["modules"]["model.layers.3.mlp_norm"]
    assert (norm["chosen"], norm["why"]) == ("reference", "switched off")
    assert {c["op"] for c in report["modules"]["model.layers.0.attention"]} == {"rope", "attention"}
    assert report["modules"][""][0]["op"] == "adamw"
    assert not list(folder.glob(".op_report*"))


def test_a_trial_run_writes_nothing(tmp_path: Path) -> None:
    train(tmp_path, {}, fast_dev_run=True)
    assert not list(tmp_path.iterdir())


def staged(folder: Path) -> None:
    train(None, {"pp": 2, "ops": {"rope": "off"}}, logger=CSVLogger(folder, name="", version=""))


def test_the_report_of_a_pipeline_has_the_layers_of_all_stages(ranks: Any, tmp_path: Path) -> None:
    ranks(2, staged, tmp_path)
    modules = json.loads((tmp_path / "op_report.json").read_text())["modules"]
    assert {f"model.layers.{i}.attention" for i in range(4)} <= set(modules)
    assert "model.head.norm" in modules


def test_a_kernel_that_no_device_of_the_trainer_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rope=require.*no implementation of it for cpu"):
        train(tmp_path, {"ops": {"rope": "require"}}, accelerator="cpu")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--s.ops=attention=off,rope=auto"], ['--s.ops={"attention": "off"}']])
def test_the_command_line_takes_text_and_mappings(words: list[str]) -> None:
    parser = LightningArgumentParser()
    parser.add_class_arguments(MegatronStrategy, "s")
    strategy = parser.instantiate_classes(parser.parse_args(words)).s
    assert Ops("cpu", strategy.op_modes).mode("attention") == "off"
