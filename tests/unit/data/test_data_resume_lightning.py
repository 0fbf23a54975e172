"""The loader inside Lightning's own loop: what Lightning saves of it, and whether a resumed fit reads on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset

from lightning_megatron.data import MegatronSampler, ResumableDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory")


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, item: int) -> torch.Tensor:
        return torch.tensor([float(item)])


class Recorder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[int, int, list[int]]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch_idx, batch.flatten().int().tolist()))
        return (batch * self.weight).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class EarlyRecorder(Recorder):
    """Asks for the number of steps so early that Lightning makes the loader before it has read the loader's state."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 18
        return super().configure_optimizers()


class KeepsLoaderState(LightningDataModule):
    """Data module that makes up for it: it keeps the state itself, and may apply it late."""

    def __init__(self, loader: ResumableDataLoader) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> ResumableDataLoader:
        return self.loader

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict["loader"])


def fit(
    directory: Path,
    ckpt_path: Path | None = None,
    workers: int = 0,
    model: Recorder | None = None,
    **options: Any,
) -> Recorder:
    model = model or Recorder()
    sampler = MegatronSampler(12, batch_size=2, shuffle=True, seed=1)
    loader = ResumableDataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=[
            ModelCheckpoint(directory / "ckpt", filename="{step}", every_n_train_steps=1, save_top_k=-1),
            ModelCheckpoint(directory / "ckpt", filename="end-{epoch}", save_on_train_epoch_end=True, save_top_k=-1),
        ],
        **{"max_epochs": 3, **options},
    )
    data = KeepsLoaderState(loader) if isinstance(model, EarlyRecorder) else loader
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, int, list[int]]]]:
    directory = tmp_path_factory.mktemp("whole")
    return directory / "ckpt", fit(directory).seen


def test_lightning_reshuffles_each_epoch(whole: tuple[Path, list[tuple[int, int, list[int]]]]) -> None:
    _, seen = whole
    assert [(e, b) for e, b, _ in seen] == [(e, b) for e in range(3) for b in range(6)]
    epochs = [[i for e, _, batch in seen if e == epoch for i in batch] for epoch in range(3)]
    for epoch, order in enumerate(epochs):
        assert order == torch.randperm(12, generator=torch.Generator().manual_seed(1 + epoch)).tolist()


@pytest.mark.parametrize(("step", "workers"), [(4, 0), (6, 0), (9, 0), (9, 2)])
def test_a_resumed_fit_reads_on(
    whole: tuple[Path, list[tuple[int, int, list[int]]]], tmp_path: Path, step: int, workers: int
) -> None:
    checkpoints, seen = whole
    assert fit(tmp_path, checkpoints / f"step={step}.ckpt", workers).seen == seen[step:]


def test_resume_after_the_end_of_an_epoch(whole: tuple[Path, list[tuple[int, int, list[int]]]], tmp_path: Path) -> None:
    checkpoints, seen = whole
    assert fit(tmp_path, checkpoints / "end-epoch=1.ckpt").seen == seen[12:]


def test_resume_with_limited_epochs(tmp_path: Path) -> None:
    seen = fit(tmp_path / "a", limit_train_batches=4).seen
    assert len(seen) == 12
    for name, rest in (("end-epoch=0.ckpt", 4), ("step=7.ckpt", 7), ("step=4.ckpt", 4)):
        resumed = fit(tmp_path / "b", tmp_path / "a" / "ckpt" / name, limit_train_batches=4).seen
        assert resumed == seen[rest:], name


def test_resume_where_the_loader_is_made_too_early(tmp_path: Path) -> None:
    seen = fit(tmp_path / "a", model=EarlyRecorder()).seen
    for step in (4, 6, 9):
        model = fit(tmp_path / "b", tmp_path / "a" / "ckpt" / f"step={step}.ckpt", model=EarlyRecorder())
        assert model.seen == seen[step:], step


class Predicts(LightningModule):
    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> list[int]:
        return batch.flatten().int().tolist()  # type: ignore[no-any-return]


def test_predict_reads_all_samples(tmp_path: Path) -> None:
    """Lightning wraps the batch sampler of a loader it predicts with."""
    sampler = MegatronSampler(12, batch_size=5, drop_last=False, fill="repeat")
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    batches = trainer.predict(Predicts(), ResumableDataLoader(Numbers(), batch_sampler=sampler))
    assert batches == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 0, 1, 2]]
