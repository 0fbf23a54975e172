"""A module without parallel layers trains as ever under tp and recompute, and is told that these do nothing for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

SIZES = {"num_layers": 1, "hidden_size": 16, "vocab_size": 40, "max_position_embeddings": 8}


def told(strategy: Any, ours: bool = False) -> tuple[list[str], list[float]]:
    """Messages of a training run, and a weight at its end."""
    seed_everything(1, verbose=False)
    module = LlamaModule("llama-tiny", **SIZES) if ours else BoringModel()
    rows: Any = [{"tokens": torch.arange(8), "labels": torch.arange(8)}] * 4 if ours else torch.ones(4, 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(strategy, max_steps=2).fit(module, DataLoader(rows, batch_size=2))
    weight = next(module.parameters()).detach().flatten()[:4].tolist()
    return [str(w.message) for w in caught if str(w.message).startswith(("tp=", "ep=", "recompute="))], weight


def jobs() -> list[tuple[list[str], list[float]]]:
    wide = {"tp": 2, "recompute": "full"}
    return [told(MegatronStrategy(**wide)), told(MegatronStrategy(**wide), ours=True), told(MegatronStrategy(ep=2))]  # type: ignore[arg-type]


def test_what_does_nothing_for_a_module_is_told(ranks: Callable[..., list[Any]]) -> None:
    stock = told("auto")
    first, second = ranks(2, jobs)
    (plain, weight), (own, _), (experts, _) = first
    assert plain[0].startswith("tp=2: no parameter of BoringModel is split over tensor-parallel ranks")
    assert plain[1].startswith("recompute='full': nothing in BoringModel recomputes its forward")
    assert experts == ["ep=2: BoringModel has no experts to share over ranks: use ep=1"]
    assert own == []
    assert [said for said, _ in second] == [[], [], []]
    assert weight == stock[1] == second[0][1]
