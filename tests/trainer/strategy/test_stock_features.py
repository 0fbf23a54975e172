"""Features that data parallelism shares with DDP: averaging callbacks, synchronized norms, fp64, no optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.nn import all_gather as all_gather_with_gradient
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.device import CUDA
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer


class Toy(LightningModule):
    """A user's module with a batch norm that knows nothing of us."""

    def __init__(self, with_optimizer: bool = True, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.with_optimizer = with_optimizer
        norm = nn.BatchNorm1d(8) if batch_norm else nn.LayerNorm(8)
        self.body = nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.body(x) + torch.zeros(1), y)  # zeros of the default dtype
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        if not self.with_optimizer:
            return None
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Summed(nn.BatchNorm1d):
    """A batch norm over all ranks' samples, which torch's own is on CUDA alone."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and dist.is_initialized():
            x = torch.cat(all_gather_with_gradient(x))
            return super().forward(x).chunk(dist.get_world_size())[dist.get_rank()]
        return super().forward(x)


class SumsBatchNorm(LayerSync):
    def apply(self, model: nn.Module) -> nn.Module:
        return swapped(model, nn.BatchNorm1d, Summed)

    def revert(self, model: nn.Module) -> nn.Module:
        return swapped(model, Summed, nn.BatchNorm1d)


def swapped(model: nn.Module, old: type[nn.Module], new: type[nn.BatchNorm1d]) -> nn.Module:
    """Norms of another class with the same parameters and buffers, put in place as ``SyncBatchNorm`` is."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is old:
                norm = new(child.num_features)
                norm._parameters, norm._buffers = child._parameters, child._buffers
                setattr(parent, name, norm)
    return model


def loader() -> DataLoader[Any]:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader([(row, row.sum().reshape(1).sin()) for row in x], batch_size=4)  # type: ignore[arg-type]


Run = tuple[list[dict[str, float]], dict[str, Tensor], LightningModule]


def fit(ours: bool, module: Toy, ckpt_path: Path | None = None, save_to: Path | None = None, **options: Any) -> Run:
    recorder = Recorder()
    strategy = MegatronStrategy() if ours else DDPStrategy() if dist.is_initialized() else "auto"
    options["use_distributed_sampler"] = dist.is_initialized() and dist.get_world_size() > 1  # DDP shuffles for one
    trainer = quiet_trainer(strategy, **{"max_epochs": 2, "logger": recorder, "accelerator": "cpu", **options})
    trainer.fit(module, loader(), ckpt_path=None if ckpt_path is None else str(ckpt_path))
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return recorder.rows, state, module


def assert_same_runs(ours: Run, theirs: Run, rtol: float = 1e-5) -> None:
    assert len(ours[0]) == len(theirs[0]) > 0
    for mine, its in zip(ours[0], theirs[0], strict=True):
        assert mine == pytest.approx(its, rel=rtol, abs=1e-7)
    assert ours[1].keys() == theirs[1].keys()
    for name, value in theirs[1].items():
        assert ours[1][name].dtype == value.dtype
        torch.testing.assert_close(
            ours[1][name], value, rtol=rtol, atol=1e-6 if value.dtype != torch.float64 else 1e-14
        )


def averaging() -> dict[str, Any]:
    return {"callbacks": [StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=2)], "max_epochs": 4}


def pruning(**options: Any) -> dict[str, Any]:
    # One reset to the first values: in plain Lightning it makes the model share their memory, and trains them.
    options = {"use_lottery_ticket_hypothesis": lambda epoch: epoch == 0, **options}
    return {"callbacks": [ModelPruning("l1_unstructured", amount=0.4, **options)], "max_epochs": 3}


def all_runs(tmp_path: Path) -> dict[str, tuple[Run, Run]]:
    """Ours and DDP's, one pool start for all."""
    runs: dict[str, tuple[Run, Run]] = {}
    both = [fit(ours, Toy(), **averaging()) for ours in (True, False)]
    runs["averaging"] = both[0], both[1]
    both = [fit(ours, Toy(batch_norm=True), **averaging()) for ours in (True, False)]
    runs["averaging, measured again"] = both[0], both[1]
    both = [fit(ours, Toy(batch_norm=True), plugins=[SumsBatchNorm()]) for ours in (True, False)]
    runs["synchronized batch norm"] = both[0], both[1]
    assert not any(isinstance(module, Summed) for module in both[0][2].modules())
    for options in ({}, {"use_lottery_ticket_hypothesis": False}, {"use_global_unstructured": False}):
        both = [fit(ours, Toy(), **pruning(**options)) for ours in (True, False)]
        runs[f"pruning {options}"] = both[0], both[1]
        assert all((value == 0).any() for name, value in both[0][1].items() if name.endswith("0.weight"))
    runs["no optimizer"] = tuple(fit(ours, Toy(with_optimizer=False)) for ours in (True, False))
    for options in ({}, {"gradient_clip_val": 0.01}, {"accumulate_grad_batches": 2}):
        both = [fit(ours, Toy(), precision="64-true", **options) for ours in (True, False)]
        runs[f"fp64 {options}"] = both[0], both[1]
    return runs


@pytest.mark.skipif(kind_in_tests() is CUDA, reason="Lightning's side needs a gloo group alone")
@pytest.mark.parametrize("dp", [1, 2])
def test_data_parallelism_alone_gives_the_numbers_of_ddp(
    ranks: Callable[..., list[Any]], tmp_path: Path, dp: int
) -> None:
    for runs in ranks(dp, all_runs, tmp_path):
        for name, (ours, theirs) in runs.items():
            try:
                assert_same_runs(ours, theirs, rtol=1e-12 if "fp64" in name else 1e-5)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def test_double_precision_computes_in_fp64_and_new_tensors_are() -> None:
    module = Toy()
    fit(True, module, precision="64-true", max_epochs=1)
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert torch.get_default_dtype() == torch.float32


def test_without_an_optimizer_the_step_runs_and_one_warning_says_so() -> None:
    module = Toy(with_optimizer=False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.warns(UserWarning, match="returned `None`, this fit will run with no optimizer"):
        rows, after, _ = fit(True, module, gradient_clip_val=0.1)
    assert len(rows) == 12
    assert all(torch.equal(after[name], value) for name, value in before.items())


class Builds(Toy):
    def configure_model(self) -> None: ...


@pytest.mark.parametrize(
    ("options", "trainer", "module", "text"),
    [
        (
            {"tp": 2},
            {"callbacks": averaging},
            Toy,
            "averages whole models, and here ranks hold parts: use data parallel",
        ),
        ({}, {"callbacks": averaging}, Builds, "copies the module before configure_model has built the model"),
        (
            {"tp": 2},
            {"sync_batchnorm": True},
            Toy,
            "ranks of a model do not hold the same batch norms: use data parallel",
        ),
        ({}, {"sync_batchnorm": True}, Toy, "SyncBatchNorm does not compute on cpu, under DDP neither"),
        ({"tp": 2}, {"precision": "64-true"}, Toy, "parallel layers compute in fp32: use data parallelism alone"),
        ({}, {"precision": "64-true"}, lambda: GPTModule("gpt-tiny"), "norms, attention and losses compute in fp32"),
    ],
)
def test_what_ddp_cannot_do_either_is_refused_before_processes_start(
    options: dict[str, int], trainer: dict[str, Any], module: Callable[[], LightningModule], text: str
) -> None:
    if "callbacks" in trainer:
        trainer = averaging()
    with pytest.raises(ConfigError, match=text):
        Trainer(
            strategy=MegatronStrategy(**options),
            accelerator="cpu",
            devices=options.get("tp", 1),
            logger=False,
            **trainer,
        ).fit(module(), loader())
