"""Checks 11-15: who reads which samples, and what evaluation gives back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from layouts import (
    CP2,
    DP2,
    LIGHTNING_2_6,
    ONE,
    PP2,
    STOCK,
    TP2,
    TP2PP2,
    Layout,
    Ranks,
    assert_close,
    distinct,
    fit,
    flat,
    language_model,
    loader,
    on_all,
    series,
    texts,
    trainer_for,
)
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatron import GPTModule

TP2DP2, PP2DP2 = Layout(tp=2, dp=2), Layout(pp=2, dp=2)

# 11, 13


class Weighs(GPTModule):
    """Logs as users do who know that batches differ in size."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["tokens"]))
        self.log("val_samples", float(len(batch["tokens"])), sync_dist=True, reduce_fx="sum")


def everything(layout: Layout) -> list[Any]:
    """``fit``, ``validate``, ``test``, ``predict`` and ``fit`` again on one Trainer; 20 samples end in a batch of 4."""
    module = language_model(Weighs)
    trainer = trainer_for(layout)
    uneven = loader(layout, 20)
    trainer.fit(module, loader(layout))
    found: list[Any] = [trainer.validate(module, uneven, verbose=False), trainer.test(module, uneven, verbose=False)]
    predictions = trainer.predict(module, uneven)
    assert predictions is not None
    found.append([[float(p.square().sum()) for p in batch] for batch in predictions])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(layout), uneven)
    found.append({name: float(value) for name, value in trainer.callback_metrics.items() if name != "grad_norm"})
    return [*found, trainer.global_step]


@pytest.mark.slow
def test_11_every_rank_gets_full_results_and_one_trainer_does_it_all(ranks: Ranks) -> None:
    expected = on_all(ranks, STOCK, everything)
    assert expected[0][0]["val_samples"] == 20
    assert [len(batch) for batch in expected[2]] == [8, 8, 4]
    for layout in (ONE, TP2, PP2, TP2PP2, CP2):
        assert_close(on_all(ranks, layout, everything), expected)


def test_11_replicas_predict_their_own_samples_and_share_metrics(ranks: Ranks) -> None:
    expected = on_all(ranks, STOCK, everything)
    first, second = ranks(2, everything, DP2)
    for ours in (first, second):
        assert_close([*ours[:2], *ours[3:]], [*expected[:2], *expected[3:]])
    joined = [[*a, *b] for a, b in zip(first[2], second[2], strict=True)]
    for ours, batch in zip(joined, expected[2], strict=True):
        assert sorted(ours) == pytest.approx(sorted(batch), rel=1e-4)


def last_stage_only(layout: Layout) -> bool:
    predictions = trainer_for(layout, {"broadcast_predictions": False}).predict(language_model(), loader(layout))
    assert predictions is not None
    return all(isinstance(p, Tensor) for p in predictions)


def test_11_predictions_may_stay_on_the_last_stage(ranks: Ranks) -> None:
    assert ranks(2, last_stage_only, PP2) == [False, True]


def uneven_training(layout: Layout) -> list[float]:
    return series(layout, batches=loader(layout, 22), strategy={"micro_batch_size": 4})["train_loss"]


def test_13_a_smaller_last_batch_is_weighted_in_training(ranks: Ranks) -> None:
    # Batches of 8, 8 and 6 in micro-batches of 4, the last one of 2: in the mean each sample counts the same.
    expected = on_all(ranks, STOCK, uneven_stock)
    for layout in (ONE, TP2, PP2, TP2PP2, CP2):
        assert_close(on_all(ranks, layout, uneven_training), expected)


def uneven_stock(layout: Layout) -> list[float]:
    return series(layout, batches=loader(layout, 22))["train_loss"]


# 12


class Writer(BasePredictionWriter):
    """Keeps what a writer is given. All ranks are: one that writes files asks ``trainer.strategy.mesh`` who it is."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[int, list[int], int]] = []
        self.epoch: Any = None

    def write_on_batch_end(
        self, trainer: Trainer, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, loader_idx: int
    ) -> None:
        assert batch["number"].tolist() == list(indices)
        self.batches.append((batch_idx, list(indices), len(prediction)))

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epoch = (len(predictions), batch_indices)


def written(layout: Layout) -> tuple[int, Any, Any]:
    writer = Writer()
    trainer = trainer_for(layout, callbacks=[writer], use_distributed_sampler=True)
    batches = DataLoader(texts(18), batch_size=layout.batch_size)  # type: ignore[arg-type]
    trainer.predict(language_model(), batches, return_predictions=False)
    return trainer.strategy.data_parallel_rank, writer.batches, writer.epoch  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", [ONE, TP2, PP2, DP2, TP2DP2, PP2DP2], ids=str)
def test_12_writers_get_every_sample_once_per_replica(ranks: Ranks, layout: Layout) -> None:
    by_replica: dict[int, Any] = {}
    for replica, batches, epoch in ranks(layout.world_size, written, layout):
        assert by_replica.setdefault(replica, batches) == batches  # tp and pp peers are given the same
        assert [number for number, _, _ in batches] == list(range(len(batches)))
        assert all(len(indices) == size for _, indices, size in batches)
        assert epoch == (len(batches), [[indices for _, indices, _ in batches]])
    assert set(by_replica) == set(range(layout.dp))
    samples = [index for batches in by_replica.values() for _, indices, _ in batches for index in indices]
    assert sorted(samples) == list(range(18))


# 14


class Numbers(Callback):
    """Keeps the numbers of the samples that each step saw."""

    def __init__(self) -> None:
        self.trained: list[list[int]] = []
        self.validated: list[list[int]] = []

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.trained.append(batch["number"].tolist())

    def on_validation_batch_start(self, trainer: Trainer, module: Any, batch: Any, *rest: Any, **more: Any) -> None:
        self.validated.append(batch["number"].tolist())


def read(layout: Layout) -> tuple[Any, Any]:
    numbers = Numbers()
    plain = {"batch_size": layout.batch_size, "shuffle": False}
    batches = DataLoader(texts(32), **plain)  # type: ignore[arg-type]
    held_out = DataLoader(texts(16), **plain)  # type: ignore[arg-type]
    fit(layout, None, batches, held_out, callbacks=[numbers], use_distributed_sampler=True, max_epochs=2)
    return numbers.trained, numbers.validated


@pytest.mark.parametrize("layout", [TP2, PP2, DP2, TP2DP2, PP2DP2], ids=str)
def test_14_replicas_read_disjoint_samples_and_peers_the_same(ranks: Ranks, layout: Layout) -> None:
    results = ranks(layout.world_size, read, layout)
    replicas = distinct(results)
    assert len(replicas) == layout.dp
    for epoch in range(2):
        trained = [i for train, _ in replicas for batch in train[4 * epoch : 4 * epoch + 4] for i in batch]
        assert sorted(trained) == list(range(32))
    # As in all of Lightning: the sampler put into a training loader of several replicas shuffles, also where the user's
    # did not, and anew in every epoch; in evaluation it keeps the order. Use use_distributed_sampler=False to decide
    # for yourself. One replica reads what Lightning reads on one device.
    first, second = replicas[0][0][:4], replicas[0][0][4:]
    assert (sorted(flat(first)) == flat(first)) is (layout.dp == 1)
    assert (first == second) is (layout.dp == 1)
    assert replicas[0][1][0] == list(range(0, 16, layout.dp))[: layout.batch_size]


class Stream(IterableDataset[Any]):
    """Shards itself: no sampler can."""

    trainer: Trainer

    def __iter__(self) -> Any:
        strategy: Any = self.trainer.strategy
        yield from texts(32)[strategy.data_parallel_rank :: strategy.data_parallel_size]


def streamed(layout: Layout) -> Any:
    numbers, stream = Numbers(), Stream()
    trainer = trainer_for(layout, callbacks=[numbers], use_distributed_sampler=True)
    stream.trainer = trainer
    trainer.fit(language_model(), DataLoader(stream, batch_size=layout.batch_size))
    return numbers.trained


@pytest.mark.parametrize("layout", [PP2, TP2DP2], ids=str)
def test_14_a_stream_shards_itself_by_the_strategys_data_parallel_rank(ranks: Ranks, layout: Layout) -> None:
    results = ranks(layout.world_size, streamed, layout)
    replicas = distinct(results)
    assert len(replicas) == layout.dp
    for replica, batches in enumerate(replicas):
        assert flat(batches) == list(range(replica, 32, layout.dp))


# 15


class Drifts(GPTModule):
    """Draws from torch's own generator where a pipeline has only its last stage: peers' generators drift apart."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        torch.rand(())
        return loss


class Draws(Drifts):
    """Keeps what workers draw in each epoch."""

    drawn: list[Any]

    def on_train_epoch_start(self) -> None:
        loader = self.trainer.train_dataloader
        assert loader is not None
        self.drawn.append([drawn_by_worker(loader, worker) for worker in range(2)])


def drawn_by_worker(loader: DataLoader[Any], worker: int) -> tuple[float, ...]:
    """The first numbers that a worker would draw: torch seeds it, then its init function does.

    Not in a process of its own: a pool's workers hold threads of gloo, from which nothing should be forked.
    """
    with isolate_rng():
        base_seed = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        torch.manual_seed(int(base_seed) + worker)
        assert loader.worker_init_fn is not None
        loader.worker_init_fn(worker)
        return random.random(), float(np.random.rand()), float(torch.rand(()))


def augmented(layout: Layout) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_SEED_WORKERS", "0")
        module = language_model(Draws)
        module.drawn = []
        seed_everything(7, workers=True, verbose=False)
        fit(layout, module, use_distributed_sampler=True, max_epochs=2)
    return module.drawn


@pytest.mark.parametrize("layout", [TP2, PP2, CP2, DP2, TP2PP2], ids=str)
def test_15_peers_draw_the_same_numbers_in_workers_and_replicas_others(ranks: Ranks, layout: Layout) -> None:
    replicas = distinct(ranks(layout.world_size, augmented, layout))
    assert len(replicas) == layout.dp
    # Lightning 2.5 seeds torch in workers with bits that no epoch changes.
    kinds = 3 if LIGHTNING_2_6 else 2
    drawn = [number for epochs in replicas for workers in epochs for numbers in workers for number in numbers[:kinds]]
    assert len(set(drawn)) == len(drawn) == layout.dp * 2 * 2 * kinds  # none twice: on replicas, in epochs, in workers


def shuffled(layout: Layout) -> Any:
    numbers = Numbers()
    fit(layout, language_model(Drifts), loader(layout, shuffle=True), callbacks=[numbers], max_epochs=3)
    return numbers.trained


def test_14_a_users_own_shuffling_is_the_same_on_peers_whose_generators_drift(ranks: Ranks) -> None:
    for layout in (PP2, TP2PP2):
        batches = on_all(ranks, layout, shuffled)
        epochs = [flat(batches[start : start + 4]) for start in (0, 4, 8)]
        assert all(sorted(epoch) == list(range(32)) for epoch in epochs)
        assert len(distinct(epochs)) == 3
