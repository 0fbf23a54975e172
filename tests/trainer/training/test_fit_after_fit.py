"""One module in several fits: it goes on from its main values, whatever the precisions, as with stock Lightning.

Stock keeps fp32 parameters under ``bf16-mixed``. Steps here are too small for bf16, so a value that was rounded between
two fits would stay where it was.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers.norm import RMSNorm
from lightning_megatron.testing.trainer import quiet_trainer

RATE = 1e-5


class Model(LightningModule):
    """Signs of gradients are the same in every step and precision, so Adam moves each weight by the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(RMSNorm(24), RMSNorm(8))  # layers of ours have 16 bits in mixed precision
        self.bfloat16().float()  # the first fit rounds nothing

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return sum(param.float().sum() for param in self.parameters())  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=RATE)


def fits(precisions: list[str], **options: Any) -> tuple[float, torch.dtype]:
    """Mean distance that weights move in fits of two steps, in rates, and their dtype at the end."""
    seed_everything(5, verbose=False)
    model = Model()
    first = main_values(None, model)
    for precision in precisions:
        last = fit(model, precision, options.get("strategy") or MegatronStrategy(**options))
        gc.collect()  # only the module lives on
    return float((first - last).mean()) / RATE, model.layers[-1].weight.dtype


def fit(model: Model, precision: Any, strategy: Any) -> Tensor:
    """Main values after a fit of two steps."""
    trainer = quiet_trainer(strategy, max_steps=2, precision=precision)
    trainer.fit(model, DataLoader(torch.zeros(8, 1), batch_size=1))  # type: ignore[arg-type]
    return main_values(trainer, model)


def main_values(trainer: Trainer | None, model: Model) -> Tensor:
    strategy = None if trainer is None else trainer.strategy
    state = strategy.main_state_dict() if isinstance(strategy, MegatronStrategy) else model.state_dict()
    return torch.cat([state[name].detach().clone().flatten() for name, _ in model.named_parameters()])


CHAINS = [["bf16-mixed", "32-true"], ["bf16-mixed"] * 5, ["bf16-mixed", "32-true", "bf16-mixed", "32-true"]]


@pytest.mark.parametrize("chain", CHAINS)
def test_small_steps_of_all_fits_count_as_in_stock(chain: list[str]) -> None:
    moved, dtype = fits(chain)
    assert moved == pytest.approx(fits(chain, strategy="auto")[0], abs=0.05)
    assert moved == pytest.approx(2 * len(chain), abs=0.05)
    assert dtype == (torch.float32 if chain[-1] == "32-true" else torch.bfloat16)


@pytest.mark.parametrize("layout", [{}, {"distributed_optimizer": False}])
def test_on_two_replicas(ranks: Any, layout: dict[str, Any]) -> None:
    for chain in CHAINS[:2]:
        for moved, _ in ranks(2, fits, chain, **layout):
            assert moved == pytest.approx(2 * len(chain), abs=0.05)


@pytest.mark.parametrize("second", ["bf16-mixed", "32-true"])
def test_weights_that_are_loaded_between_two_fits_begin_anew(second: str) -> None:
    """As in a search: the second run is the first one, bit for bit, also where a weight has moved by less than bf16."""
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = fit(model, "bf16-mixed", MegatronStrategy())
    model.load_state_dict(before)
    again = fit(model, second, MegatronStrategy())
    assert torch.allclose(again, first, rtol=0, atol=0 if second == "bf16-mixed" else RATE / 100)
