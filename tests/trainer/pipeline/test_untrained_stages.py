"""Pipeline stages of which every parameter is frozen: held against one process, or refused on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, GPTModule, LoRA, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.testing.workers import WorkerError

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
Ranks = Callable[..., list[Any]]
TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 8,
    "tie_embeddings": False,
}
ROWS = [{"tokens": torch.arange(4), "labels": torch.arange(4) + 1}] * 8  # each batch the same
FIRST, LAST = ("embedding", "layers.0."), ("layers.1.", "head")


class Model(GPTModule):
    def __init__(self, frozen: tuple[str, ...], how: str, **options: Any) -> None:
        super().__init__(TINY, lr=0.05, **options)
        self.frozen, self.how = frozen, how
        self.seen: list[tuple[float, float]] = []

    def configure_model(self) -> None:
        super().configure_model()
        for name, param in self.named_parameters():
            param.requires_grad_(param.requires_grad and not any(part in name for part in self.frozen))

    def configure_optimizers(self) -> Any:
        trained = [param for param in self.parameters() if param.requires_grad]
        if self.how == "list":
            return SGD(trained, lr=0.5)
        if self.how == "group":
            optimizer = SGD([{"params": trained}], lr=0.5)
            return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}]
        return super().configure_optimizers()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        group = self.trainer.optimizers[0].param_groups[0]
        self.seen.append((float(outputs["loss"]), group["lr"]))


def train(
    pp: int, frozen: tuple[str, ...], how: str = "own", steps: int = 3, files: tuple[Any, Any] = (None, None),
    one_file: bool = False, **options: Any,
) -> list[tuple[float, float]]:  # fmt: skip
    """Loss and rate of each step."""
    seed_everything(1, verbose=False)
    module = Model(frozen, how, **options)
    strategy = MegatronStrategy(pp=pp, save_distributed_checkpoint=not one_file)
    trainer = quiet_trainer(strategy, max_steps=steps, limit_val_batches=0, gradient_clip_val=0.5)
    trainer.fit(module, DataLoader(ROWS), ckpt_path=files[0])  # type: ignore[arg-type]
    if files[1] is not None:
        trainer.save_checkpoint(files[1])
    return module.seen


def assert_same(seen: list[tuple[float, float]], right: list[tuple[float, float]]) -> None:
    assert torch.tensor(seen).allclose(torch.tensor(right), rtol=1e-5)
    assert len({loss for loss, _ in right}) > 1


@pytest.mark.parametrize(("frozen", "how"), [(FIRST, "own"), (LAST, "own"), (FIRST, "group")])
def test_a_frozen_stage_trains_like_one_process(ranks: Ranks, frozen: tuple[str, ...], how: str) -> None:
    right = train(1, frozen, how)
    for seen in ranks(2, train, 2, frozen, how):
        assert_same(seen, right)


def test_adapters_may_be_on_one_stage_alone(ranks: Ranks) -> None:
    right = train(1, ("layers.0.",), lora=LoRA(rank=2))
    for seen in ranks(2, train, 2, ("layers.0.",), lora=LoRA(rank=2)):
        assert_same(seen, right)


@pytest.mark.parametrize(("frozen", "one_file"), [(FIRST, False), (FIRST, True), (LAST, False)])
def test_a_run_goes_on_in_another_layout(ranks: Ranks, tmp_path: Path, frozen: tuple[str, ...], one_file: bool) -> None:
    """Both ways; the rates of rank 0, which has an empty group, go on too."""
    right = train(1, frozen, "group", 5, (None, None))
    ranks(2, train, 2, frozen, "group", 2, (None, tmp_path / "two"), one_file)
    assert_same(train(1, frozen, "group", 5, (tmp_path / "two", None)), right[2:])
    train(1, frozen, "group", 2, (None, tmp_path / "one"), one_file)
    for seen in ranks(2, train, 2, frozen, "group", 5, (tmp_path / "one", None)):
        assert_same(seen, right[2:])


def test_an_optimizer_of_no_parameters_is_refused_on_all_ranks(ranks: Ranks) -> None:
    with pytest.raises(WorkerError) as raised:
        ranks(2, train, 2, FIRST, "list")
    assert str(raised.value).count("empty parameter list (pipeline stage 0)'") >= 1
    assert all(isinstance(error, ConfigError) for error in ranks(2, error_of, FIRST, "list"))
    assert "AdamW([{'params'" in str(raised.value)


def test_a_model_that_trains_nothing_is_refused(ranks: Ranks) -> None:
    errors = ranks(2, error_of, ("",), "own")
    assert all("no parameter on any pipeline stage is trained" in str(error) for error in errors)
    with pytest.raises(ValueError, match="empty parameter list"):
        train(1, ("",))


def error_of(frozen: tuple[str, ...], how: str) -> Exception | None:
    try:
        train(2, frozen, how)
    except Exception as error:
        return error
    return None
