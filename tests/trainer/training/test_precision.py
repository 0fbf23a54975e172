"""Effects of ``Trainer(precision=...)``: dtypes of parameters, main parameters and gradients, and skipped steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fp16 import a_device_that_trains_fp16
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, LlamaModule, MegatronPrecision, MegatronStrategy
from lightning_megatron.device import hpu_available
from lightning_megatron.lightning.step.precision import MODES
from lightning_megatron.optim.loss_scale import DynamicLossScale
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

Ranks = Callable[..., list[Any]]


def tiny(**options: Any) -> LlamaModule:
    torch.manual_seed(0)
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50, "vocab_multiple": 1}
    return LlamaModule("llama-tiny", num_query_groups=2, ffn_hidden_size=48, head_dim=8, **shape | options)


def texts(count: int = 8) -> DataLoader[Any]:
    tokens = torch.randint(50, (count, 9), generator=torch.Generator().manual_seed(2))
    samples = [{"tokens": t[:-1], "labels": t[1:], "loss_mask": torch.ones(8)} for t in tokens]
    return DataLoader(samples, batch_size=2)  # type: ignore[arg-type]


def fit(precision: str, module: LightningModule, batches: Any, **options: Any) -> tuple[Trainer, Recorder]:
    recorder = Recorder()
    strategy = options.pop("strategy", None) or MegatronStrategy()
    trainer = quiet_trainer(strategy, precision=precision, max_epochs=1, logger=recorder, **options)
    trainer.fit(module, batches)
    return trainer, recorder


@pytest.mark.parametrize(
    ("precision", "params", "main", "grads"),
    [
        ("32-true", torch.float32, torch.float32, torch.float32),
        ("bf16-mixed", torch.bfloat16, torch.float32, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtypes(precision: str, params: torch.dtype, main: torch.dtype, grads: torch.dtype) -> None:
    module = tiny()
    trainer, recorder = fit(precision, module, texts(), strategy=MegatronStrategy(micro_batch_size=1))
    assert trainer.precision == precision
    assert {p.dtype for p in module.parameters()} == {params}
    strategy = trainer.strategy
    assert isinstance(strategy, MegatronStrategy)
    (sharded,) = strategy.sharded_optimizers
    assert {p.dtype for p in sharded.main_params} == {main}
    assert {buffer.grads.dtype for buffer in sharded.buffers} == {grads}
    assert {v.dtype for s in sharded.optimizer.state.values() for n, v in s.items() if n != "step"} == {main}
    losses = recorder.series("train_loss")
    assert len(losses) == 4
    assert all(3 < loss < 5 for loss in losses)  # about ln 50


def test_the_biases_of_experts_stay_fp32() -> None:
    """They move by steps of 0.001, which bf16 rounds away from a bias of 1."""
    experts = {"num_experts": 4, "moe_router_score": "sigmoid", "moe_expert_bias_update_rate": 0.001}
    module = tiny(**experts)
    module.configure_model()
    assert module.model is not None
    router = module.model.layers["0"].mlp.router
    router.expert_bias.fill_(1.001)
    MegatronPrecision("bf16-mixed").convert_module(module)
    assert router.weight.dtype == torch.bfloat16
    assert router.expert_bias.dtype == torch.float32
    assert torch.equal(router.expert_bias, torch.full((4,), 1.001))
    assert "expert_bias" in dict(router.named_buffers())

    fit("bf16-mixed", module, texts())
    router = module.model.layers["0"].mlp.router
    moved = (router.expert_bias - 1.001).abs()
    assert moved.max() > 0
    assert torch.allclose(moved, (moved / 0.001).round() * 0.001, atol=1e-6), "whole steps, none of them rounded"


def test_bf16_mixed_follows_fp32() -> None:
    _, exact = fit("32-true", tiny(lr=1e-3), texts(64))
    _, mixed = fit("bf16-mixed", tiny(lr=1e-3), texts(64))
    assert mixed.series("train_loss") == pytest.approx(exact.series("train_loss"), rel=2**-7)  # bf16's own precision


class Creeps(LightningModule):
    """One parameter at 1 whose gradient is 1: SGD takes 1e-5 from it in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch.mean()).float()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-5)


@pytest.mark.parametrize(("precision", "moved"), [("bf16-mixed", True), ("bf16-true", False), ("32-true", True)])
def test_a_thousand_small_updates_need_fp32_main_parameters(precision: str, moved: bool) -> None:
    module = Creeps()
    batches = DataLoader(torch.ones(1000, 1), batch_size=1)  # type: ignore[arg-type]
    trainer, _ = fit(precision, module, batches, log_every_n_steps=10_000)
    assert trainer.global_step == 1000
    # 0.99; the nearest in bf16, whose step there is 2^-8, is 0.98828125 or 0.9921875
    assert float(module.weight) == pytest.approx(0.99 if moved else 1.0, abs=0.0025 if precision != "bf16-true" else 0)


# What is refused


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        ("16-true", "precision='16-true': fp16 without fp32 main parameters does not train: use '16-mixed'"),
        (
            "64-true",
            "precision='64-true': hpu has no double precision"
            if hpu_available()
            else "precision='64-true': this package's norms, attention and losses compute in fp32",
        ),
    ],
)
def test_precisions_that_cannot_work_are_refused_by_the_flag(precision: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        fit(precision, tiny(), texts())
    assert text in str(error.value)


def test_fp16_on_a_cpu_is_refused_as_a_plugin_and_replaced_by_lightning_as_a_flag() -> None:
    text = "precision='16-mixed': half precision with a loss scale is not for cpu; nearest valid: bf16-mixed, 32-true"
    with pytest.raises(ConfigError, match=text):
        quiet_trainer(MegatronStrategy(), accelerator="cpu", plugins=[MegatronPrecision("16-mixed")])
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        trainer = quiet_trainer(MegatronStrategy(), accelerator="cpu", precision="16-mixed")
    assert trainer.precision == "bf16-mixed"


@pytest.mark.parametrize("name", ["16-true", "transformer-engine", "bf16"])
def test_the_plugin_knows_five_precisions(name: str) -> None:
    with pytest.raises(ConfigError, match=f"precision='{name}'"):
        MegatronPrecision(name)


def test_a_foreign_plugin_is_refused_and_lightnings_own_are_translated() -> None:
    class Foreign(MixedPrecision):
        pass

    with pytest.raises(ConfigError, match="plugins='Foreign': the strategy decides dtypes itself"):
        quiet_trainer(MegatronStrategy(), plugins=[Foreign("bf16-mixed", "cpu")])
    for plugin, name in (
        *(() if hpu_available() else ((DoublePrecision(), "64-true"),)),
        (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed"),
        (HalfPrecision("bf16-true"), "bf16-true"),
    ):
        assert quiet_trainer(MegatronStrategy(), plugins=[plugin]).precision == name
    assert quiet_trainer(MegatronStrategy(), plugins=[MegatronPrecision("bf16-true")]).precision == "bf16-true"
    assert quiet_trainer(MegatronStrategy(precision_plugin=MegatronPrecision("bf16-mixed"))).precision == "bf16-mixed"


class OpenGate:
    def admits(self, overflow: bool) -> bool:
        return True


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_state_set_before_the_trainer_assigns_a_precision_is_kept(precision: Any) -> None:
    strategy, gate = MegatronStrategy(), OpenGate()
    plugin = strategy.precision_plugin
    assert strategy.precision_plugin is plugin
    plugin.step_gate = gate
    trainer = quiet_trainer(strategy, precision=precision)
    assert trainer.precision_plugin is plugin
    assert plugin.step_gate is gate
    assert (trainer.precision, plugin.mode) == (precision, MODES[precision])


def test_a_flag_and_a_plugin_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match=r"precision"):
        quiet_trainer(MegatronStrategy(), precision="bf16-true", plugins=[MegatronPrecision("bf16-mixed")])


# fp16 with a loss scale. No CPU trains it: where there is no accelerator, the CPU passes for a device that does.


class Overflows(LightningModule):
    """Its gradient overflows in batches that hold an infinity, on the rank that reads them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.weights: list[Tensor] = []
        self.scales: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).float().square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append(self.layer.weight.detach().cpu().float().clone())
        self.scales.append(self.trainer.precision_plugin.loss_scale.scale)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def train_with_overflow(distributed_optimizer: bool) -> tuple[list[Tensor], list[float], dict[str, Any]]:
    """Six steps of one batch a replica; in the second and third the last replica's batch overflows."""
    module = Overflows()
    plugin = MegatronPrecision("16-mixed", DynamicLossScale(scale=2.0**10, hysteresis=2, growth_interval=3))
    data = torch.ones(6, 3)
    if dist.get_rank() == 1:
        data[1:3] = float("inf")
    with a_device_that_trains_fp16():
        strategy = MegatronStrategy(distributed_optimizer=distributed_optimizer)
        trainer = quiet_trainer(strategy, plugins=[plugin], max_epochs=1, use_distributed_sampler=False)
        trainer.fit(module, DataLoader(data, batch_size=1))  # type: ignore[arg-type]
    return module.weights, module.scales, plugin.state_dict()


@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Ranks, distributed_optimizer: bool) -> None:
    results = ranks(2, train_with_overflow, distributed_optimizer)
    for weights, scales, state in results:
        moved = [not torch.equal(a, b) for a, b in pairwise(weights)]
        assert moved == [False, False, True, True, True]
        # Hysteresis 2: the first overflow is forgiven, the second halves the scale; three good steps double it.
        assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**9, 2.0**9, 2.0**10]
        assert state == {"scale": 2.0**10, "good_steps": 0, "tolerated_overflows": 2}
        assert all(w.isfinite().all() for w in weights)
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))


class SumsTwo(Overflows):
    """The same loss, as a sum over two outputs."""

    sums_over_tokens = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:  # type: ignore[override]
        return {"loss": 2 * super().training_step(batch, batch_idx), "num_tokens": 2}


def test_the_scale_itself_does_not_show_in_the_update_nor_does_a_sum() -> None:
    def trained(scale: float, kind: type[Overflows] = Overflows) -> Tensor:
        module = kind()
        plugin = MegatronPrecision("16-mixed", DynamicLossScale(scale=scale))
        with a_device_that_trains_fp16():
            trainer = quiet_trainer(MegatronStrategy(), plugins=[plugin], max_epochs=1, gradient_clip_val=0.5)
            trainer.fit(module, DataLoader(torch.ones(4, 3), batch_size=1))  # type: ignore[arg-type]
        return module.weights[-1]

    assert torch.equal(trained(1.0), trained(2.0**8))
    assert torch.equal(trained(2.0**8, SumsTwo), trained(2.0**8))


def test_the_loss_scale_rides_in_checkpoints(tmp_path: Path) -> None:
    plugin = MegatronPrecision("16-mixed", DynamicLossScale(scale=2.0**12, hysteresis=2))
    assert plugin.loss_scale is not None
    plugin.loss_scale.update(True)
    plugin.loss_scale.update(True)
    again = MegatronPrecision("16-mixed")
    again.load_state_dict(torch.load(_written(plugin.state_dict(), tmp_path / "state.pt"), weights_only=True))
    assert again.state_dict() == plugin.state_dict() == {"scale": 2.0**11, "good_steps": 0, "tolerated_overflows": 0}
    assert MegatronPrecision("32-true").state_dict() == {}


def _written(state: dict[str, Any], path: Path) -> Path:
    torch.save(state, path)
    return path
