"""``lightning-megatron parity`` agrees where layouts agree, and names the layer with a fault."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.tools.cli.main import main
from lightning_megatron.tools.cli.trials.parity import _report
from lightning_megatron.tools.parity.difference import Step

CONFIGS = Path(__file__).parents[3] / "lightning_megatron" / "tools" / "recipes"
SIZES = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "vocab_size": 96,
    "vocab_multiple": 1,
    "max_position_embeddings": 64,
}
FAULTY = """
import torch
from lightning_megatron import LlamaModule


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_factor = backward
        return x * forward

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.backward_factor, None, None


class {name}(LlamaModule):
    "A fault in the second layer, on several ranks alone."

    def configure_model(self):
        is_built = self.model is not None
        super().configure_model()
        if not is_built and self.model.axis.size > 1:
            norm = self.model.layers["1"].mlp_norm
            norm.register_forward_hook(lambda module, inputs, output: Scaled.apply(output, {forward}, {backward}))
"""

PLAIN = """
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from lightning_megatron import ColumnParallelLinear, RowParallelLinear


class Block(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = ColumnParallelLinear(8, 16, mesh, init_std=0.5)
        self.act = nn.GELU()
        self.down = RowParallelLinear(16, 8, mesh, init_std=0.5)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Partial(nn.Module):
    "Returns this rank's part of a sum, which the module adds up: of no meaning alone."

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, x):
        return x * (2 * self.mesh.tp.rank + 1) / self.mesh.tp.size**2


class Plain(LightningModule):
    def __init__(self, faulty: str = ""):
        super().__init__()
        self.faulty, self.stem = faulty, None

    def configure_model(self):
        if self.stem is not None:
            return
        mesh = self.trainer.strategy.mesh
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(mesh) for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.part = Partial(mesh)
        if self.faulty and mesh.tp.size > 1:
            self.get_submodule(self.faulty).register_forward_hook(lambda module, inputs, output: output * 1.05)

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        self.part(hidden.detach())
        return F.cross_entropy(self.head(hidden), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Points(LightningDataModule):
    def train_dataloader(self):
        draw = torch.Generator().manual_seed(1)
        rows = [(torch.randn(4, generator=draw), number % 3) for number in range(8)]
        return torch.utils.data.DataLoader(rows, batch_size=4)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "against"),
    [
        pytest.param("mixtral-tiny", "", id="mixtral", marks=pytest.mark.exhaustive),
        pytest.param("llama-tiny", "tp=1,pp=2", id="llama"),
    ],
)
def test_twins_of_recipes_agree(name: str, against: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--against", against] if against else []
    assert main(["parity", "--config", str(CONFIGS / f"{name}.yaml"), "--steps", "2", *words]) == 0
    out = capfd.readouterr().out
    assert "they agree: losses, " in out
    losses = [line.split() for line in out.splitlines() if re.match(r" +\d+ ", line)]
    assert len(losses) == 2
    assert all(abs(float(a) - float(b)) < 1e-5 for _, a, b, *_ in losses)


def recipe(folder: Path, name: str, forward: float, backward: float) -> Path:
    (folder / f"{name.lower()}_module.py").write_text(FAULTY.format(name=name, forward=forward, backward=backward))
    draw = np.random.default_rng(1)
    with IndexedDatasetWriter(str(folder / "tokens"), np.dtype(np.int32)) as writer:
        for _ in range(16):
            writer.add_document(draw.integers(0, 96, 200, dtype=np.int32), [200])
    contents: dict[str, Any] = {
        "trainer": {
            "devices": 2,
            "strategy": {"class_path": "lightning_megatron.MegatronStrategy", "init_args": {"tp": 2}},
        },
        "model": {
            "class_path": f"{name.lower()}_module.{name}",
            "init_args": {"config": "llama-tiny"},
            "dict_kwargs": SIZES,
        },
        "data": {
            "class_path": "MegatronDataModule",
            "init_args": {"data_path": str(folder / "tokens"), "seq_length": 32, "batch_size": 2, "split": "1,0,0"},
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(contents))
    return folder / "recipe.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "backward", "text"),
    [
        (1.05, 1.05, r"they differ first in step 0: the forward of layers\.1: its output is "),
        (1.0, 1.01, r"they differ first in step 0: the backward at model\.layers\.1\.mlp_norm\.weight: "),
    ],
    ids=["forward", "backward"],
)
def test_a_fault_in_one_layer_is_named(
    forward: float,
    backward: float,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    config = recipe(tmp_path, "Faulty", forward, backward)
    assert main(["parity", "--config", str(config), "--full", "--steps", "1"]) == 1
    assert re.search(text, capfd.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("faulty", ["", "head", "blocks.0.up", "blocks.1.down"])
def test_a_fault_in_a_layer_of_any_module_is_named(
    faulty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A plain layer, shards of features and a sum over ranks, in a module that is not this package's."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (tmp_path / "plain_module.py").write_text(PLAIN)
    strategy = {"class_path": "lightning_megatron.MegatronStrategy", "init_args": {"tp": 2}}
    contents: dict[str, Any] = {
        "seed_everything": 1,
        "trainer": {"devices": 2, "strategy": strategy},
        "model": {"class_path": "plain_module.Plain", "init_args": {"faulty": faulty}},
        "data": {"class_path": "plain_module.Points"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(contents))
    words = ["--config", str(tmp_path / "recipe.yaml"), "--full", "--steps", "2", "--against", "tp=1"]
    status, out = main(["parity", *words]), capfd.readouterr().out
    assert "parts of a sum: part\n" in out
    assert status == bool(faulty)
    expected = (
        f"they differ first in step 0: the forward of {faulty}: its output is " if faulty else "they agree: losses, "
    )
    assert expected in out


def test_what_cannot_work_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "llama-tiny.yaml")
    assert main(["parity", "--config", config, "--against", "tb=1,pp=x"]) == 2
    error = capsys.readouterr().err
    assert "tb=1" in error
    assert "no such axis" in error
    assert "pp=x" in error


def test_numbers_that_cannot_work_are_refused_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "llama-tiny.yaml")
    assert main(["parity", "--config", config, "--steps", "0", "--tolerance", "nan", "--seconds", "-1"]) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in ("--steps=0", "--tolerance=nan", "--seconds=-1"))


def test_runs_of_different_lengths_are_not_called_equal(capsys: pytest.CaptureFixture[str]) -> None:
    step = Step(1.0, 1.0, {}, {})
    assert _report([step], [step], 0.0) == 0
    assert _report([step], [step, step], 0.0) == 1
    assert _report([], [], 0.0) == 1
    assert "the runs took 1 and 2 optimizer steps" in capsys.readouterr().out
