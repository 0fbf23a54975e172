"""State of optimizers in a single file of stock Lightning: each parameter gets its own, whatever the groups' order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, seed_everything
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.testing.workers import WorkerError

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint", "ignore:the checkpoint was saved")
ROWS = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
Make = Callable[["Model"], Any]


class Model(LightningModule):
    """Layers of equal shapes, so that the wrong state fits as well."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.make = make

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        made: Tensor = self.head(torch.tanh(self.middle(torch.tanh(self.body(batch)))))
        return (made - 10 * batch).pow(2).mean()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        made: OptimizerLRScheduler = self.make(self)
        return made


class Tied(Model):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.middle.weight = self.head.weight


class ByHand(Model):
    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss


def reverse(model: Model) -> list[nn.Parameter]:
    return list(model.parameters())[::-1]


def half_frozen(model: Model) -> Optimizer:
    model.middle.requires_grad_(False)
    return Adam(reverse(model), 0.01)


def two_groups(model: Model) -> Optimizer:
    rest: dict[str, Any] = {"params": [*model.middle.parameters(), *model.body.parameters()]}
    head: dict[str, Any] = {"params": model.head.parameters(), "lr": 0.03}
    return AdamW([head, rest], 0.01, weight_decay=0.1)


def stepped(model: Model) -> Any:
    optimizer = SGD(reverse(model), 0.05, momentum=0.9)
    return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}]


MADE: dict[str, tuple[type[Model], Make]] = {
    "head first": (Model, lambda m: Adam([*m.head.parameters(), *m.body.parameters(), *m.middle.parameters()], 0.01)),
    "reversed": (Model, lambda m: AdamW(reverse(m), 0.01)),
    "weights first": (Model, lambda m: Adam(sorted(m.parameters(), key=lambda p: -p.dim()), 0.01)),
    "a part": (Model, lambda m: Adam([*m.head.parameters(), *m.body.parameters()], 0.01)),
    "half frozen": (Model, half_frozen),
    "two groups": (Model, two_groups),
    "tied": (Tied, lambda m: Adam(reverse(m), 0.01)),
    "adagrad": (Model, lambda m: Adagrad(reverse(m), 0.1)),
    "momentum with a schedule": (Model, stepped),
    "named": (Model, lambda m: Adam(list(m.named_parameters())[::-1], 0.01)),
    "two optimizers": (ByHand, lambda m: [Adam(m.head.parameters(), 0.01), Adam(reverse(m)[2:], 0.02)]),
}


def fit(name: str, strategy: Any, steps: int, ckpt_path: Path | None = None, make: Make | None = None) -> Any:
    seed_everything(3, verbose=False)
    kind, made = MADE[name]
    model = kind(make or made)
    trainer = quiet_trainer(strategy, max_steps=steps * (1 + (name == "two optimizers")))
    trainer.fit(model, DataLoader(ROWS, batch_size=4), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    return trainer, {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", MADE)
def test_a_run_goes_on_as_in_stock_lightning(tmp_path: Path, name: str) -> None:
    file = tmp_path / "one.ckpt"
    fit(name, "auto", 6)[0].save_checkpoint(file)
    stock, ours = (fit(name, strategy, 9, file)[1] for strategy in ("auto", MegatronStrategy()))
    torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-6)


def test_names_in_a_file_come_before_numbers(tmp_path: Path) -> None:
    """Plain torch ignores them, and would take the state of other parameters."""
    file = tmp_path / "one.ckpt"
    fit("named", "auto", 6)[0].save_checkpoint(file)
    right = fit("named", "auto", 9, file)[1]
    found = fit("named", MegatronStrategy(), 9, file, lambda m: Adam(m.named_parameters(), 0.01))[1]
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


def test_the_files_settings_hold(tmp_path: Path) -> None:
    file = tmp_path / "one.ckpt"
    fit("reversed", "auto", 6)[0].save_checkpoint(file)
    right = fit("reversed", "auto", 9, file)[1]
    with pytest.warns(UserWarning, match=r"its settings replace.*lr 0\.01 \(this run: 0\.05\)"):
        found = fit("reversed", MegatronStrategy(), 9, file, lambda m: AdamW(reverse(m), 0.05))[1]
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_query_groups": 2,
    "vocab_size": 64,
}
ROW = torch.arange(17) * 3 % 64
TOKENS = [{"tokens": (ROW + row)[:-1] % 64, "labels": (ROW * row)[1:] % 64} for row in range(8)]
Ranks = Callable[..., list[Any]]


class Llama(LlamaModule):
    order = "defined"

    def configure_optimizers(self) -> Any:
        params: list[Any] = list(self.named_parameters())
        if self.order == "relative":
            params = [(name.removeprefix("model."), param) for name, param in params]
        params = params if self.order in ("named", "relative") else [param for _, param in params]
        return Adam(params if self.order == "defined" else params[::-1], 0.01)


def llama(strategy: Any, steps: int, order: str, save: Path | None = None, resume: Path | None = None) -> float:
    """Loss of the last step."""
    seed_everything(3, verbose=False)
    model = Llama("llama-tiny", **SIZES)
    model.order = order
    trainer = quiet_trainer(strategy, max_steps=steps, limit_val_batches=0)
    trainer.fit(model, DataLoader(TOKENS, batch_size=4), ckpt_path=resume)  # type: ignore[arg-type]
    if save is not None:
        trainer.save_checkpoint(save)
    return float(trainer.callback_metrics["train_loss"])


def resumed(layout: dict[str, Any], order: str, file: str) -> float:
    return llama(MegatronStrategy(**layout), 7, order, resume=Path(file))


@pytest.mark.parametrize("order", ["defined", "reversed", "named", "relative"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "micro_batch_size": 2}])
def test_in_layouts_and_an_order_that_no_stage_knows(
    ranks: Ranks, tmp_path: Path, layout: dict[str, Any], order: str
) -> None:
    """Names that are not the model's are none."""
    file = tmp_path / "one.ckpt"
    llama("auto", 4, order, save=file)
    if order in ("reversed", "relative") and "pp" in layout:
        with pytest.raises(WorkerError, match="groups list parameters in an order of their own"):
            ranks(2, resumed, layout, order, str(file))
        return
    stock = llama("auto", 7, order, resume=file)
    assert ranks(2, resumed, layout, order, str(file)) == pytest.approx([stock, stock], abs=1e-5)
