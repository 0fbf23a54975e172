"""Ranks of one replica draw the same numbers through a run, whatever data, callbacks and steps of a user draw."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, WeightedRandomSampler

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.errors import DataError
from lightning_megatron.testing.trainer import quiet_trainer

SIZES = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32, "vocab_size": 64}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MOE = {"num_experts": 4, "moe_router_topk": 2, "moe_input_jitter_eps": 0.1}
PP = {"pp": 2, "micro_batch_size": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "pp": (2, PP, DROPOUT),
    "tp": (2, {"tp": 2}, DROPOUT),
    "tp without sequence parallelism": (2, {"tp": 2, "sequence_parallel": False}, DROPOUT),
    "cp": (2, {"cp": 2}, {"hidden_dropout": 0.1}),
    "ep": (2, {"ep": 2}, MOE),
    "pp, one micro-batch": (2, {"pp": 2}, DROPOUT),
    "pp and MoE": (2, PP, MOE | DROPOUT),
    "pp, recompute": (2, PP | {"recompute": "full"}, DROPOUT),
    "gpipe": (2, PP | {"pipeline_schedule": "gpipe"}, DROPOUT),
    "interleaved": (2, PP | {"vpp": 2}, DROPOUT),
    "zero-bubble": (2, PP | {"pipeline_schedule": "zero-bubble"}, DROPOUT),
    "tp and pp": (4, PP | {"tp": 2}, DROPOUT),
    "pp and dp": (4, PP, DROPOUT),
}


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> Any:
        row = torch.arange(number, number + 17) + int(1000 * sum(draw()))  # a random window
        return {"tokens": row[:-1] % 64, "labels": row[1:] % 64}


class Model(LlamaModule):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: list[Any] = []
        self.drawn: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.read.append((self.global_step, batch_idx, batch["labels"].sum().item()))
        self.drawn.append(draw())
        loss = super().training_step(batch, batch_idx)
        draw()  # on the last stage alone
        return loss


class Draws(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        draw()


def train(layout: str, folder: str, steps: int, ckpt_path: str | None = None) -> Any:
    """Place in the data, what is read in each step, and what every generator gives at the end."""
    _, axes, model = LAYOUTS[layout]
    if ckpt_path is None:
        L.seed_everything(7, verbose=False)
        np.random.seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)  # as if unseeded
    sampler = WeightedRandomSampler(torch.linspace(1, 2, 32).tolist(), 16)
    samplers = {0: sampler, 1: SubsetRandomSampler(range(16))}
    options = {"max_steps": steps, "limit_val_batches": 1, "use_distributed_sampler": False}
    trainer = quiet_trainer(MegatronStrategy(**axes), callbacks=[Draws()], default_root_dir=folder, **options)
    own = Model("llama-tiny", **SIZES, **model, num_query_groups=2)
    loader = DataLoader(Rows(), 4, sampler=samplers[steps % 2])
    trainer.fit(own, loader, DataLoader(Rows(), 4), ckpt_path=ckpt_path)
    trainer.save_checkpoint(f"{folder}/{steps}.ckpt")
    place = trainer.strategy.data_parallel_rank  # type: ignore[attr-defined]
    return place, sorted(set(own.read)), sorted(set(own.drawn)), torch.initial_seed(), draw(), torch.rand(()).item()


def resumed(layout: str, folder: str, *steps: int) -> Any:
    found = [train(layout, folder, steps[0])]
    for before, now in pairwise(steps):
        found.append(train(layout, folder, now, f"{folder}/{before}.ckpt"))
    return found


def assert_alike(found: list[Any]) -> None:
    for runs in zip(*found, strict=True):
        replicas: dict[int, list[Any]] = {}
        for place, *rest in runs:
            replicas.setdefault(place, []).append(rest)
        for first, *others in replicas.values():
            assert all(other == first for other in others)


@pytest.mark.parametrize("layout", ["pp", "tp"])
def test_ranks_of_a_replica_draw_alike(ranks: Any, tmp_path: Path, layout: str) -> None:
    assert_alike(ranks(2, resumed, layout, str(tmp_path), 6))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_replica_draw_alike_in_all_layouts_and_resumed_in_mid_epoch(
    ranks: Any, tmp_path: Path, layout: str
) -> None:
    assert_alike(ranks(LAYOUTS[layout][0], resumed, layout, str(tmp_path), 50, 61, 70))


class Alone(L.Callback):
    """Draws on rank 0 alone, as to choose a picture to log."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._draw)

    def _draw(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step > 3:  # when batches are no longer compared each time
            draw()


class Fixed(Rows):
    def __getitem__(self, number: int) -> Any:
        row = torch.arange(number, number + 17)
        return {"tokens": row[:-1] % 64, "labels": row[1:] % 64}


def drawn_beside(axes: dict[str, Any], hook: str, augments: bool) -> Any:
    """What each step draws while rank 0 draws alone between steps; or the error."""
    L.seed_everything(7, verbose=False)
    options = {"max_steps": 8, "limit_val_batches": 1, "val_check_interval": 3, "use_distributed_sampler": False}
    trainer = quiet_trainer(MegatronStrategy(**axes), callbacks=[Alone(hook)], **options)
    module = Model("llama-tiny", **SIZES, num_query_groups=2)
    try:
        trainer.fit(module, DataLoader(Rows() if augments else Fixed(), 4), DataLoader(Fixed(), 4))
    except DataError as error:
        return str(error)
    return module.drawn


@pytest.mark.parametrize(
    "hook",
    [
        "on_train_batch_end",
        *(pytest.param(h, marks=pytest.mark.slow) for h in ("on_train_batch_start", "on_validation_end")),
    ],
)
def test_ranks_draw_what_one_process_draws_though_rank_0_draws_alone(ranks: Any, hook: str) -> None:
    (expected,) = ranks(1, drawn_beside, {}, hook, False)
    for axes in ({"tp": 2}, {"cp": 2}):
        assert ranks(2, drawn_beside, axes, hook, False) == [expected] * 2
    (first, second) = ranks(2, drawn_beside, {"pp": 2}, hook, False)
    assert first == second  # stages draw from seeds of each micro-batch


class Noted(L.Callback):
    """What is drawn at the start of each batch of an evaluation behind a fit."""

    def __init__(self) -> None:
        self.drawn: list[Any] = []

    def on_test_batch_start(self, *_: Any) -> None:
        self.drawn.append(draw())

    on_validation_batch_start = on_predict_batch_start = on_test_batch_start


def drawn_behind_a_fit(axes: dict[str, Any], does: str) -> Any:
    """What an evaluation, or the steps of a second fit, draw behind a fit at whose end rank 0 has drawn alone."""
    L.seed_everything(7, verbose=False)
    noted = Noted()
    options = {"max_epochs": 1, "limit_train_batches": 5, "use_distributed_sampler": False}
    trainer = quiet_trainer(MegatronStrategy(**axes), callbacks=[Alone("on_train_batch_end"), noted], **options)
    module = Model("llama-tiny", **SIZES, num_query_groups=2)
    trainer.fit(module, DataLoader(Fixed(), 4))
    trainer.fit_loop.max_epochs = 2
    getattr(trainer, does)(module, DataLoader(Fixed(), 4 if does == "fit" else 16))
    return noted.drawn or module.drawn[5:]


@pytest.mark.parametrize(
    "does", ["test", *(pytest.param(does, marks=pytest.mark.slow) for does in ("fit", "validate", "predict"))]
)
def test_what_follows_a_fit_goes_on_with_what_rank_0_has_drawn(ranks: Any, does: str) -> None:
    """Held against one process; a pipeline draws from seeds of each micro-batch, so its stages against each other."""
    (expected,) = ranks(1, drawn_behind_a_fit, {}, does)
    assert len(expected) == (5 if does == "fit" else 2)
    for axes in ({"tp": 2}, {"cp": 2}):
        assert ranks(2, drawn_behind_a_fit, axes, does) == [expected] * 2
    first, second = ranks(2, drawn_behind_a_fit, {"pp": 2}, does)
    assert first == second
    assert len(first) == len(expected)


def test_samples_that_ranks_of_a_replica_drew_apart_are_named(ranks: Any) -> None:
    for text in ranks(2, drawn_beside, {"tp": 2}, "on_train_batch_end", True):
        assert "ranks [0, 1] are one replica" in text
        assert "draw random numbers in data in the same way on all ranks" in text
