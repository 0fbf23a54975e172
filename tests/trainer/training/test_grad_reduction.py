"""The dtype of gradients on the wire: Intel's rule on Gaudi, asked with what a step really sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron import device as devices
from lightning_megatron.lightning.step.grad_reduction import micro_batches_of_step, reduce_dtype
from lightning_megatron.testing.trainer import quiet_trainer


def summands(trainer: Any, micro: int | None, data: Any) -> int | None:
    trainer.fit_loop._data_source.instance = data
    return micro_batches_of_step(trainer, micro)


def test_micro_batches_of_a_step_are_counted_whoever_makes_the_batches() -> None:
    rows = torch.zeros(24, 2)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=10)  # type: ignore[arg-type]
    trainer = quiet_trainer(MegatronStrategy(), accumulate_grad_batches=3)
    assert summands(trainer, None, None) == 3
    assert summands(trainer, 4, loader) == 9
    assert summands(trainer, 4, {"a": loader, "b": DataLoader(rows, batch_size=20)}) == 15  # type: ignore[arg-type]
    assert summands(trainer, 4, BoringModel()) is None
    growing = quiet_trainer(MegatronStrategy(), callbacks=[GradientAccumulationScheduler({2: 7})])
    assert summands(growing, 5, loader) == 14


@pytest.mark.parametrize(("samples", "dtype"), [(128, "bf16"), (129, "fp32")])
def test_the_rule_is_asked_with_micro_batches_and_its_answer_is_used_and_said(
    samples: int, dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU passes for a Gaudi while optimizers are set up; nothing is trained."""
    from lightning_megatron.lightning.strategy import trained_parameters as module

    given: list[Any] = []

    class Watched(module.OptimizerSet):
        def __init__(self, *args: Any, **options: Any) -> None:
            given.append(args[3].reduce_dtype)
            super().__init__(*args, **options)

    monkeypatch.setattr(module, "OptimizerSet", Watched)
    monkeypatch.setattr(devices, "kind_of", lambda device: devices.HPU)
    strategy = MegatronStrategy(micro_batch_size=1)
    trainer = quiet_trainer(strategy, precision="bf16-mixed", accumulate_grad_batches=2, max_steps=0)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        trainer.fit(BoringModel(), DataLoader(torch.zeros(samples, 32), batch_size=samples))  # type: ignore[arg-type]
    assert given == [torch.bfloat16 if dtype == "bf16" else torch.float32]
    assert f"summed over ranks in {dtype} ({2 * samples} micro-batches x dp 1 = {2 * samples} summands" in caplog.text


def test_what_is_asked_for_wins_and_other_devices_have_no_rule() -> None:
    bf16 = torch.bfloat16
    assert reduce_dtype("fp32", devices.HPU, bf16, 1, 1) is torch.float32
    assert reduce_dtype("bf16", devices.CPU, bf16, 10**6, 1) is bf16
    assert reduce_dtype(None, devices.CUDA, bf16, 1, 1) is None
    assert reduce_dtype(None, devices.HPU, torch.float32, 1, 1) is None
    assert reduce_dtype(None, devices.HPU, bf16, None, 1) is torch.float32
