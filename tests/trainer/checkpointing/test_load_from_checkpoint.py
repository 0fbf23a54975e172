"""Weights alone: `load_from_checkpoint` for our modules in any layout, `load_module` for anybody's in one process."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.core.saving import save_hparams_to_yaml
from torch import nn
from torch.utils.data import DataLoader

from lightning_megatron import (
    ColumnParallelLinear,
    ConfigError,
    LlamaModule,
    MegatronModule,
    MegatronStrategy,
    MixtralModule,
    RowParallelLinear,
)
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST, Manifest, record
from lightning_megatron.device import CPU
from lightning_megatron.lightning.modules.load_module import load_module, read_checkpoint
from lightning_megatron.lightning.pretrained.trained_tokenizer import TrainedTokenizer
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer
from tests.tiny import tiny_llama

PP = {"pp": 2, "micro_batch_size": 2}

# One of the checkpoints is stock Lightning's, on the CPU, for which a model that was built for HPUs has not chosen ops.
pytestmark = pytest.mark.skipif(kind_in_tests() is not CPU, reason="Lightning's own strategies stay on the CPU")


def rows() -> Any:
    tokens = torch.randint(40, (8, 9), generator=torch.Generator().manual_seed(3))
    return DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in tokens], batch_size=4)  # type: ignore[arg-type]


class WithHead(LlamaModule):
    """A part of its own that is built after the model, and a number that its hooks carry."""

    seen = 0

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "extra"):
            self.extra = nn.Parameter(torch.zeros(3))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = 7

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run of one process as a directory, as weights alone, and as a single file of Lightning's; its test loss."""
    folder = tmp_path_factory.mktemp("saved")
    seed_everything(3, verbose=False)
    module = WithHead(tiny_llama(), lr=1e-2)
    trainer = quiet_trainer(MegatronStrategy(), max_steps=2)
    trainer.fit(module, rows())
    with torch.no_grad():
        module.extra.copy_(torch.arange(3.0))
    (found,) = trainer.test(module, rows(), verbose=False)
    trainer.save_checkpoint(folder / "whole.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    stock = quiet_trainer("auto")
    stock.test(module, rows(), verbose=False)
    stock.save_checkpoint(folder / "file.ckpt")
    return folder, found["test_loss"]


@pytest.mark.parametrize("name", ["whole.ckpt", "weights.ckpt", "file.ckpt"])
def test_in_one_process(saved: tuple[Path, float], name: str) -> None:
    folder, expected = saved
    module = WithHead.load_from_checkpoint(folder / name, lr=0.5)
    assert module.lr == 0.5
    assert module.config == tiny_llama()
    logits = module(torch.arange(6).reshape(1, 6))
    assert module.seen == 7
    assert module.extra.tolist() == [0, 1, 2]
    for strategy in ("auto", MegatronStrategy()):
        fresh = WithHead.load_from_checkpoint(folder / name)
        (found,) = quiet_trainer(strategy).test(fresh, rows(), verbose=False)
        assert found["test_loss"] == pytest.approx(expected, rel=1e-6)
        assert fresh.extra.tolist() == [0, 1, 2]
    torch.testing.assert_close(load_module(folder / name, WithHead)(torch.arange(6).reshape(1, 6)), logits)


def test_a_layer_too_many_is_named(saved: tuple[Path, float]) -> None:
    module = LlamaModule.load_from_checkpoint(saved[0] / "whole.ckpt")
    with pytest.raises(CheckpointError, match=r"model\.extra: in the checkpoint, but not in the model"):
        module(torch.arange(6).reshape(1, 6))
    lenient = LlamaModule.load_from_checkpoint(saved[0] / "whole.ckpt", strict=False)
    assert lenient(torch.arange(6).reshape(1, 6)).shape == (1, 6, 40)


def test_a_map_location_that_is_no_device_is_refused(saved: tuple[Path, float]) -> None:
    with pytest.raises(ConfigError, match="map_location"):
        LlamaModule.load_from_checkpoint(saved[0] / "whole.ckpt", map_location={"a": "b"})


def begins(path: str, strategy: dict[str, Any], eagerly: bool = False) -> list[float]:
    """Losses of a run that begins with weights alone."""
    module = load_module(path, WithHead) if eagerly else WithHead.load_from_checkpoint(path)
    recorder = Recorder()
    trainer = quiet_trainer(MegatronStrategy(**strategy), max_steps=2, logger=recorder)
    (found,) = trainer.test(module, rows(), verbose=False)
    trainer.fit(module, rows())
    assert module.extra.tolist() == [0, 1, 2]
    return [found["test_loss"], *recorder.series("train_loss")]


def test_a_run_begins_with_weights_alone_in_any_layout(ranks: Any, saved: tuple[Path, float]) -> None:
    folder, expected = saved
    ((tested, *losses),) = ranks(1, begins, str(folder / "weights.ckpt"), {})
    assert tested == pytest.approx(expected, rel=1e-6)
    for strategy, name, eagerly in (
        ({"tp": 2}, "weights.ckpt", False),
        (PP, "whole.ckpt", False),
        (PP, "weights.ckpt", True),
        ({"tp": 2}, "file.ckpt", False),
    ):
        for found in ranks(2, begins, str(folder / name), strategy, eagerly):
            assert found == pytest.approx([expected, *losses], rel=1e-5), (strategy, name)
    with pytest.raises(AssertionError, match=r"begin a run with .* give fit the module WithHead\.load_from_"):
        ranks(1, goes_on, str(folder / "weights.ckpt"))


def goes_on(path: str) -> None:
    quiet_trainer(MegatronStrategy(), max_steps=4).fit(WithHead(tiny_llama()), rows(), ckpt_path=path)


class Plain(LightningModule):
    """Anybody's: tied weights, arguments of any kind, a layer that its checkpoint resizes."""

    def __init__(self, width: int, *, name: str = "a") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.table, self.out = nn.Embedding(5, width), nn.Linear(width, 5, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("grown", torch.zeros(1))
        self.later: nn.Linear | None = None

    def configure_model(self) -> None:
        if self.later is None:
            self.later = nn.Linear(2, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert self.later is not None
        return nn.functional.cross_entropy(self.out(self.table(batch)), batch) + self.later.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.grown = torch.zeros_like(checkpoint["state_dict"]["grown"])


def test_anybodys_module_as_in_stock(tmp_path: Path) -> None:
    module, numbers = Plain(4, name="b"), DataLoader(torch.arange(5), batch_size=5)  # type: ignore[arg-type]
    trainer = quiet_trainer(MegatronStrategy(), max_steps=1)
    trainer.fit(module, numbers)
    module.grown = torch.arange(3.0)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    stock = quiet_trainer("auto", max_steps=1)
    stock.fit(module, numbers)
    stock.save_checkpoint(tmp_path / "b.ckpt")
    trainer = quiet_trainer(MegatronStrategy(), max_steps=1)
    trainer.fit(module, numbers)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    for path in (tmp_path / "a.ckpt", tmp_path / "b.ckpt", tmp_path / "c.ckpt"):
        found = load_module(path, Plain)
        assert dict(found.hparams) == {"width": 4, "name": "b"}
        assert found.out.weight is found.table.weight
        assert found.grown.tolist() == [0, 1, 2]
        assert not found.training
    torch.testing.assert_close(found.state_dict(), module.state_dict(), rtol=0, atol=0)
    read = read_checkpoint(tmp_path / "c.ckpt")
    torch.testing.assert_close(read["state_dict"], {**module.state_dict()}, rtol=0, atol=0)  # with both tied names
    assert read["global_step"] == 1
    assert load_module(tmp_path / "c.ckpt", Plain, name="c").hparams.name == "c"
    with pytest.raises(CheckpointError, match=r"size mismatch for table\.weight"):
        load_module(tmp_path / "c.ckpt", Plain, width=8)


class Twice(LightningModule):
    """A layer under two names, and a weight under three."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second, self.third = self.first, nn.Linear(3, 3)
        self.third.weight = self.first.weight
        self.register_buffer("shift", torch.ones(3))
        self.again = nn.Module()
        self.again.register_buffer("shift", self.shift)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.third(self.second(batch)) + self.shift).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def saves_tied(folder: str, options: dict[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    module, path = Twice(), f"{folder}/tied.ckpt"
    trainer = quiet_trainer(MegatronStrategy(**options), max_steps=1)
    trainer.fit(module, DataLoader(torch.ones(8, 3), batch_size=2))  # type: ignore[arg-type]
    trainer.save_checkpoint(path, weights_only="sequence_parallel" in options)
    return path, {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": False}, {"sequence_parallel": False}], ids=str)
def test_a_tied_tensor_is_read_under_all_its_names(ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    (path, weights), _ = ranks(2, saves_tied, str(tmp_path), options)
    found = read_checkpoint(path)["state_dict"]
    assert {"first.bias", "second.bias", "second.weight", "third.weight", "again.shift"} <= found.keys()
    torch.testing.assert_close(found, weights, rtol=0, atol=0)
    Twice().load_state_dict(found)  # strict


def test_what_is_missing_is_a_missing_file_too(tmp_path: Path) -> None:
    for load in (LlamaModule.load_from_checkpoint, load_module, read_checkpoint):
        with pytest.raises(FileNotFoundError, match=r"none\.ckpt: it does not exist"):
            load(tmp_path / "none.ckpt")
    assert issubclass(FileNotFoundError, OSError)
    with pytest.raises(CheckpointError, match=r"none\.ckpt: it does not exist"):
        quiet_trainer(MegatronStrategy()).test(LlamaModule(tiny_llama()), rows(), ckpt_path=tmp_path / "none.ckpt")


class Nameless(LightningModule):
    """No hyper-parameters are saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)


def test_arguments_that_no_checkpoint_has(tmp_path: Path) -> None:
    module = Nameless(3)
    trainer = quiet_trainer(MegatronStrategy())
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"and Nameless needs some: load_module\(path, Nameless, width=...\), or"):
        load_module(tmp_path / "a.ckpt", Nameless)
    torch.testing.assert_close(load_module(tmp_path / "a.ckpt", Nameless, width=3).state_dict(), module.state_dict())


def test_the_file_of_hyper_parameters_is_plain_yaml(tmp_path: Path) -> None:
    module = MixtralModule("mixtral-tiny", num_layers=2, moe_layers=(1,), sliding_window=8, sliding_window_layers=(0,))
    save_hparams_to_yaml(tmp_path / "hparams.yaml", module.hparams)
    arguments = yaml.safe_load((tmp_path / "hparams.yaml").read_text())
    assert MixtralModule(**arguments).config == module.config


def test_saving_before_there_is_anything_to_save(tmp_path: Path) -> None:
    trainer = quiet_trainer(MegatronStrategy())
    trainer.strategy.connect(Pair(4))
    with pytest.raises(RuntimeError, match=r"there are no parameters yet\. They come with the first of these calls"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer = Trainer(strategy=MegatronStrategy(), accelerator=kind_in_tests().type, devices=2, logger=False)
    trainer.strategy.connect(Nameless(3))
    with pytest.raises(RuntimeError, match="there are no processes yet"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")


class Pair(MegatronModule):
    """Parallel layers of a user's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width = width
        self.up: ColumnParallelLinear | None = None

    def configure_model(self) -> None:
        if self.up is None:
            self.up = ColumnParallelLinear(self.width, 8, self.mesh)
            self.down = RowParallelLinear(8, 1, self.mesh)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        assert self.up is not None
        self.log("test_loss", self.down(self.up(batch).tanh()).square().mean())


def evaluated(path: str, first: bool) -> float:
    seed_everything(5, verbose=False)
    trainer = quiet_trainer(MegatronStrategy(tp=2))
    module = Pair(6) if first else Pair.load_from_checkpoint(path)
    batches: Any = DataLoader(torch.linspace(-1, 1, 48).reshape(8, 6), batch_size=4)  # type: ignore[arg-type]
    (found,) = trainer.test(module, batches, verbose=False)
    if first:
        trainer.save_checkpoint(path)
    return found["test_loss"]


def test_parallel_layers_of_a_users_own(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    expected, _ = ranks(2, evaluated, path, True)
    seed_everything(6, verbose=False)
    assert ranks(2, evaluated, path, False) == [expected, expected]
    batches: Any = DataLoader(torch.linspace(-1, 1, 48).reshape(8, 6), batch_size=4)  # type: ignore[arg-type]
    for module in (Pair.load_from_checkpoint(path), load_module(path, Pair)):
        (found,) = quiet_trainer("auto").test(module, batches, verbose=False)
        assert found["test_loss"] == pytest.approx(expected, rel=1e-6)


def test_a_model_far_larger_than_its_weights_is_not_built(saved: tuple[Path, float], tmp_path: Path) -> None:
    folder = copytree(saved[0] / "whole.ckpt", tmp_path / "copy.ckpt")
    meta = torch.load(folder / "meta.pt", weights_only=True)
    meta["hyper_parameters"]["config"]["num_layers"] = 10**9
    torch.save(meta, folder / "meta.pt")
    manifest = Manifest.parse((folder / MANIFEST).read_text())
    files = {**manifest.files, "meta.pt": record(folder / "meta.pt")}
    (folder / MANIFEST).write_text(Manifest(manifest.layout, files, manifest.torch).render())
    for read in (WithHead.load_from_checkpoint, TrainedTokenizer.of_weights):
        with pytest.raises(CheckpointError, match=r"meta.pt describes 1000000000 layers of 32 features"):
            read(folder)
