"""Your own LightningModule on parallel layers: a mixture of ordinary modules and two that are sharded over tp ranks.

python examples/custom_module.py --devices 2 --tp 2
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import ColumnParallelLinear, MegatronModule, MegatronStrategy, RowParallelLinear


class Classifier(MegatronModule):
    """A wide hidden layer: each rank holds some of its features, and the second layer sums over the ranks."""

    def __init__(self, width: int = 512, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width, self.lr = width, lr
        self.model: nn.Module | None = None

    def configure_model(self) -> None:  # the ranks are known from here on; Lightning may call this more than once
        if self.model is None:
            self.model = nn.Sequential(
                nn.LayerNorm(16),  # an ordinary module: every rank holds all of it
                ColumnParallelLinear(16, self.width, self.mesh),  # [B, 16] -> [B, width/tp]
                nn.GELU(),
                RowParallelLinear(self.width, 4, self.mesh),  # [B, width/tp] -> [B, 4]
            )

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert self.model is not None
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def loader(size: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """Points, each labelled with the closest of four hidden directions."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(size, 16, generator=generator)
    directions = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(points, (points @ directions).argmax(1)), batch_size=64, shuffle=seed == 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    options = parser.parse_args()
    L.seed_everything(1234)
    trainer = L.Trainer(
        devices=options.devices,
        strategy=MegatronStrategy(tp=options.tp, micro_batch_size=16),
        max_epochs=3,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir="out",
        callbacks=[ModelCheckpoint(monitor="val_loss")],
    )
    trainer.fit(Classifier(), loader(4096, seed=1), loader(512, seed=2))
    if trainer.is_global_zero:
        print(f"val_loss {trainer.callback_metrics['val_loss']:.3f} (guessing: 1.386)")


if __name__ == "__main__":
    main()
