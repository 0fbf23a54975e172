"""NaN and infinity end a run by name, are neither saved nor loaded, and are left to a loss scale or to the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.checkpoint import CheckpointError, verify
from lightning_megatron.device import CPU
from lightning_megatron.lightning.step.precision import MegatronPrecision
from lightning_megatron.optim.finite_check import NonFiniteError
from lightning_megatron.optim.loss_scale import DynamicLossScale
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer
from tests.tiny import tiny_llama

IS_READ_AT_ONCE = kind_in_tests() is CPU
NAN = float("nan")


def rows(n: int = 24) -> Any:
    tokens = torch.randint(40, (n, 9), generator=torch.Generator().manual_seed(3))
    return DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in tokens], batch_size=4)  # type: ignore[arg-type]


class At(Callback):
    """Does something before a step, on one rank."""

    def __init__(self, step: int, act: Callable[[Any], None], rank: int = 0) -> None:
        self.step, self.act, self.rank = step, act, rank

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            self.act(pl_module)


def param(module: Any) -> Tensor:
    found: Tensor = module.get_parameter("model.layers.0.mlp.fc1.weight")
    return found


def bad_gradient(module: Any) -> None:
    """From here on, in one element."""
    param(module).register_hook(lambda grad: grad.index_fill(0, torch.tensor([1], device=grad.device), NAN))


def bad_parameter(module: Any) -> None:
    with torch.no_grad():
        param(module).view(-1)[7] = NAN


def fit(*callbacks: Callback, strategy: dict[str, Any] | None = None, **options: Any) -> Any:
    seed_everything(3, verbose=False)
    trainer = quiet_trainer(
        MegatronStrategy(**strategy or {}), callbacks=list(callbacks), **{"max_steps": 4, **options}
    )
    module = options.pop("module", None) or LlamaModule(tiny_llama(), lr=1e-2)
    trainer.fit(module, rows())
    return trainer, module


def weights_after(act: Callable[[Any], None] | None) -> tuple[str, list[Tensor], int]:
    seed_everything(3, verbose=False)
    module = LlamaModule(tiny_llama(), lr=1e-2)
    trainer = quiet_trainer(
        MegatronStrategy(), max_steps=2 if act is None else 4, callbacks=[At(2, act)] if act else []
    )
    text = ""
    try:
        trainer.fit(module, rows())
    except NonFiniteError as error:
        text = str(error)
    return text, [p.detach().cpu().clone() for p in module.parameters()], trainer.global_step


def test_the_step_is_not_taken() -> None:
    text, weights, step = weights_after(bad_gradient)
    assert text.startswith("step 2: the gradient of 'model.layers.0.mlp.fc1.weight' on rank 0 is NaN or infinite")
    if IS_READ_AT_ONCE:
        assert step == 2
        for ours, theirs in zip(weights, weights_after(None)[1], strict=True):
            assert ours.equal(theirs)
    else:
        assert step == 3, "a device's answer is read in the next step"


def test_a_run_that_looks_for_none_goes_on() -> None:
    trainer, module = fit(At(2, bad_gradient), strategy={"check_for_nan_in_loss_and_grad": False})
    assert trainer.global_step == 4
    assert param(module).isnan().any()


# Saves


@pytest.mark.parametrize("in_background", [False, True])
def test_a_bad_model_is_not_saved_and_the_good_one_stays(tmp_path: Path, in_background: bool) -> None:
    """A callback that writes into parameters after a step spoils them right before the save."""

    class Spoils(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                bad_parameter(pl_module)

    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=1)
    with pytest.raises(CheckpointError) as error:
        fit(Spoils(), saver, enable_checkpointing=True, strategy={"async_save": in_background})
    text = str(error.value)
    assert "step=2.ckpt: it would hold values that are NaN or infinite" in text
    assert "model.model.layers.0.mlp.fc1.weight: 1 of" in text
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=1.ckpt"]
    assert verify(tmp_path / "step=1.ckpt") == []


def test_bad_optimizer_state_is_not_saved(tmp_path: Path) -> None:
    def spoil(module: Any) -> None:
        (optimizer,) = module.trainer.strategy.sharded_optimizers
        optimizer.param_shards()[0].state["exp_avg"].view(-1)[0] = float("inf")
        module.trainer.save_checkpoint(tmp_path / "a.ckpt")

    with pytest.raises(CheckpointError, match=r"optimizer_0\.state\.model\..*\.exp_avg: 1 of"):
        fit(At(2, spoil))
    assert not (tmp_path / "a.ckpt").exists()


def test_buffers_and_frozen_parameters_may_be_infinite(tmp_path: Path) -> None:
    class Masked(LlamaModule):
        def configure_model(self) -> None:
            super().configure_model()
            if not hasattr(self, "mask"):
                self.register_buffer("mask", torch.full((3,), float("-inf")))
                self.frozen = torch.nn.Parameter(torch.full((3,), float("-inf")), requires_grad=False)

    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2)
    seed_everything(3, verbose=False)
    trainer = quiet_trainer(MegatronStrategy(), max_steps=2, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(Masked(tiny_llama(), lr=1e-2), rows())
    again = quiet_trainer(MegatronStrategy(), max_steps=3)
    again.fit(Masked(tiny_llama(), lr=1e-2), rows(), ckpt_path=tmp_path / "step=2.ckpt")
    assert again.global_step == 3


# fp16: the loss scale decides, until it can do no more


class Counted(MegatronPrecision):
    """Half precision where there is no device for it."""

    def problems(self, *_: Any) -> list[Any]:
        return []


def test_overflows_are_left_to_the_loss_scale_while_it_can_fall() -> None:
    scale = DynamicLossScale(scale=8.0, minimum=1.0, hysteresis=1)
    with pytest.raises(NonFiniteError, match=r"step 5: the gradient of .model\.layers\.0\.mlp\.fc1\.weight. on rank 0"):
        fit(At(2, bad_gradient), plugins=[Counted("16-mixed", scale)], max_steps=9)
    assert scale.scale == 1.0, "8, 4, 2 are tried"
