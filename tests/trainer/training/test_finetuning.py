"""Callbacks that unfreeze and add groups in mid-run: the numbers of stock Lightning, resumed runs included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from lightning_megatron.testing.workers import WorkerError
from tests.tiny import tiny_llama


class Tuned(LightningModule):
    """A user's backbone and head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.backbone(x)), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


class LayerByLayer(BaseFinetuning):
    """The last layer of the backbone first, then the other, and the head frozen in the end."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(pl_module.backbone[2 if epoch == 1 else 0], optimizer, lr=0.01)
        if epoch == 3:
            self.freeze(pl_module.head)


def backbone() -> BackboneFinetuning:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.5)


def loader() -> DataLoader[Any]:
    """Batches of eight rows, shared out over replicas in order: the same rows make a step under any number of them."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    rows: Any = [(row, row.sum().reshape(1).sin()) for row in x]
    replicas, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    sampler = DistributedSampler(rows, replicas, rank, shuffle=False)
    return DataLoader(rows, batch_size=8 // replicas, sampler=sampler)


Run = tuple[list[float], dict[str, Tensor]]


def fit(strategy: Any, callback: BaseFinetuning, epochs: int, path: Path | None = None, resume: bool = False) -> Run:
    """Train, save in the end where there is a path, or go on from it."""
    recorder = Recorder()
    options: dict[str, Any] = {"logger": recorder, "callbacks": [callback], "use_distributed_sampler": False}
    trainer = quiet_trainer(strategy, max_epochs=epochs, accelerator="cpu", **options)
    module = Tuned()
    trainer.fit(module, loader(), ckpt_path=str(path) if resume else None)
    if path is not None and not resume:
        trainer.save_checkpoint(path)
    return recorder.series("train_loss"), {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_same(ours: Run, theirs: Run) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for name, value in theirs[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=1e-5, atol=1e-6)


def runs(folder: Path) -> list[list[Run]]:
    """With either callback; the first one also in two parts, before and after the backbone joins."""
    found = []
    for make in (backbone, LayerByLayer):
        found.append([fit(MegatronStrategy(), make(), 4)])
    for epochs in (1, 2):
        path = folder / f"{epochs}.ckpt"
        first = fit(MegatronStrategy(), backbone(), epochs, path)
        rest = fit(MegatronStrategy(), backbone(), 4, path, resume=True)
        found[0].append((first[0] + rest[0], rest[1]))
    return found


@pytest.mark.parametrize("dp", [1, 2])
def test_unfreezing_in_mid_run_gives_the_numbers_of_stock_on_the_whole_batch(
    ranks: Callable[..., list[Any]], tmp_path: Path, dp: int
) -> None:
    """DDP is no measure here: it never averages the gradients of what was frozen when it began."""
    stock = [fit(SingleDeviceStrategy(torch.device("cpu")), make(), 4) for make in (backbone, LayerByLayer)]
    for rank in ranks(dp, runs, tmp_path):
        for ours, theirs in zip(rank, stock, strict=True):
            for run in ours:
                assert_same(run, theirs)


class OneLayer(BaseFinetuning):
    """A layer of a model of ours joins in the second epoch, on the pipeline stage that has it."""

    def __init__(self, number: str) -> None:
        super().__init__()
        self.number = number

    def layer(self, module: LightningModule) -> list[nn.Module]:
        return [part for name, part in module.model.layers.items() if name == self.number]  # type: ignore[union-attr,operator]

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(self.layer(pl_module))

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(self.layer(pl_module), optimizer, lr=0.01)


def texts() -> DataLoader[Any]:
    rows = [{"tokens": row, "labels": row} for row in torch.arange(64).view(8, 8) % 32]
    return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


def fit_ours(strategy: Any, layer: str, epochs: int, path: Path | None = None, resume: bool = False) -> list[float]:
    """Losses of a model of which a layer joins in the second epoch."""
    torch.manual_seed(5)
    recorder = Recorder()
    options: dict[str, Any] = {"logger": recorder, "callbacks": [OneLayer(layer)], "use_distributed_sampler": False}
    trainer = quiet_trainer(strategy, max_epochs=epochs, accelerator="cpu", **options)
    trainer.fit(LlamaModule(tiny_llama(), lr=0.02), texts(), ckpt_path=str(path) if resume else None)
    if path is not None and not resume:
        trainer.save_checkpoint(path)
    return recorder.series("train_loss")


def ours_in(layout: dict[str, Any], layers: list[str], folder: Path) -> list[list[float]]:
    """Losses of runs that go on after the layer has joined."""
    found = []
    for layer in layers:
        path = folder / f"{layer}.ckpt"
        first = fit_ours(MegatronStrategy(**layout), layer, 2, path)
        found.append(first + fit_ours(MegatronStrategy(**layout), layer, 3, path, resume=True))
    return found


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "micro_batch_size": 2}], ids=str)
def test_a_layer_of_a_model_of_ours_joins_in_mid_run(
    ranks: Callable[..., list[Any]], tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Stages of a pipeline have other groups: in the first, norms may all be frozen; the callback saved is its own."""
    layers = ["0", "1"]
    one = [fit_ours(SingleDeviceStrategy(torch.device("cpu")), layer, 3) for layer in layers]
    for rank in ranks(2, ours_in, layout, layers, tmp_path):
        for losses, expected in zip(rank, one, strict=True):
            assert losses == pytest.approx(expected, rel=1e-4)


def ours_in_one_file(path: Path) -> None:
    layout: dict[str, Any] = {"pp": 2, "micro_batch_size": 2, "save_distributed_checkpoint": False}
    fit_ours(MegatronStrategy(**layout), "0", 2, path)
    fit_ours(MegatronStrategy(**layout), "0", 3, path, resume=True)


def test_in_a_pipeline_a_single_file_is_refused(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Its groups have numbers, and each stage needs its own names."""
    with pytest.raises(WorkerError, match="resumes in a pipeline from a directory only, not from a file"):
        ranks(2, ours_in_one_file, tmp_path / "a.ckpt")


def first_weight(strategy: Any) -> float:
    """Norm of the backbone's first weight after it has joined in mid-run."""
    return float(fit(strategy, backbone(), 4)[1]["backbone.0.weight"].norm())


def beside_ddp() -> tuple[float, float]:
    return first_weight(MegatronStrategy()), first_weight(DDPStrategy(find_unused_parameters=True))


def test_replicas_of_ddp_part_where_ours_do_not(ranks: Callable[..., list[Any]]) -> None:
    """The numbers of docs/optimizers.md."""
    one = first_weight(SingleDeviceStrategy(torch.device("cpu")))
    found = ranks(2, beside_ddp)
    assert [one, *(ours for ours, _ in found)] == pytest.approx([1.6376] * 3, abs=1e-4)
    assert [ddp for _, ddp in found] == pytest.approx([1.6663, 1.6577], abs=1e-3)
