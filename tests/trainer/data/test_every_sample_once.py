"""Evaluations of data modules read every sample once, whatever the sizes are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_megatron import GPTModule, LlamaModule, MegatronDataModule, MegatronStrategy, MixtralModule
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.testing.trainer import quiet_trainer

LENGTH = 8
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2}
SIZES |= {"ffn_hidden_size": 32, "vocab_size": 64}
Case = tuple[int, int]
"""Number of samples, and ``batch_size``."""


def corpus(folder: Path, samples: int) -> str:
    with IndexedDatasetWriter(str(path := folder / f"{samples}"), np.dtype(np.uint16)) as writer:
        tokens = np.random.RandomState(samples).randint(0, 64, samples * LENGTH + 1)
        writer.add_document(tokens, [len(tokens)])
    return str(path)


def model(kind: str) -> GPTModule:
    L.seed_everything(2, verbose=False)
    if kind == "experts":
        return Experts("mixtral-tiny", **SIZES, head_dim=8, num_experts=2, moe_aux_loss_coeff=0.0)
    return Dense("llama-tiny", **SIZES, loss_reduction=kind)  # type: ignore[arg-type]


class Predicts(GPTModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        super().predict_step(batch, batch_idx)
        return batch["tokens"]


class Dense(Predicts, LlamaModule): ...


class Experts(Predicts, MixtralModule): ...


def evaluated(
    folder: Path, kind: str, cases: Sequence[Case], layout: dict[str, int], micro_batch_size: int | None = None
) -> list[tuple[float, float, dict[int, list[list[int]]]]]:
    """``val_loss``, ``test_loss``, and the samples that this rank has predicted, under the number of its replica."""
    found = []
    for samples, batch_size in cases:
        path = str(folder / f"{samples}")
        data = MegatronDataModule(path, LENGTH, batch_size, val_data_path=path, test_data_path=path)
        trainer = quiet_trainer(MegatronStrategy(micro_batch_size=micro_batch_size, **layout))
        module = model(kind)
        (val,), (test,) = trainer.validate(module, data, verbose=False), trainer.test(module, data, verbose=False)
        rows = [row for row in trainer.predict(module, data) or () if row is not None]
        predicted = {trainer.strategy.data_parallel_rank: torch.cat(rows).tolist()} if rows else {}  # type: ignore[attr-defined]
        found.append((val["val_loss"], test["test_loss"], predicted))
    return found


def check(
    ranks: Any, folder: Path, kind: str, world: int, layout: dict[str, int], *cases: Case, **options: Any
) -> None:
    paths = {samples: corpus(folder, samples) for samples, _ in cases}
    each = ranks(world, evaluated, folder, kind, cases, layout, *options.values())
    module = model(kind).eval()
    for number, (samples, _) in enumerate(cases):
        data = MegatronDataModule(paths[samples], LENGTH, test_data_path=paths[samples])
        data.setup("test")
        expected = list(data._datasets[2])  # type: ignore[arg-type]
        assert len(expected) == samples
        with torch.no_grad():
            losses = [module.loss({name: value[None] for name, value in one.items()}) for one in expected]
        predicted: dict[int, list[list[int]]] = {}
        for own in each:
            for loss in own[number][:2]:
                assert loss == pytest.approx(float(sum(losses)) / samples, abs=1e-5), (layout, cases[number])
            predicted |= own[number][2]
        right = [sample["tokens"].tolist() for sample in expected]
        assert sorted(chain(*predicted.values())) == sorted(right), (layout, cases[number])


@pytest.mark.parametrize("kind", ["sample", "token"])
def test_replicas_share_what_does_not_fill_a_batch(ranks, tmp_path, kind):
    check(ranks, tmp_path, kind, 2, {}, (16, 4), (15, 4), (9, 4), (3, 1), (1, 4))


def test_so_do_replicas_that_share_experts(ranks, tmp_path):
    check(ranks, tmp_path, "experts", 2, {"ep": 2}, (5, 1), (9, 4), (1, 2))


def test_and_stages_of_a_pipeline_with_short_micro_batches(ranks, tmp_path):
    check(ranks, tmp_path, "sample", 2, {"pp": 2}, (7, 6), (1, 4), micro_batch_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2}, {"cp": 2}, {"tp": 2, "ep": 2, "etp": 1}])
def test_and_replicas_of_several_ranks(ranks, tmp_path, layout):
    kind = "experts" if "ep" in layout else "token"
    check(ranks, tmp_path, kind, 4, layout, (1, 2), (5, 1), (7, 2))
