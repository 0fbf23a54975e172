"""``EMAWeightAveraging`` over layers of this package in ``bf16-mixed``: averages of main values, with no bit lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch import callbacks as stock_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer
from tests.tiny import tiny_llama

Ranks = Callable[..., list[Any]]
State = dict[str, Tensor]
STEPS, DECAY = 12, 0.9999
pytestmark = pytest.mark.skipif(
    not hasattr(stock_callbacks, "EMAWeightAveraging"), reason="Lightning has it from 2.6 on"
)


class Reference(Callback):
    """Averages of main values, and these values, both of the last step."""

    def __init__(self) -> None:
        self.average: State = {}
        self.main: State = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.main = trainer.strategy.main_state_dict()
        if not self.average:
            self.average = {name: value.clone() for name, value in self.main.items()}
        for name, value in self.main.items():
            self.average[name] = DECAY * self.average[name] + (1 - DECAY) * value


def trained(
    interval: int, averages: bool = True, saver: Callback | None = None, ckpt_path: Path | None = None, **options: Any
) -> tuple[Reference, State, dict[str, torch.dtype]]:
    """The reference, main values behind the fit, and dtypes of parameters there."""
    seed_everything(3, verbose=False)
    tokens = torch.randint(40, (4, 9), generator=torch.Generator().manual_seed(3))
    data: Any = DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in tokens] * STEPS, batch_size=2)  # type: ignore[arg-type]
    reference, module = Reference(), LlamaModule(tiny_llama(), lr=1e-3)
    callbacks: list[Callback] = [reference]
    callbacks += [stock_callbacks.EMAWeightAveraging(decay=DECAY)] if averages else []
    callbacks += [] if saver is None else [saver]
    trainer = quiet_trainer(
        MegatronStrategy(**options), precision="bf16-mixed", max_steps=STEPS, callbacks=callbacks,
        val_check_interval=interval, limit_val_batches=1, use_distributed_sampler=False,
        enable_checkpointing=saver is not None,
    )  # fmt: skip
    trainer.fit(module, data, data, ckpt_path=ckpt_path)
    dtypes = {name: param.dtype for name, param in module.named_parameters()}
    strategy: Any = trainer.strategy
    return reference, strategy.main_state_dict(), dtypes


def assert_averaged(found: tuple[Reference, State, Any], plain: tuple[Reference, State, Any]) -> None:
    (reference, last, dtypes), (of_plain, _, dtypes_of_plain) = found, plain
    torch.testing.assert_close(reference.main, of_plain.main, rtol=0, atol=0)
    torch.testing.assert_close(last, reference.average, rtol=1e-6, atol=1e-8)
    assert dtypes == dtypes_of_plain
    assert torch.bfloat16 in dtypes.values()


@pytest.mark.parametrize("interval", [2, 6])
def test_the_model_ends_with_averages_of_main_values_however_often_it_is_validated(interval: int) -> None:
    """Training is that without averages, bit for bit."""
    assert_averaged(trained(interval), trained(interval, averages=False))


def test_so_it_does_where_replicas_share_main_values(ranks: Ranks) -> None:
    for found, plain in zip(ranks(2, trained, 2), ranks(2, trained, 2, averages=False), strict=True):
        assert_averaged(found, plain)


@pytest.mark.parametrize("in_one_file", [False, True], ids=["folder", "file"])
def test_a_run_that_is_resumed_between_two_validations_ends_with_the_same_averages(
    tmp_path: Path, in_one_file: bool
) -> None:
    how: dict[str, Any] = {"save_distributed_checkpoint": not in_one_file}
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=7)
    _, whole, _ = trained(4, saver=saver, **how)
    _, resumed, _ = trained(4, ckpt_path=tmp_path / "step=7.ckpt", **how)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
