"""Optimizers that look at whole parameters, or that a user vouches for, under a Trainer: stock's numbers, and DDP's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.device import CPU
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer


class Trust(torch.optim.Optimizer):
    """A parameter's rate follows its norm, as in LARS (https://arxiv.org/abs/1708.03888); state that is no tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                past = self.state[p].setdefault("past", [torch.zeros_like(p), None])
                past[0].mul_(0.9).add_(p.grad)
                rate = group["lr"] * float(p.norm() / (past[0].norm() + 1e-3)) / self.state["all"]["steps"]
                p.sub_(past[0], alpha=rate)
        return loss


class Averages(torch.optim.SGD):
    """SGD whose parameters are the average of their past while it is evaluated, as ScheduleFree's are."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("mean", p.clone()).lerp_(p, 0.3)
        return loss

    def eval(self) -> None:
        self._swap("now", "mean")

    def train(self) -> None:
        self._swap("mean", "now")

    @torch.no_grad()
    def _swap(self, keep: str, show: str) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if show in self.state[p]:
                self.state[p][keep] = p.clone()
                p.copy_(self.state[p][show])


KINDS: dict[str, Callable[[LightningModule], torch.optim.Optimizer]] = {
    "trust": lambda module: Trust(module.parameters()),
    "averages": lambda module: Averages(module.parameters(), lr=0.1),
    "adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=0.02),
}
if hasattr(torch.optim, "Muon"):
    KINDS["muon"] = lambda module: torch.optim.Muon([p for p in module.parameters() if p.ndim > 1], lr=0.02)


class Toy(LightningModule):
    """A user's module that asks its optimizer for other weights while it is validated."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.body(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_start(self) -> None:
        if isinstance(optimizer := self.optimizers().optimizer, Averages):
            optimizer.eval()

    def on_validation_end(self) -> None:
        if isinstance(optimizer := self.optimizers().optimizer, Averages):
            optimizer.train()

    def configure_optimizers(self) -> Any:
        return KINDS[self.kind](self)


def loader() -> DataLoader[Any]:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader([(row, row.sum().reshape(1).sin()) for row in x], batch_size=4)  # type: ignore[arg-type]


Run = tuple[list[dict[str, float]], dict[str, Tensor]]


def fit(
    strategy: Any, kind: str, epochs: int, save: Path | None = None, resume: Path | None = None, **more: Any
) -> Run:
    recorder, module = Recorder(), Toy(kind)
    distributed = dist.is_initialized() and dist.get_world_size() > 1
    options: dict[str, Any] = {"logger": recorder, "max_epochs": epochs, "use_distributed_sampler": distributed}
    trainer = quiet_trainer(strategy, accelerator="cpu", **options, **more)
    trainer.fit(module, loader(), loader(), ckpt_path=None if resume is None else str(resume))
    if save is not None:
        trainer.save_checkpoint(save)
    return recorder.rows, {name: p.detach().clone() for name, p in module.named_parameters()}


def runs(folder: Path) -> dict[str, tuple[Run, Run, Run]]:
    """Stock, ours, and ours in two parts."""
    found = {}
    for kind in KINDS:
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        stock = DDPStrategy() if distributed else SingleDeviceStrategy(torch.device("cpu"))
        fit(MegatronStrategy(distributed_optimizer=False), kind, 1, save=folder / f"{kind}.ckpt")
        rest = fit(MegatronStrategy(distributed_optimizer=False), kind, 2, resume=folder / f"{kind}.ckpt")
        found[kind] = fit(stock, kind, 2), fit(MegatronStrategy(distributed_optimizer=False), kind, 2), rest
    return found


only_on_cpus = pytest.mark.skipif(kind_in_tests() is not CPU, reason="DDP stays on the CPU, and its ranks on HCCL")


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=only_on_cpus)])
def test_optimizers_of_whole_parameters_give_the_numbers_of_stock(
    ranks: Callable[..., list[Any]], tmp_path: Path, dp: int
) -> None:
    for rank in ranks(dp, runs, tmp_path):
        for kind, (theirs, ours, rest) in rank.items():
            assert [row.keys() for row in ours[0]] == [row.keys() for row in theirs[0]]
            for mine, its in zip(ours[0], theirs[0], strict=True):
                assert mine == pytest.approx(its, rel=1e-5), kind
            assert len(rest[0]) < len(ours[0])
            for name, value in theirs[1].items():
                torch.testing.assert_close(ours[1][name], value, rtol=1e-5, atol=1e-6)
                assert torch.equal(rest[1][name], ours[1][name]), (kind, name)


class Difference(torch.optim.Optimizer):
    """Steps along the change of the gradient; the first gradient has changed from nothing to itself by none."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            past = self.state[p].setdefault("past", p.grad.clone())
            p.sub_(p.grad + (p.grad - past), alpha=self.param_groups[0]["lr"])
            past.copy_(p.grad)
        return loss


class Early(Callback):
    """Saves before the first step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_a_checkpoint_before_the_first_step_does_not_change_it(tmp_path: Path) -> None:
    KINDS["difference"] = lambda module: Difference(module.parameters(), {"lr": 0.1})
    path = tmp_path / "0.ckpt"

    def ours(**options: Any) -> Run:
        return fit(MegatronStrategy(elementwise_optimizers=[Difference]), "difference", 1, **options)

    plain = fit(SingleDeviceStrategy(torch.device("cpu")), "difference", 1)
    for run in (ours(callbacks=[Early(path)]), ours(resume=path)):
        assert [row["train_loss"] for row in run[0] if "train_loss" in row] == [
            row["train_loss"] for row in plain[0] if "train_loss" in row
        ]
    del KINDS["difference"]


def test_the_command_line_vouches_by_name() -> None:
    def strategy(*names: str) -> MegatronStrategy:
        arguments = [f"--trainer.strategy.elementwise_optimizers+={name}" for name in names]
        arguments = ["--trainer.strategy=MegatronStrategy", *arguments, "--trainer.accelerator=cpu"]
        arguments += ["--trainer.logger=false", "--trainer.devices=1", "--model.kind=trust"]
        cli = LightningCLI(Toy, args=arguments, run=False, save_config_callback=None)
        assert isinstance(cli.trainer.strategy, MegatronStrategy)
        return cli.trainer.strategy

    assert strategy("Trust", "torch.optim.LBFGS")._job.optimizer.elementwise == ("Trust", "torch.optim.LBFGS")


@pytest.mark.parametrize("given", ["no_such_package.Lion", "torch.nn.Linear", int])
def test_what_is_no_optimizer_cannot_be_vouched_for(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"elementwise_optimizers=.* is no optimizer: give its class, its import path"
    ):
        MegatronStrategy(elementwise_optimizers=[given])
