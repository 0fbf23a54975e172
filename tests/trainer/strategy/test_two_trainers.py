"""One module in several Trainers, one after the other: each in a layout of its own, or says at once that it cannot."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron import ColumnParallelLinear, ConfigError, LlamaModule, MegatronStrategy, RowParallelLinear
from lightning_megatron.device import CPU
from lightning_megatron.lightning.build import placement
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer
from tests.tiny import tiny_llama

Options = Mapping[str, Any]
TP, DP, PP, STOCK = {"tp": 2}, {"dp": 2}, {"pp": 2, "micro_batch_size": 2}, {"stock": True}
# Lightning's own strategies stay on the CPU, for which a model that was built for HPUs has not chosen its ops.
LAST: list[dict[str, Any]] = [] if kind_in_tests() is not CPU else [STOCK]
only_on_cpus = pytest.mark.skipif(kind_in_tests() is not CPU, reason="Lightning's own strategies stay on the CPU")
ZERO_BUBBLE = {**PP, "pipeline_schedule": "zero-bubble"}


def rows() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(40, (16, 9), generator=torch.Generator().manual_seed(3))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def shared_out(replicas: int) -> Any:
    """Batches of four over all replicas, in one order for any number of them."""
    place = dist.get_rank() if replicas > 1 else 0
    sampler: Any = DistributedSampler(rows(), replicas, place, shuffle=False)  # type: ignore[arg-type]
    return DataLoader(rows(), batch_size=4 // replicas, sampler=sampler)  # type: ignore[arg-type]


class Changed(LlamaModule):
    """A module that was told once that a layer does not learn, and has a parameter beside its model."""

    def configure_model(self) -> None:
        is_first = self.model is None
        super().configure_model()
        if is_first:
            self.scale = nn.Parameter(torch.ones(()))
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("layers.1.attention" not in name)

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(batch) * self.scale


def in_turn(layouts: Sequence[Options], changed: bool = False) -> list[float]:
    """One module that each layout trains for two steps and then tests: all losses. Lightning's own only tests."""
    seed_everything(3, verbose=False)
    module = (Changed if changed else LlamaModule)(tiny_llama(), lr=1e-2)
    found: list[float] = []
    for layout in layouts:
        options, recorder = dict(layout), Recorder()
        batches = shared_out(options.pop("dp", 1))
        is_stock = options.pop("stock", False)
        strategy: Any = "auto" if is_stock else MegatronStrategy(**options)
        own = {"devices": 1} if is_stock else {}
        trainer = quiet_trainer(strategy, max_steps=2, logger=recorder, use_distributed_sampler=False, **own)
        if not is_stock:
            trainer.fit(module, batches)
        (tested,) = trainer.test(module, batches, verbose=False)
        found += [*recorder.series("train_loss"), tested["test_loss"]]
    parameters = dict(module.named_parameters())
    assert all(p.requires_grad == ("layers.1.attention" not in name or not changed) for name, p in parameters.items())
    return found


@pytest.fixture(scope="module")
def alone() -> dict[bool, list[float]]:
    """Results of three rounds in one process, and of a test after them."""
    return {changed: in_turn([{}, {}, {}, *LAST], changed) for changed in (False, True)}


@pytest.mark.parametrize(
    "layouts",
    [
        [TP, DP, TP],
        [PP, PP, ZERO_BUBBLE],
        [DP, TP, PP],
        [PP, {**TP, "recompute": "full"}, DP, *LAST],
    ],
    ids=["tp-dp-tp", "pp-pp-zb", "dp-tp-pp", "pp-tp-dp-stock"],
)
def test_a_module_goes_from_trainer_to_trainer(ranks: Any, alone: Any, layouts: list[Options]) -> None:
    changed = layouts[0] is not TP
    for found in ranks(2, in_turn, layouts, changed):
        assert found == pytest.approx(alone[changed][: len(found)], rel=1e-5)


def on_one_rank_only(is_told: Path) -> str:
    """Train on two ranks, then test on the first alone, as one does with layers that are whole."""
    module = LlamaModule(tiny_llama())
    trainer = quiet_trainer(MegatronStrategy(**TP), max_steps=1)
    trainer.fit(module, DataLoader(rows(), batch_size=4))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        with patch.object(placement, "_PATIENCE", timedelta(seconds=1)), pytest.raises(ConfigError) as caught:
            quiet_trainer("auto", devices=1).test(module, DataLoader(rows(), batch_size=4))  # type: ignore[arg-type]
        is_told.touch()
        return str(caught.value)
    while not is_told.exists():
        time.sleep(0.02)
    return ""


def test_weights_that_lie_on_several_ranks_are_not_waited_for_in_vain(ranks: Any, tmp_path: Path) -> None:
    told, _ = ranks(2, on_one_rank_only, tmp_path / "is-told")
    assert "its weights are spread over ranks (tp=2), and all of them must run this Trainer" in told
    assert "rank 1" in told.lower()
    assert "load_from_checkpoint" in told


class Stranger(LightningModule):
    """Parallel layers in a module that derives from nothing of ours."""

    def configure_model(self) -> None:
        if not hasattr(self, "up"):
            mesh = self.trainer.strategy.mesh
            self.up, self.down = ColumnParallelLinear(6, 8, mesh), RowParallelLinear(8, 1, mesh)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(batch).tanh())
        return out

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def of_a_stranger(*layouts: Options) -> tuple[list[float], str]:
    seed_everything(3, verbose=False)
    module, losses = Stranger(), []
    numbers: Any = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for layout in layouts:
        recorder = Recorder()
        trainer = quiet_trainer(MegatronStrategy(**layout), max_steps=2, logger=recorder)
        try:
            trainer.fit(module, DataLoader(numbers, batch_size=4))
        except ConfigError as error:
            return losses, str(error)
        losses += recorder.series("train_loss")
    return losses, ""


def test_other_modules_with_parallel_layers_keep_their_layout(ranks: Any) -> None:
    ((expected, _),) = ranks(1, of_a_stranger, {}, {})
    for losses, told in ranks(2, of_a_stranger, TP, TP, {}):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert "model='Stranger'" in told
        assert "(up, down) were built for an earlier Trainer (tp=2), and this one has dp=2" in told


@only_on_cpus
def test_copies_and_pickles_of_a_fitted_module_stand_alone() -> None:
    module = LlamaModule(tiny_llama())
    batches: Any = DataLoader(rows(), batch_size=4)  # type: ignore[arg-type]
    quiet_trainer(MegatronStrategy(recompute="full"), max_steps=1).fit(module, batches)
    (expected,) = quiet_trainer("auto").test(module, batches, verbose=False)
    assert not isinstance(module.trainer.strategy, MegatronStrategy)
    module.trainer = None
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        for strategy in (MegatronStrategy(), "auto"):
            assert quiet_trainer(strategy).test(other, batches, verbose=False) == [expected]


class Plain(LightningModule):
    """No parallel layers at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    training_step, configure_optimizers = Stranger.training_step, Stranger.configure_optimizers

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(batch)
        return out


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_an_earlier_trainer_that_is_still_there_does_not_disturb(precision: Any) -> None:
    """Its optimizer lets go of the parameters: the numbers are those of stock, but for what bf16 rounds."""
    numbers: Any = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    found = []
    for strategy in (None, MegatronStrategy):
        seed_everything(3, verbose=False)
        module, losses, trainers = Plain(), [], []
        for _ in range(3):
            recorder = Recorder()
            options: Any = {"max_steps": 2, "precision": precision, "logger": recorder}
            trainers.append(quiet_trainer("auto" if strategy is None else strategy(), **options))
            trainers[-1].fit(module, DataLoader(numbers, batch_size=4))
            losses += recorder.series("train_loss")
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-6 if precision == "32-true" else 0.05)


def fewer_devices(launcher: str) -> str:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"LOCAL_RANK": rank}
    if launcher == "torchrun":
        variables |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "1"}
        variables |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    given = {"accelerator": "cpu", "devices": 1, "strategy": "lightning_megatron.MegatronStrategy"}
    trainer = partial(Trainer, **{**given, "strategy": MegatronStrategy()})
    command = partial(LightningCLI, Plain, run=False, args={"trainer": given}, save_config_callback=None)
    with patch.dict("os.environ", variables):
        Trainer(accelerator="cpu", devices=1, logger=False)  # Lightning's own is left alone
        with pytest.raises(ConfigError) as told:
            (command if launcher == "command line" else trainer)()
    return str(told.value)


@only_on_cpus
@pytest.mark.parametrize("launcher", ["lightning", "command line", "torchrun"])
def test_fewer_devices_than_the_processes_of_this_script_are_refused_on_all_ranks(ranks: Any, launcher: str) -> None:
    """Where Lightning or torchrun has started two processes, both run the rest of the script."""
    for told in ranks(2, fewer_devices, launcher):
        assert "that makes 1 ranks, but" in told
        assert "has started 2" in told
