"""Programs that Lightning's tutorials teach, with ``MegatronStrategy()`` in place of stock and no other change.

On one process they are held against Lightning's single device, on two against its DDP: what is logged, parameters,
buffers, and what the callbacks decided. In ``bf16-mixed`` bits are equal: both sides run on the same processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from tutorials_of_texts import PROGRAMS

from lightning_megatron import MegatronStrategy
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer

Ranks = Callable[..., list[Any]]
pytestmark = pytest.mark.skipif(kind_in_tests() is not CPU, reason="Lightning's own strategies stay on the CPU")
ROUNDING = 1e-6
"""Gradients of two replicas are added, and divided, in another order than DDP's."""
FP32, BF16 = "32-true", "bf16-mixed"
BF16_IN_GATE = ("adversarial_nets", "clipping_of_ones_own", "counts_in_buffers")


def cases() -> list[Any]:
    """Every program with each precision; most of those in bf16 are slow."""
    slow = [name for name in PROGRAMS if name not in BF16_IN_GATE]
    in_bf16 = (pytest.param(n, BF16, id=f"{n}-bf16", marks=[pytest.mark.slow] * (n in slow)) for n in PROGRAMS)
    return [*(pytest.param(name, FP32, id=name) for name in PROGRAMS), *in_bf16]


class Seen(NamedTuple):
    """What a rank saw of a run."""

    logged: list[dict[str, float]]
    state: dict[str, Tensor]
    steps: int
    epochs: int


def run(name: str, precision: Any, stock: bool, folder: str) -> Seen:
    """Train a program on every rank of the pool."""
    seed_everything(1, verbose=False)
    program, recorder = PROGRAMS[name](), Recorder()
    if not stock:
        strategy: Any = MegatronStrategy()
    elif dist.is_initialized():
        strategy = DDPStrategy(find_unused_parameters=program.unused)
    else:
        strategy = SingleDeviceStrategy(torch.device("cpu"))
    how = {"max_epochs": 2, "logger": recorder, "default_root_dir": folder, "precision": precision} | program.trainer
    if precision == BF16 and not program.exact:
        del how["gradient_clip_val"]  # other last bits of a norm become other values of bf16
    trainer = quiet_trainer(strategy, **how)
    loaders = (program.train, program.val) if program.val is not None else (program.train,)
    with torch.backends.mkldnn.flags(enabled=precision == FP32):  # some processors have no bf16 kernels of oneDNN's
        trainer.fit(program.module, *loaders)
    state = {key: value.detach().cpu().clone() for key, value in program.module.state_dict().items()}
    return Seen(recorder.rows, state, trainer.global_step, trainer.current_epoch)


def assert_equal(ours: Seen, stock: Seen, rtol: float, atol: float) -> None:
    assert (ours.steps, ours.epochs) == (stock.steps, stock.epochs)
    assert ours.steps > 0
    assert [row.keys() for row in ours.logged] == [row.keys() for row in stock.logged]
    for mine, its in zip(ours.logged, stock.logged, strict=True):
        assert mine == pytest.approx(its, rel=10 * rtol, abs=10 * atol)
    torch.testing.assert_close(ours.state, stock.state, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("name", "precision"), cases())
def test_one_process_equals_a_single_device(name: str, precision: str, tmp_path: Any) -> None:
    ours, stock = (run(name, precision, is_stock, str(tmp_path)) for is_stock in (False, True))
    tolerance = 0.0 if precision == BF16 or PROGRAMS[name]().exact else ROUNDING
    assert_equal(ours, stock, tolerance, tolerance)


@pytest.mark.parametrize(("name", "precision"), cases())
def test_two_processes_equal_ddp(name: str, precision: str, ranks: Ranks, tmp_path: Any) -> None:
    ours, stock = (ranks(2, run, name, precision, is_stock, str(tmp_path)) for is_stock in (False, True))
    if PROGRAMS[name]().thaws:
        torch.testing.assert_close(ours[0].state, ours[1].state, rtol=0.0, atol=0.0)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(stock[0].state, stock[1].state)
        return
    tolerance = 0.0 if precision == BF16 else ROUNDING
    for mine, its in zip(ours, stock, strict=True):
        assert_equal(mine, its, tolerance, tolerance)
