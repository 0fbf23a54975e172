"""Checks 39-43, 46, 47, 49 and 50: precision, devices, configurations, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import (
    DP2,
    LAYOUTS,
    ONE,
    PP2,
    TP2PP2,
    Layout,
    Ranks,
    assert_close,
    fit,
    language_model,
    loader,
    on_all,
    trainer_for,
)
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, GPTModule, MegatronHPUStrategy, MegatronPrecision, MegatronStrategy
from lightning_megatron import device as devices
from lightning_megatron.optim.loss_scale import DynamicLossScale
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer

# 39

DTYPES = {
    "32-true": (torch.float32, torch.float32, torch.float32),
    "bf16-mixed": (torch.bfloat16, torch.float32, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
}


def dtypes(layout: Layout, precision: str) -> Any:
    module = language_model()
    trainer, recorder = fit(layout, module, precision=precision, max_steps=2)
    (sharded,) = trainer.strategy.sharded_optimizers  # type: ignore[attr-defined]
    (params,) = {p.dtype for p in module.parameters()}
    (main,) = {p.dtype for p in sharded.main_params}
    (grads,) = {buffer.grads.dtype for buffer in sharded.buffers}
    assert recorder.series("train_loss")[0] == pytest.approx(3.5, abs=0.3)  # about ln 32
    return trainer.precision, (params, main, grads)


@pytest.mark.parametrize("precision", DTYPES)
def test_39_precision_flags_mean_the_documented_dtypes(ranks: Ranks, precision: str) -> None:
    for layout in LAYOUTS:
        assert on_all(ranks, layout, dtypes, precision) == (precision, DTYPES[precision])


def test_39_a_flag_and_a_plugin_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="precision"):
        quiet_trainer(MegatronStrategy(), precision="bf16-true", plugins=[MegatronPrecision("bf16-mixed")])

    class Foreign(MixedPrecision):
        pass

    with pytest.raises(ConfigError, match="the strategy decides dtypes itself"):
        quiet_trainer(MegatronStrategy(), plugins=[Foreign("bf16-mixed", "cpu")])


# 40. No CPU trains fp16 with a loss scale, so here the CPU passes for a device that does.


class Overflows(GPTModule):
    """In the second step one gradient of one stage (or replica) is infinite, whatever the loss scale."""

    where: str

    def on_train_start(self) -> None:
        self.moved: list[bool] = []
        self.scales: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        parameter = next(self.parameters())
        self.before = parameter.detach().clone()
        axis = getattr(self.mesh, self.where)
        if batch_idx == 1 and axis.rank == axis.size - 1:
            self.handle = parameter.register_hook(lambda gradient: gradient * float("inf"))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.moved.append(not torch.equal(next(self.parameters()), self.before))
        self.scales.append(self.trainer.precision_plugin.loss_scale.scale)  # type: ignore[union-attr]
        if hasattr(self, "handle"):
            self.handle.remove()


def overflowing(layout: Layout, where: str, directory: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        able = replace(devices.CPU, supports_fp16_training=True)
        patch.setattr(devices, "CPU", able)
        patch.setattr(devices, "kind_of", lambda device: able)
        module = language_model(Overflows)
        module.where = where
        saving = ModelCheckpoint(directory, filename="last", save_last=False)
        scale = DynamicLossScale(scale=2.0**10, hysteresis=1, growth_interval=100)
        plugins = [MegatronPrecision("16-mixed", scale)]
        fit(layout, module, callbacks=[saving], enable_checkpointing=True, plugins=plugins)
        again = MegatronPrecision("16-mixed")
        path = str(directory / "last.ckpt")
        trainer = trainer_for(layout, plugins=[again], max_epochs=2, max_steps=5)
        trainer.fit(language_model(), loader(layout), ckpt_path=path)
    assert again.loss_scale is not None
    return module.moved, module.scales, again.loss_scale.scale


@pytest.mark.parametrize(("layout", "where"), [(PP2, "pp"), (DP2, "dp"), (TP2PP2, "tp")], ids=str)
def test_40_an_overflow_anywhere_skips_the_step_everywhere(
    ranks: Ranks, tmp_path: Path, layout: Layout, where: str
) -> None:
    moved, scales, resumed = on_all(ranks, layout, overflowing, where, tmp_path)
    assert moved == [True, False, True, True]
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**9]
    assert resumed == 2.0**9


# 41


class Creeps(LightningModule):
    """One parameter at 1 whose gradient is 1: SGD takes 1e-5 from it in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch.mean()).float()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-5)


def crept(layout: Layout, precision: str) -> float:
    module = Creeps()
    batches = DataLoader(torch.ones(1000, 1), batch_size=1)  # type: ignore[arg-type]
    fit(layout, module, batches, precision=precision, logger=False)
    return float(module.weight)


@pytest.mark.slow
def test_41_small_updates_move_fp32_main_parameters_only(ranks: Ranks) -> None:
    assert on_all(ranks, DP2, crept, "bf16-mixed") == pytest.approx(0.99, abs=0.0025)
    assert on_all(ranks, DP2, crept, "bf16-true") == 1.0


# 42


def test_42_the_strategy_finds_the_device_of_this_machine() -> None:
    trainer = Trainer(strategy=MegatronHPUStrategy(), devices=1, logger=False, enable_checkpointing=False)
    kind = devices.kind_of(trainer.strategy.root_device)
    assert kind.type == devices.best_available().type
    assert isinstance(trainer.accelerator, CPUAccelerator) == (kind is devices.CPU)


@pytest.mark.skipif(devices.hpu_available(), reason="there is one")
def test_42_an_hpu_that_is_not_there_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"habana_frameworks.*nearest valid: auto, (cpu|cuda)"):
        Trainer(strategy=MegatronHPUStrategy(), accelerator="hpu", devices=1)


# 43


def trainer_of(devices: int, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=devices, strategy=MegatronStrategy(**arguments), **quiet)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started, or a process group")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(dist, "init_process_group", started)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("count", "arguments", "numbers"),
    [
        (4, {"tp": 3}, ("4", "3")),  # world size
        (6, {"tp": 2, "pp": 2}, ("6", "4")),
        (3, {"tp": 3}, ("2", "3")),  # heads
        (3, {"pp": 3}, ("2", "3")),  # layers
        (1, {"micro_batch_size": 16}, ("8", "16")),
        (1, {"micro_batch_size": 3}, ("8", "3")),
    ],
)
def test_43_sizes_that_do_not_fit_name_both_numbers_before_any_process(
    count: int, arguments: dict[str, int], numbers: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as error:
        trainer_of(count, **arguments).fit(language_model(), loader(ONE))
    for number in numbers:
        assert number in str(error.value)
    assert not dist.is_initialized()


# 46

YAML = """
seed_everything: 7
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy: {strategy}
model:
  class_path: lightning_megatron.GPTModule
  init_args:
    config: {{num_layers: 2, hidden_size: 16, num_attention_heads: 2, vocab_size: 32, max_position_embeddings: 16}}
    lr: 1.0e-3
"""
STRATEGIES = {
    "a class path": """
    class_path: lightning_megatron.MegatronStrategy
    init_args: {tp: 1, micro_batch_size: 4, pipeline_schedule: 1f1b, timeout: "0:05:00"}""",
    "its name": "megatron",
    "its other name": "megatron_hpu",
    "its class on a command line": "lightning_megatron.MegatronStrategy",
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_46_a_yaml_names_the_strategy(tmp_path: Path, strategy: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(YAML.format(strategy=STRATEGIES[strategy]))
    options: dict[str, Any] = {"run": False, "subclass_mode_model": True, "save_config_callback": None}
    cli = LightningCLI(LightningModule, args=["--config", str(file)], **options)
    cli.trainer.fit(cli.model, loader(ONE))
    assert isinstance(cli.trainer.strategy, MegatronStrategy)
    assert cli.trainer.global_step == 2


# 47


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("callback", "advice"),
    [
        (StochasticWeightAveraging(1e-2), "use data parallelism alone"),
        (BatchSizeFinder(), "Ask `lightning-megatron plan`"),
        (ModelPruning("l1_unstructured"), "use data parallelism alone"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_47_callbacks_that_cannot_work_are_refused_before_processes_start(callback: Any, advice: str) -> None:
    trainer = trainer_of(2, tp=2)
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=f"callbacks='{type(callback).__name__}'") as error:
        trainer.fit(language_model(), loader(ONE))
    assert advice in str(error.value).splitlines()[1]


def with_callback(layout: Layout) -> str:
    with pytest.raises(ConfigError) as error:
        fit(layout, callbacks=[StochasticWeightAveraging(1e-2)])
    return str(error.value)


def test_47_and_where_somebody_else_starts_the_processes(ranks: Ranks) -> None:
    assert "callbacks='StochasticWeightAveraging'" in on_all(ranks, PP2, with_callback)


def test_47_flags_and_plugins_that_cannot_work_are_refused_by_the_trainer() -> None:
    with pytest.raises(ConfigError, match="sync_batchnorm=True: torch's SyncBatchNorm does not compute on cpu"):
        Trainer(strategy=MegatronStrategy(), accelerator="cpu", devices=1, sync_batchnorm=True)
    with pytest.raises(ConfigError, match=r"plugins='AsyncCheckpointIO': .* set async_save=True of the strategy"):
        Trainer(strategy=MegatronStrategy(), accelerator="cpu", devices=1, plugins=[AsyncCheckpointIO()])
    with pytest.raises(ConfigError, match=r"checkpoint_io='AsyncCheckpointIO': .* set async_save=True of the strategy"):
        MegatronStrategy(checkpoint_io=AsyncCheckpointIO())


def test_47_a_compiled_module_is_refused(request: pytest.FixtureRequest) -> None:
    compiled: Any = torch.compile(language_model(), backend="eager")  # torch may start processes of its own
    request.getfixturevalue("no_processes")
    # By Lightning itself, which knows the strategies that take one.
    with pytest.raises(RuntimeError, match=r"compiled model is incompatible with .* `MegatronStrategy`"):
        trainer_of(1).fit(compiled, loader(ONE))


# 49


def in_inference_mode(layout: Layout) -> Any:
    """Lightning evaluates under inference_mode, but on gloo, and inside ``fit``, under no_grad.

    So let gloo pass for nccl where it asks, and validate in ``fit`` as strictly as outside.
    """
    modes: list[bool] = []

    class Tells(GPTModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            modes.append(torch.is_inference_mode_enabled())
            super().validation_step(batch, batch_idx, dataloader_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda group=None: "nccl")
        module = language_model(Tells)
        recorder = Recorder()
        trainer = trainer_for(layout, logger=recorder, max_epochs=2, num_sanity_val_steps=1)
        trainer.fit_loop.epoch_loop.val_loop.inference_mode = True
        trainer.fit(module, loader(layout), loader(layout, 16))
        trainer.validate(module, loader(layout, 16), verbose=False)
        trainer.predict(module, loader(layout, 16))
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader(layout), loader(layout, 16))
    assert modes
    assert all(modes)
    return recorder.series("train_loss")


@pytest.mark.slow
def test_49_evaluation_under_inference_mode_leaves_training_intact(ranks: Ranks) -> None:
    expected = on_all(ranks, ONE, in_inference_mode)
    assert len(expected) == 12
    for layout in LAYOUTS[1:]:
        assert_close(on_all(ranks, layout, in_inference_mode), expected)


# 50; private names of Lightning are held by tests/trainer/strategy/test_private.py


@pytest.mark.slow
def test_50_the_package_imports_without_an_accelerator() -> None:
    code = "import sys, lightning_megatron; assert not any(m.startswith('habana') for m in sys.modules)"
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HABANA_VISIBLE_MODULES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=True, env={**os.environ, **hidden})


@pytest.mark.skipif(devices.hpu_available(), reason="there it changes something")
def test_a_flag_for_gaudi_changes_nothing_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        migrating, _ = fit(ONE, strategy={"gpu_migration": True}, max_steps=1)
    assert migrating.global_step == 1
    assert caplog.text.count(f"gpu_migration=True changes nothing on {kind_in_tests().type}") == 1
