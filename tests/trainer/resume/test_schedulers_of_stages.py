"""Settings by group in a pipeline, through checkpoints: held against torch's schedulers over all groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CyclicLR, ExponentialLR, LambdaLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.lightning.run_state.scheduler_groups import SchedulerStates
from lightning_megatron.optim.lr_schedule import LRSchedule, MegatronLR, WDSchedule
from lightning_megatron.testing.trainer import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint", "ignore:Detected call of")
Ranks = Callable[..., list[Any]]
TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 8,
    "tie_embeddings": False,
}
ROWS = [{"tokens": torch.arange(4) + shift, "labels": torch.arange(4) + shift + 1} for shift in range(8)]
RATES = {"embedding": 0.01, "layers.0": 0.02, "layers.1": 0.04, "": 0.08}


def rate_of(name: str) -> float:
    return next(rate for part, rate in RATES.items() if part in name)


class Power:
    """A factor with a state of its own, which torch saves."""

    def __init__(self, base: float) -> None:
        self.base, self.calls = base, 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return self.base**self.calls


class Rising(LambdaLR):
    """A user's scheduler that keeps the rates of the groups under a name of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.at_first = tuple(group["lr"] for group in optimizer.param_groups)
        super().__init__(optimizer, lambda step: 1.0)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate * (1 + self.last_epoch) for rate in self.at_first]


def schedule(kind: str, optimizer: Optimizer) -> Any:
    rates = [group["lr"] for group in optimizer.param_groups]
    if kind == "lambdas":
        return LambdaLR(optimizer, [Power(1 - rate) for rate in rates])
    if kind == "sequence":
        parts = [LinearLR(optimizer, 0.5, total_iters=2), ExponentialLR(optimizer, 0.9)]
        return SequentialLR(optimizer, parts, milestones=[3])
    if kind == "cycle":
        return CyclicLR(optimizer, rates, [3 * rate for rate in rates], step_size_up=2, cycle_momentum=False)
    if kind == "megatron":
        return MegatronLR(optimizer, LRSchedule(0.08, decay=9), WDSchedule(0.1, 1.0, 9, "linear"))
    return Rising(optimizer)


def grouped(named: dict[str, nn.Parameter]) -> SGD:
    groups: dict[float, list[nn.Parameter]] = {}
    for name, param in named.items():
        groups.setdefault(rate_of(name), []).append(param)
    return SGD([{"params": own, "lr": rate, "weight_decay": 2 * rate} for rate, own in groups.items()])


class Layerwise(GPTModule):
    def __init__(self, kind: str) -> None:
        super().__init__(TINY)
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = grouped(dict(self.named_parameters()))
        return [optimizer], [{"scheduler": schedule(self.kind, optimizer), "interval": "step"}]

    def on_train_end(self) -> None:
        names = {id(param): name for name, param in self.named_parameters()}
        (optimizer,), (config,) = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        pairs = zip(optimizer.param_groups, config.scheduler.get_last_lr(), strict=True)
        self.seen = {
            names[id(param)]: (group["lr"], group["weight_decay"], float(last))
            for group, last in pairs
            for param in group["params"]
        }


Seen = dict[str, tuple[float, float, float]]


def train(kind: str, pp: int, steps: int, ckpt_path: Path | None, save: Path | None, one_file: bool = False) -> Seen:
    """Rate, weight decay and the scheduler's last rate of each parameter of this rank, after the last step."""
    seed_everything(1, verbose=False)
    strategy = MegatronStrategy(pp=pp, save_distributed_checkpoint=not one_file)
    trainer = quiet_trainer(strategy, max_steps=steps, limit_val_batches=0)
    module = Layerwise(kind)
    trainer.fit(module, DataLoader(ROWS), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    if save is not None:
        trainer.save_checkpoint(save)
    return module.seen


def train_twice(kind: str, path: Path) -> Seen:
    train(kind, 2, 2, None, path)
    return train(kind, 2, 5, path, None)


def expected(kind: str, steps: int, names: Any) -> Seen:
    """The same of torch alone: one process, all groups."""
    params = {name: nn.Parameter(torch.zeros(1)) for name in sorted(names, key=lambda name: rate_of(name))}
    optimizer = grouped(params)
    scheduler = schedule(kind, optimizer)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    parts = zip(RATES.values(), optimizer.param_groups, scheduler.get_last_lr(), strict=True)
    by_rate = {rate: (group["lr"], group["weight_decay"], last) for rate, group, last in parts}
    return {name: by_rate[rate_of(name)] for name in names}


def assert_right(kind: str, seen: list[Seen]) -> None:
    for own in seen:
        right = expected(kind, 5, [name for part in seen for name in part])
        for name, values in own.items():
            assert values == pytest.approx(right[name], rel=1e-9), name


@pytest.mark.parametrize("kind", ["lambdas", "sequence", "cycle", "megatron", "own"])
def test_schedulers_go_on_with_each_groups_own_values(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    two = ranks(2, train_twice, kind, tmp_path / "of two")
    assert_right(kind, two)
    one = train(kind, 1, 5, tmp_path / "of two", None)
    assert_right(kind, [one])
    assert one.keys() == two[0].keys() | two[1].keys()


@pytest.mark.parametrize("kind", ["lambdas", "sequence"])
def test_stages_take_their_groups_from_one_process(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    train(kind, 1, 2, None, tmp_path / "of one")
    assert_right(kind, ranks(2, train, kind, 2, 5, tmp_path / "of one", None))


def test_the_one_file_of_a_pipeline_has_lists_of_all_groups(ranks: Ranks, tmp_path: Path) -> None:
    """The state is what torch's scheduler loads in one process."""
    ranks(2, train, "cycle", 2, 2, None, tmp_path / "a.ckpt", True)
    content = torch.load(tmp_path / "a.ckpt", weights_only=False)
    state, groups = content["lr_schedulers"][0], content["optimizer_states"][0]["param_groups"]
    assert state["base_lrs"] == list(RATES.values())
    assert state["max_lrs"] == pytest.approx([3 * rate for rate in RATES.values()])
    assert [group["lr"] for group in groups] == state["_last_lr"]
    assert not any(name.startswith("lr_schedulers") for group in groups for name in group)


def test_a_group_without_parameters_is_known_by_its_number() -> None:
    """Rank 0 reports the rates of its groups, of which some may have parameters on other stages alone."""
    optimizer = SGD([{"params": [], "lr": 1.0}, {"params": [nn.Parameter(torch.zeros(1))], "lr": 2.0}])
    config: Any = type("Config", (), {"scheduler": ExponentialLR(optimizer, 0.5)})
    saved = [{"params": ["a"]}, {"params": ["b"]}]
    states = SchedulerStates([config], [{"base_lrs": [3.0, 4.0], "_milestones": [5, 6], "gamma": 0.5}])
    states.regroup(optimizer, saved, [[], ["b"]])
    assert states.states == [{"base_lrs": [3.0, 4.0], "_milestones": [5, 6], "gamma": 0.5}]
    states.regroup(optimizer, saved, [["b"], ["a"]])
    assert states.states == [{"base_lrs": [4.0, 3.0], "_milestones": [5, 6], "gamma": 0.5}]
    states.regroup(optimizer, saved, [["c"], ["a"]])  # a new group has the value of today
    assert states.states[0]["base_lrs"] == [1.0, 4.0]
