"""``example_input_array`` with loggers of graphs and summaries: a run trains as without, and names what is missing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer

Ranks = Callable[..., list[Any]]
pytestmark = pytest.mark.skipif(kind_in_tests().type != "cpu", reason="the start of a run is the same on a device")
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "ffn_hidden_size": 32,
    "vocab_size": 64,
}
NO_GRAPH, NO_SIZES = "TensorBoardLogger(log_graph=True) writes no graph", "ModelSummary shows no sizes of inputs"


class Llama(LlamaModule):
    """Notes if it has its example in the hooks of a run."""

    def __init__(self) -> None:
        super().__init__("llama-tiny", **SIZES, num_query_groups=2)
        self.example_input_array = torch.arange(16)[None]
        self.had: list[bool] = []

    def on_train_start(self) -> None:
        self.had.append(self.example_input_array is not None)

    def on_test_start(self) -> None:
        self.had.append(self.example_input_array is not None)


class Plain(LightningModule):
    """A module of the user's own, which torch can trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.example_input_array = nn.Linear(4, 1), torch.ones(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def has_graph(folder: Path) -> bool:
    """True if an event file holds a graph: a layer's name stands in it."""
    return any(b"Linear[layer]" in file.read_bytes() for file in folder.rglob("events.*"))


def fitted(layout: dict[str, Any], **options: Any) -> tuple[dict[str, Tensor], list[bool], list[str]]:
    """Weights, hooks that had the example, and warnings, of a fit and a test."""
    torch.manual_seed(0)
    rows = [{"tokens": (torch.arange(16) + i) % 60, "labels": (torch.arange(1, 17) + i) % 60} for i in range(4)]
    module, trainer = Llama(), quiet_trainer(MegatronStrategy(**layout), max_epochs=1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(rows, 2))  # type: ignore[arg-type]
        trainer.test(module, DataLoader(rows, 2), verbose=False)  # type: ignore[arg-type]
    said = [text for each in caught for text in (NO_GRAPH, NO_SIZES) if text in str(each.message)]
    return {name: p.detach().clone() for name, p in module.named_parameters()}, module.had, said


def graphs_and_none(folder: Path, layouts: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    found = []
    for layout in layouts:
        summary = {"callbacks": [ModelSummary(max_depth=2)], "enable_model_summary": True}
        logged = fitted(layout, logger=TensorBoardLogger(folder, log_graph=True), **summary)
        found.append((logged, fitted(layout)))
    return found


def test_a_graph_that_cannot_be_traced_is_left_out_with_a_warning(ranks: Ranks, tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {"cp": 2}]
    for rank, found in enumerate(ranks(2, graphs_and_none, tmp_path, layouts)):
        for layout, ((weights, had, said), (without, *_)) in zip(layouts, found, strict=True):
            torch.testing.assert_close(weights, without, rtol=0, atol=0)
            assert had == [True, True]
            both = [NO_GRAPH, NO_SIZES, NO_GRAPH] if "pp" in layout else [NO_GRAPH] * 2
            assert said == (both if rank == 0 else [])


def test_so_is_that_of_a_model_of_this_package_on_one_process(tmp_path: Path) -> None:
    ((weights, had, said), (without, *_)) = graphs_and_none(tmp_path, [{}])[0]
    torch.testing.assert_close(weights, without, rtol=0, atol=0)
    assert (had, said) == ([True, True], [NO_GRAPH] * 2)


def plain_graph(folder: Path) -> None:
    logger = TensorBoardLogger(folder, log_graph=True)
    trainer = quiet_trainer(MegatronStrategy(), max_epochs=1, logger=logger)
    trainer.fit(Plain(), DataLoader(torch.ones(8, 4), 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_plain_module_has_its_graph(ranks: Ranks, tmp_path: Path, processes: int) -> None:
    if processes == 1:
        plain_graph(tmp_path)
    else:
        ranks(processes, plain_graph, tmp_path)
    assert has_graph(tmp_path)
