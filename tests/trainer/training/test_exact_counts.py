"""Counts, masks and targets of a batch are not rounded to the parameters' 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_megatron import LlamaModule, MegatronPrecision, MegatronStrategy
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.testing.trainer import quiet_trainer

KEPT = [32] * 7 + [33]
"""Tokens that count, by row: 257 together, which bf16 does not have."""
PRECISIONS = ["32-true", "bf16-mixed", "bf16-true"]
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2, "vocab_size": 64}


def rows() -> list[dict[str, Tensor]]:
    tokens = [(torch.arange(65) * 3 + number) % 64 for number in range(len(KEPT))]
    masks = [(torch.arange(64) < kept).float() for kept in KEPT]
    return [{"tokens": t[:-1], "labels": t[1:], "loss_mask": mask} for t, mask in zip(tokens, masks, strict=True)]


class Counting(LlamaModule):
    """The step of docs/batches.md."""

    dtype_of_count: torch.dtype | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.token_losses(batch)
        self.right = float(losses.detach()[batch["loss_mask"] > 0].mean())
        mask = batch["loss_mask"]
        return {"loss": (losses * mask).sum(), "num_tokens": mask.sum(dtype=self.dtype_of_count)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.told = float(outputs["num_tokens"]), float(outputs["loss"])


def trained(precision: Any, dtype_of_count: torch.dtype | None = None) -> Counting:
    seed_everything(3, verbose=False)
    module = Counting("llama-tiny", **SIZES)
    module.dtype_of_count = dtype_of_count
    trainer = quiet_trainer(MegatronStrategy(), max_steps=1, precision=precision)
    trainer.fit(module, DataLoader(rows(), batch_size=8))  # type: ignore[arg-type]
    return module


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tokens_of_a_mask_are_counted_exactly(precision: str) -> None:
    module = trained(precision)
    assert module.told == (257.0, pytest.approx(module.right, abs=1e-4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_count_in_half_precision_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(MisconfigurationException, match=rf"'num_tokens': {dtype} rounds large counts: sum the mask in"):
        trained("bf16-mixed", dtype)


class Regression(LightningModule):
    """Layers of torch's and of ours, and one that holds a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.scale = nn.Linear(4, 4), nn.LayerNorm(4), Scale()
        self.last: nn.Module | None = None
        self.seen: list[Any] = []

    def configure_model(self) -> None:
        if self.last is None:
            strategy = self.trainer.strategy
            is_ours = isinstance(strategy, MegatronStrategy)
            self.last = ColumnParallelLinear(4, 1, strategy.mesh) if is_ours else nn.Linear(4, 1)

    def step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.last is not None
        self.seen.append((batch["y"].dtype, batch["y"].flatten().tolist()))
        made = self.last(self.scale(self.norm(self.first(batch["x"]))))
        return nn.functional.mse_loss(made.float(), batch["y"] / 1000)

    training_step = validation_step = step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize("precision", PRECISIONS)
def test_targets_of_a_users_own_keep_their_dtype(precision: Any) -> None:
    data = [{"x": torch.arange(4.0) + number, "y": torch.tensor([1003.0 + number])} for number in range(4)]
    seen = {}
    for name, strategy in {"stock": "auto", "ours": MegatronStrategy()}.items():
        module, loader = Regression(), DataLoader(data, batch_size=2)  # type: ignore[arg-type]
        stock_precision = "32-true" if name == "stock" else precision
        quiet_trainer(strategy, max_epochs=1, precision=stock_precision).fit(module, loader, loader)
        seen[name] = module.seen
        assert not any(layer._forward_pre_hooks for layer in module.modules())
    assert seen["ours"] == seen["stock"]
    assert seen["ours"][0] == (torch.float32, [1003.0, 1004.0])


class Blur(nn.Module):
    """A filter and a counter, without parameters."""

    kernel: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.eye(8))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.total += 257
        return x @ self.kernel


class Keeper(LightningModule):
    """Counts in metrics and in buffers; its layers take what their neighbours made in another dtype."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blur, self.net = Blur(), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        self.count, self.more = SumMetric(), MetricCollection({"sum": SumMetric(), "mean": MeanMetric()})
        self.register_buffer("rows", torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count.update(batch["mask"].sum())
        self.more.update(batch["mask"].sum())
        self.rows += batch["y"].sum(0)
        made: Tensor = self.net(self.blur(self.net[0](batch["x"])))
        return made.float().square().mean()

    def on_train_epoch_end(self) -> None:
        found = {"count": self.count.compute(), **self.more.compute()}
        self.found = [float(value) for value in (*found.values(), self.blur.total, *self.rows)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_metrics_and_buffers_of_a_users_own_count_exactly(precision: Any) -> None:
    rows = [
        {"x": torch.arange(8.0) * n, "y": torch.tensor([1003.0 + n, 2049.0]), "mask": torch.ones(257)} for n in range(6)
    ]
    found = []
    for strategy, how in (("auto", "32-true"), (MegatronStrategy(), precision)):
        module = Keeper()
        trainer = quiet_trainer(strategy, max_epochs=1, precision=how)
        trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
        found.append(module.found)
    exact = 3 if precision == "bf16-true" else None  # there buffers are bf16, as in Lightning
    assert found[1][:exact] == found[0][:exact]


class LearnedLoss(nn.Module):
    """Weighs a loss that torch computes in one dtype only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[Any] = []

    def forward(self, made: Tensor, target: Tensor) -> Tensor:
        self.seen.append((target.dtype, target.flatten().tolist()))
        return self.weight * nn.functional.huber_loss(made, target) / 1000


class Product(nn.Module):
    """Multiplies without a layer of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return torch.einsum("bi,ij->bj", x, self.weight)


class Twice(ColumnParallelLinear):
    """A child of a layer of ours."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Learner(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.loss = nn.Sequential(Product(), nn.Linear(4, 4)), LearnedLoss()  # type: ignore[assignment]

    def configure_model(self) -> None:
        super().configure_model()
        if isinstance(self.trainer.strategy, MegatronStrategy):
            self.last = Twice(4, 1, self.trainer.strategy.mesh)

    def step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.last is not None
        made = self.last(self.norm(self.first(batch["x"])).float())
        loss = self.loss(made=made, target=batch["y"])
        assert torch.is_autocast_enabled(self.device.type) == (self.trainer.precision == "bf16-mixed")
        self.value = float(loss.detach())
        return loss

    training_step = validation_step = step


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_learned_loss_sees_targets_as_they_are(precision: Any) -> None:
    data = [{"x": torch.arange(4.0) + number, "y": torch.tensor([1003.0 + number])} for number in range(4)]
    seen = []
    for strategy, how in (("auto", "32-true"), (MegatronStrategy(), precision)):
        module, loader = Learner(), DataLoader(data, batch_size=2)  # type: ignore[arg-type]
        quiet_trainer(strategy, max_epochs=1, precision=how).fit(module, loader)
        seen.append((module.loss.seen, module.value))
    assert seen[1][0] == seen[0][0]
    assert seen[1][1] == pytest.approx(seen[0][1], rel=2**-7)


def test_autocast_ends_where_a_layer_of_the_users_own_raises() -> None:
    module = nn.ModuleList([LearnedLoss(), LearnedLoss()])
    precision = MegatronPrecision("bf16-true")
    precision.convert_module(module)
    with pytest.raises(RuntimeError, match="size"):
        module[0](torch.ones(3), torch.ones(2))
    assert module[0].seen[0][0] == torch.float32  # type: ignore[index]
    assert not torch.is_autocast_enabled("cpu")
    precision.teardown()
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in module)


class Late(LightningModule):
    """Makes what counts in configure_model, and one metric under two names."""

    rows: Tensor

    def configure_model(self) -> None:
        self.net, self.count = nn.Linear(8, 1), SumMetric()
        self.same = self.count
        self.register_buffer("rows", torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count.update(batch.sum())
        self.rows += batch.sum()
        self.found = self.count.compute(), self.count.sum_value, self.rows
        return self.net(batch).float().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_counts_has_lightnings_dtype_where_configure_model_makes_it(precision: Any) -> None:
    found = []
    for strategy in ("auto", MegatronStrategy()):
        module, data = Late(), DataLoader(torch.full((6, 8), 257.0), batch_size=2)  # type: ignore[arg-type]
        quiet_trainer(strategy, max_epochs=1, precision=precision).fit(module, data)
        found.append([(value.dtype, value.tolist()) for value in module.found])
    if precision == "bf16-true":
        found = [[dtype for dtype, _ in values] for values in found]  # a batch keeps its dtype with us
    assert found[1] == found[0]


class Uncastable(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            raise RuntimeError("no cast of this")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_cast_that_fails_leaves_metrics_where_they_are() -> None:
    module = nn.ModuleDict({"count": SumMetric(), "net": nn.Linear(2, 2)})
    module["net"].weight = nn.Parameter(torch.ones(2, 2).as_subclass(Uncastable))
    with pytest.raises(RuntimeError, match="no cast of this"):
        MegatronPrecision("bf16-true").convert_module(module)
    assert isinstance(module["count"], SumMetric)
