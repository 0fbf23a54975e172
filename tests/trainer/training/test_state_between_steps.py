"""An optimizer's state, read and changed between steps: held against stock Lightning, or refused by name."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.device import CPU
from lightning_megatron.optim.state_by_param import StateByParam
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer

pytestmark = pytest.mark.skipif(kind_in_tests() is not CPU, reason="compares with stock Lightning, on the CPU")
Ranks = Callable[..., list[Any]]
Edit = Callable[[Optimizer, list[nn.Parameter]], None]
STEPS, WHEN = 6, 3


class Net(LightningModule):
    """Layers in one buffer: one that is never called, one that is frozen, and a scalar."""

    def __init__(self, optimizer: str, edit: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 2)
        self.unused, self.scale = nn.Linear(2, 2), nn.Parameter(torch.tensor(1.5))
        self.frozen.requires_grad_(False)
        self.optimizer, self.edit = optimizer, edit
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.head(torch.tanh(self.body(self.frozen(batch)))) * self.scale - 1).float().square().mean()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.edit == "reload" or batch_idx == WHEN:
            EDITS[self.edit](self.trainer.optimizers[0], list(self.parameters()))
            self.seen.append(shape_of(self.trainer.optimizers[0].state_dict()))

    def configure_optimizers(self) -> Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: Adam(params, lr=0.02, eps=1e-4),
    "adamw": lambda params: AdamW(params, lr=0.02, weight_decay=0.1, eps=1e-4),
    "rmsprop": lambda params: RMSprop(params, lr=0.02, momentum=0.5),
    "adagrad": lambda params: Adagrad(params, lr=0.1),
}


def shape_of(value: Any) -> Any:
    """The structure of a state, with shapes for tensors."""
    if isinstance(value, dict):
        return {name: shape_of(inner) for name, inner in value.items()}
    return tuple(value.shape) if isinstance(value, Tensor) else value


def zero(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def halve(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    for state in (optimizer.state[param] for param in params if param in optimizer.state):
        state["exp_avg"].mul_(0.5)
        state["exp_avg_sq"] = state["exp_avg_sq"] * 2


def pop_of_some(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    assert optimizer.state.pop(params[3], None)
    del optimizer.state[params[0]]


def first_step_again(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.state[params[3]]["step"].zero_()
    optimizer.state[params[4]]["step"] = torch.tensor(9.0)


def assign(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.state = defaultdict(dict)


def new_entry(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.state[params[3]] = {"momentum_buffer": torch.ones_like(params[3])}


def reload(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def load_changed(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][3]
    for state in saved["state"].values():
        state["exp_avg"] += 0.1
    saved["state"][4]["step"] -= 2
    saved["param_groups"][0]["lr"] = 0.01
    optimizer.load_state_dict(saved)


EDITS: dict[str, Edit] = {
    "zero": zero,
    "halve": halve,
    "pop": pop_of_some,
    "first step": first_step_again,
    "clear": lambda optimizer, params: optimizer.state.clear(),
    "assign": assign,
    "new entry": new_entry,
    "reload": reload,
    "load changed": load_changed,
    "nothing": lambda optimizer, params: None,
}


def train(strategy: Any, net: Net, save: Path | None = None, ckpt_path: Path | None = None, **options: Any) -> Net:
    data = torch.randn(4 * STEPS, 4, generator=torch.Generator().manual_seed(3))
    trainer = quiet_trainer(strategy, max_steps=STEPS, use_distributed_sampler=False, **options)
    trainer.fit(net, DataLoader(data, batch_size=4), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    return net


def assert_same(ours: Net, stock: Net) -> None:
    for (name, value), right in zip(ours.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("optimizer", "edit"), [
    *((optimizer, "zero") for optimizer in ("momentum", "adam", "rmsprop", "adagrad")),
    ("adamw", "halve"), ("adamw", "first step"), ("adamw", "assign"), ("adamw", "load changed"), ("adam", "reload"),
    ("momentum", "pop"), ("momentum", "new entry"), ("rmsprop", "clear"),
])  # fmt: skip
def test_changes_of_the_state_count_as_in_stock_lightning(optimizer: str, edit: str) -> None:
    stock, unchanged = train("auto", Net(optimizer, edit)), train("auto", Net(optimizer, "nothing"))
    ours = train(MegatronStrategy(), Net(optimizer, edit))
    assert_same(ours, stock)
    assert ours.seen == stock.seen
    if edit != "reload":
        assert not torch.allclose(stock.body.weight, unchanged.body.weight, atol=1e-4)


def test_state_of_higher_precision_than_its_parameters_is_not_rounded() -> None:
    """A load of the state itself changes no bit, though torch casts what it loads to the parameters' bf16."""
    plain = train(MegatronStrategy(), Net("adam", "nothing"), precision="bf16-mixed")
    loaded = train(MegatronStrategy(), Net("adam", "reload"), precision="bf16-mixed")
    for value, right in zip(loaded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(value, right)
    assert loaded.seen


class LoadsFirst(Net):
    """Loads a state of its own in the first hook of a training."""

    def __init__(self, optimizer: str, state: dict[str, Any]) -> None:
        super().__init__(optimizer, "nothing")
        self.state = state

    def on_train_start(self) -> None:
        self.trainer.optimizers[0].load_state_dict(copy.deepcopy(self.state))


def state_after(optimizer: str) -> dict[str, Any]:
    """The state that a training of stock Lightning leaves."""
    net, found = Net(optimizer, "nothing"), list[Any]()
    net.on_train_end = lambda: found.append(copy.deepcopy(net.trainer.optimizers[0].state_dict()))  # type: ignore[method-assign]
    train("auto", net)
    state: dict[str, Any] = found[0]
    return state


def loads_first(layout: dict[str, Any], optimizer: str, state: dict[str, Any]) -> dict[str, Tensor]:
    net = train(MegatronStrategy(**layout), LoadsFirst(optimizer, state))
    return {name: value.detach().clone() for name, value in net.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_a_state_that_is_loaded_before_the_first_step_counts(ranks: Ranks, optimizer: str) -> None:
    """Against stock, on one process and on two replicas with all of the state."""
    state = state_after(optimizer)
    stock, plain = train("auto", LoadsFirst(optimizer, state)), train("auto", Net(optimizer, "nothing"))
    right = {name: value.detach() for name, value in stock.named_parameters()}
    alone, on_two = loads_first({}, optimizer, state), {"distributed_optimizer": False}
    for weights in (alone, *ranks(2, loads_first, on_two, optimizer, state)):
        torch.testing.assert_close(weights, right, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(stock.body.weight, plain.body.weight, atol=1e-4)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_it_counts_more_than_the_state_of_a_checkpoint(tmp_path: Path) -> None:
    """Against stock, in runs that see the same batch in each step."""
    state, data, made = state_after("adam"), DataLoader(torch.ones(4 * STEPS, 4), 4), []  # type: ignore[arg-type, var-annotated]
    for path, strategies in (tmp_path / "a", ["auto"] * 2), (tmp_path / "b", [MegatronStrategy(), MegatronStrategy()]):
        saving, goes_on = (quiet_trainer(each, max_steps=n) for each, n in zip(strategies, (WHEN, STEPS), strict=True))
        saving.fit(Net("adam", "nothing"), data)
        saving.save_checkpoint(path)
        made.append(LoadsFirst("adam", state))
        goes_on.fit(made[-1], data, ckpt_path=path)
    assert_same(made[1], made[0])


class Saves(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == WHEN and self.path is not None:
            self.trainer.optimizers[0].state[self.body.weight]["step"] += 5  # after the step, before the save
            self.trainer.optimizers[0].state.pop(self.head.bias)
            self.trainer.save_checkpoint(self.path)

    path: Path | None = None


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_changes_are_in_the_next_checkpoint(tmp_path: Path) -> None:
    """Each step sees the same batch, so that a resumed run ends where the uninterrupted one does."""
    whole, rest = Saves("adam", "nothing"), Saves("adam", "nothing")
    whole.path = tmp_path / "a"
    data: Any = DataLoader([torch.ones(4)] * 3 * STEPS, batch_size=3)  # type: ignore[arg-type]
    quiet_trainer(MegatronStrategy(), max_steps=STEPS).fit(whole, data)
    quiet_trainer(MegatronStrategy(), max_steps=STEPS).fit(rest, data, ckpt_path=tmp_path / "a")
    assert_same(rest, whole)


def on_two_ranks(layout: dict[str, Any], edit: str) -> dict[str, Tensor] | str:
    """Weights after the last step, or the error."""
    try:
        net = train(MegatronStrategy(**layout), Net("adam", edit))
    except RuntimeError as error:
        return str(error)
    return {name: value.detach().clone() for name, value in net.named_parameters()}


def test_replicas_that_share_no_state_follow_changes(ranks: Ranks) -> None:
    stock = dict(train("auto", Net("adam", "load changed")).named_parameters())
    for weights in ranks(2, on_two_ranks, {"distributed_optimizer": False}, "load changed"):
        for name, value in weights.items():
            torch.testing.assert_close(value, stock[name].detach(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("edit", "name"), [
    ("first step", "body.weight"), ("pop", "body.weight"), ("zero", "unused.bias"), ("load changed", "unused.bias"),
])  # fmt: skip
def test_shared_state_is_refused_by_name(ranks: Ranks, edit: str, name: str) -> None:
    """By the name of the parameter that is asked for; without one, by that of the first in the buffers."""
    for error in ranks(2, on_two_ranks, {}, edit):
        assert f"2 ranks share the state of {name!r}, and none has all of it" in error
        assert "distributed_optimizer=False" in error


def settings_on_two_ranks() -> float:
    net = Net("adam", "nothing")
    found: list[Any] = []
    net.on_train_batch_end = lambda *_: found.append(net.trainer.optimizers[0].state_dict())  # type: ignore[method-assign]
    train(MegatronStrategy(), net)
    with pytest.raises(RuntimeError, match="2 ranks share the state"):
        len(found[0]["state"])
    return float(found[0]["param_groups"][0]["lr"])


def test_settings_of_groups_can_be_read_where_state_is_shared(ranks: Ranks) -> None:
    assert ranks(2, settings_on_two_ranks) == [0.02, 0.02]


class Decoder(GPTModule):
    shapes: list[Any]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == WHEN:
            optimizer = self.trainer.optimizers[0]
            self.shapes = [
                tuple(optimizer.state[param]["exp_avg"].shape) == tuple(param.shape) for param in self.parameters()
            ]
            zero(optimizer, [])


TINY = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}


def decoder_losses(tp: int) -> list[float]:
    torch.manual_seed(1)
    module = Decoder(TINY | {"max_position_embeddings": 8}, lr=0.05)
    losses: list[float] = []
    module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))  # type: ignore[method-assign]
    rows = [{"tokens": torch.arange(4), "labels": torch.arange(4) + 1}] * STEPS
    quiet_trainer(MegatronStrategy(tp=tp), max_steps=STEPS, limit_val_batches=0).fit(module, DataLoader(rows))  # type: ignore[arg-type]
    assert all(module.shapes)
    return losses


def test_tensor_parallel_ranks_have_the_state_of_their_slices(ranks: Ranks) -> None:
    right = decoder_losses(1)
    for losses in ranks(2, decoder_losses, 2):
        assert losses == pytest.approx(right, rel=1e-4)


def test_where_nobody_looks_nothing_is_built() -> None:
    net = Net("adam", "nothing")
    built: list[bool] = []

    def look(*_: Any) -> None:
        state = net.trainer.optimizers[0].state
        assert isinstance(state, StateByParam)
        built.append(state.entries is not None)

    net.on_train_batch_end = look  # type: ignore[method-assign, assignment]
    train(MegatronStrategy(), net)
    assert built == [False] * STEPS
