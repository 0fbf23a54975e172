"""Programs that tutorials of Lightning teach, small: nothing in them knows of our strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, random_split

SAMPLES, CLASSES = 32, 3


@dataclass
class Program:
    """What a script hands to Lightning.

    Attributes:
        module: the module.
        train: loader of training, or a data module.
        val: loaders of validation.
        trainer: arguments of the Trainer.
        unused: True if a step leaves parameters without a gradient, which DDP wants to know.
        thaws: True if it unfreezes parameters, whose gradients DDP never averages: its replicas part.
        exact: False if a sum over all parameters, such as a norm, may round otherwise.
    """

    module: pl.LightningModule
    train: Any
    val: Any = None
    trainer: dict[str, Any] = field(default_factory=dict)
    unused: bool = False
    thaws: bool = False
    exact: bool = True


PROGRAMS: dict[str, Callable[[], Program]] = {}


def tutorial(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__] = make
    return make


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Rows(Dataset[Any]):
    """Samples in a list."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def pictures(seed: int = 0, samples: int = SAMPLES) -> Rows:
    """Pictures ``[1, 8, 8]`` with a class."""
    x = torch.randn(samples, 1, 8, 8, generator=generator(seed))
    return Rows([(row, int(row.mean(0)[:4].sum() > 0) + int(row.sum() > 4)) for row in x])


def vectors(seed: int = 0, samples: int = SAMPLES) -> Rows:
    x = torch.randn(samples, 6, generator=generator(seed))
    return Rows([(row, row.sum().sin().reshape(1)) for row in x])


def loader(rows: Dataset[Any], **options: Any) -> DataLoader[Any]:
    return DataLoader(rows, **{"batch_size": 4, **options})


def small_net(batch_norm: bool = False) -> nn.Sequential:
    norm = nn.BatchNorm2d(4) if batch_norm else nn.Identity()
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), norm, nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16, CLASSES)
    )


class Classifier(pl.LightningModule):
    """The image classifier of the tutorials, with metrics of torchmetrics."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = small_net(batch_norm)
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss)
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_acc": self.val_acc}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@tutorial
def image_classifier() -> Program:
    callbacks = [EarlyStopping("val_loss", patience=1), ModelCheckpoint(monitor="val_acc", mode="max")]
    trainer = {"max_epochs": 3, "callbacks": callbacks, "enable_checkpointing": True}
    return Program(Classifier(), loader(pictures()), loader(pictures(1)), trainer)


@tutorial
def residual_net_with_one_cycle() -> Program:
    class Net(Classifier):
        def __init__(self) -> None:
            super().__init__(batch_norm=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
            steps = int(self.trainer.estimated_stepping_batches)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Program(Net(), loader(pictures()), loader(pictures(1)), {"callbacks": [LearningRateMonitor("step")]})


@tutorial
def autoencoder() -> Program:
    class Autoencoder(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 64))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0].flatten(1)
            loss = F.mse_loss(self.decoder(self.encoder(x)), x)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x = batch[0].flatten(1)
            self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    return Program(Autoencoder(), loader(pictures()), loader(pictures(1)))


@tutorial
def adversarial_nets() -> Program:
    class Adversarial(pl.LightningModule):
        """Two optimizers, by hand."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generate = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
            self.judge = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            real, _ = batch
            first, second = self.optimizers()  # type: ignore[misc]
            noise = real[:, :4].sin()
            self.toggle_optimizer(first)
            loss = F.binary_cross_entropy_with_logits(self.judge(self.generate(noise)), torch.ones(len(real), 1))
            self.manual_backward(loss)
            first.step()
            first.zero_grad()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            fake = self.judge(self.generate(noise).detach())
            second_loss = F.binary_cross_entropy_with_logits(self.judge(real), torch.ones(len(real), 1))
            second_loss = (second_loss + F.binary_cross_entropy_with_logits(fake, torch.zeros(len(real), 1))) / 2
            self.manual_backward(second_loss)
            second.step()
            second.zero_grad()
            self.untoggle_optimizer(second)
            self.log_dict({"g_loss": loss, "d_loss": second_loss}, prog_bar=True)

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(net.parameters(), 2e-3, (0.5, 0.99)) for net in (self.generate, self.judge)]

    return Program(Adversarial(), loader(vectors()), unused=True)


@tutorial
def contrastive_with_a_teacher() -> Program:
    class Contrastive(pl.LightningModule):
        """A teacher that follows the student by an average, without gradients."""

        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
            self.predictor = nn.Linear(4, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            with torch.no_grad():
                target = self.teacher(x * 1.1)
            loss = 2 - 2 * F.cosine_similarity(self.predictor(self.student(x)), target, dim=-1).mean()
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            for mine, its in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                its.data.mul_(0.9).add_(mine.data, alpha=0.1)

        def configure_optimizers(self) -> Any:
            trained = [*self.student.parameters(), *self.predictor.parameters()]
            return torch.optim.AdamW(trained, lr=3e-3)

    return Program(Contrastive(), loader(vectors()))


@tutorial
def fine_tuning_of_a_backbone() -> Program:
    class Transfer(Classifier):
        def __init__(self) -> None:
            super().__init__()
            # Without a bias, which normalization takes out: Adam would make whole steps of its gradient's rounding.
            first = nn.Conv2d(1, 2, 3, padding=1, bias=False)
            self.backbone = nn.Sequential(first, nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.backbone(x))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3)
    return Program(
        Transfer(), loader(pictures()), loader(pictures(1)), {"max_epochs": 3, "callbacks": [unfreeze]}, thaws=True
    )


@tutorial
def several_validation_sets() -> Program:
    class Several(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            x, y = batch
            self.log("val_loss", F.cross_entropy(self(x), y))

    loaders = [loader(pictures(seed)) for seed in (1, 2)]
    return Program(Several(), loader(pictures()), loaders, {"val_check_interval": 0.5})


@tutorial
def averaged_weights() -> Program:
    trainer = {"max_epochs": 4, "callbacks": [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2)]}
    return Program(Classifier(), loader(pictures()), loader(pictures(1)), trainer)


@tutorial
def accumulation_that_grows() -> Program:
    trainer = {"max_epochs": 3, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]}
    return Program(Classifier(), loader(pictures()), loader(pictures(1)), trainer)


@tutorial
def clipping_of_ones_own() -> Program:
    class Clips(Classifier):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")

    return Program(Clips(), loader(pictures()), trainer={"gradient_clip_val": 0.1})


@tutorial
def two_loaders_at_once() -> Program:
    class Both(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch["pictures"], batch_idx)
            return loss + self.net[0].weight.sum() * batch["numbers"][0].mean() * 1e-2

    loaders = CombinedLoader({"pictures": loader(pictures()), "numbers": loader(vectors())}, "max_size_cycle")
    return Program(Both(), loaders)


@tutorial
def data_module_with_a_split() -> Program:
    class Split(pl.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.train, self.val = random_split(pictures(samples=40), [32, 8], generator(5))

        def train_dataloader(self) -> Any:
            return loader(self.train)

        def val_dataloader(self) -> Any:
            return loader(self.val)

    return Program(Classifier(), Split())


@tutorial
def metrics_in_a_callback() -> Program:
    class Watches(Callback):
        """Keeps a metric that no module holds."""

        def __init__(self) -> None:
            self.error = torchmetrics.MeanMetric()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            self.error.update(outputs["loss"])

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("mean_of_the_epoch", self.error.compute())
            self.error.reset()

    return Program(Classifier(), loader(pictures()), trainer={"callbacks": [Watches()]})


@tutorial
def groups_with_rates_of_their_own() -> Program:
    class Groups(Classifier):
        def configure_optimizers(self) -> Any:
            layers = [layer for layer in self.net if list(layer.parameters())]
            groups = [{"params": layer.parameters(), "lr": 10.0**-k} for k, layer in enumerate(layers, 1)]
            optimizer = torch.optim.AdamW(groups)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]

    return Program(Groups(), loader(pictures()), loader(pictures(1)), {"max_epochs": 3})


@tutorial
def counts_in_buffers() -> Program:
    class Counts(pl.LightningModule):
        """Buffers that a step changes: a running mean and a count."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 1)
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.seen += len(x)
            loss = F.mse_loss(self.body(x - self.mean), y)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    return Program(Counts(), loader(vectors()))
