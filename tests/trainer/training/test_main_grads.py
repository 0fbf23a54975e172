"""Gradients accumulated in bf16 (``main_grads_dtype``), held against sums in fp32 and against Intel's rule of 256."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import ColumnParallelLinear, ConfigError, LlamaModule, MegatronStrategy
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

Ranks = Callable[..., list[Any]]


class Ones(LightningModule):
    """One weight of zero, whose gradient in each of ``n`` micro-batches is ``1 / n``; SGD with a rate of 1."""

    def configure_model(self) -> None:
        self.layer = ColumnParallelLinear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def weight_after_a_step(micro_batches: int, main_grads_dtype: Any) -> float:
    module = Ones()
    trainer = quiet_trainer(
        MegatronStrategy(micro_batch_size=1, main_grads_dtype=main_grads_dtype), precision="bf16-mixed", max_steps=1
    )
    ones = torch.ones(micro_batches, 1, 1)
    trainer.fit(module, DataLoader(ones, batch_size=micro_batches))  # type: ignore[arg-type]
    (weight,) = trainer.strategy.main_state_dict().values()  # type: ignore[attr-defined]
    return weight.item()


@pytest.mark.parametrize(
    ("micro_batches", "dtype", "expected"),
    [
        (256, "bf16", -1.0),
        (512, "bf16", -0.5),  # 256/512 + 1/512 is 256/512 in bf16
        (512, "auto", -1.0),
        (512, None, -1.0),
    ],
)
def test_bf16_adds_up_256_equal_gradients_and_no_more(micro_batches: int, dtype: str | None, expected: float) -> None:
    assert weight_after_a_step(micro_batches, dtype) == expected


def tiny(kind: type[LlamaModule] = LlamaModule) -> LlamaModule:
    torch.manual_seed(0)
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50, "vocab_multiple": 1}
    return kind("llama-tiny", num_query_groups=2, ffn_hidden_size=48, head_dim=8, **shape)


class Halved(LlamaModule):
    """Halves gradients in place in a hook."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)


def train(module: LightningModule, grads: str | None, **layout: Any) -> tuple[list[float], list[float], set[Any]]:
    tokens = torch.randint(50, (24, 9), generator=torch.Generator().manual_seed(2))
    samples = [{"tokens": t[:-1], "labels": t[1:], "loss_mask": torch.ones(8)} for t in tokens]
    recorder, replicas = Recorder(), 4 // layout.pop("batch", 4)
    strategy = MegatronStrategy(micro_batch_size=1, main_grads_dtype=grads, **layout)  # type: ignore[arg-type]
    trainer = quiet_trainer(strategy, precision="bf16-mixed", max_epochs=1, logger=recorder, gradient_clip_val=0.5)
    trainer.fit(module, DataLoader(samples, batch_size=4 // replicas))  # type: ignore[arg-type]
    (sharded,) = strategy.sharded_optimizers
    dtypes = {buffer.grads.dtype for buffer in sharded.buffers} | {main.dtype for main in sharded.main_params}
    return recorder.series("train_loss"), recorder.series("grad_norm"), dtypes


LAYOUTS = [
    (1, {}),
    (2, {"batch": 2}),
    (2, {"batch": 2, "distributed_optimizer": False}),
    (2, {"tp": 2}),
    (2, {"pp": 2}),
]


def narrow_and_wide(layout: dict[str, Any]) -> list[tuple[list[float], list[float], set[Any]]]:
    return [train(tiny(), grads, **layout) for grads in ("bf16", None)]


@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=["one", "dp", "dp-whole", "tp", "pp"])
def test_losses_and_norms_are_those_of_fp32_sums_within_bf16(ranks: Ranks, size: int, layout: dict[str, Any]) -> None:
    (losses, norms, dtypes), (wide, wide_norms, _) = ranks(size, narrow_and_wide, layout)[-1]
    assert dtypes == {torch.bfloat16, torch.float32}
    assert losses == pytest.approx(wide, rel=2e-3)
    assert norms == pytest.approx(wide_norms, rel=2e-2)  # 2^-8 for each of four roundings
    assert norms != wide_norms


def test_edits_in_hooks_count() -> None:
    """The norm of the first step's gradient, which hooks have halved in place."""
    _, norms, _ = train(tiny(), "bf16")
    _, halved, _ = train(tiny(Halved), "bf16")
    assert halved[0] == pytest.approx(norms[0] / 2, rel=1e-6)


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", "bf16"), ("32-true", "auto")])
def test_only_bf16_parameters_have_gradients_in_bf16(precision: Any, dtype: Any) -> None:
    trainer = quiet_trainer(MegatronStrategy(main_grads_dtype=dtype), precision=precision, max_steps=1)
    with pytest.raises(ConfigError, match="gradients of float32 parameters are not accumulated in bf16"):
        trainer.fit(tiny(), [])
