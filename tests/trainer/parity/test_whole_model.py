"""Console output of a run: numbers of the whole model, not of one rank."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, ThroughputMonitor
from tiny import tiny_llama
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy, ParallelLayout, Throughput
from lightning_megatron.lightning.monitoring.model_summary import count_parameters, layout_text, start_line
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

Ranks = Callable[..., list[Any]]
CONFIG = tiny_llama(vocab_multiple=4)
EXPERTS = tiny_llama(vocab_multiple=4, num_experts=4)


class Heard(logging.Handler):
    """Lines of Lightning's loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


class Quiet(GPTModule):
    """Logs the losses alone."""

    logged = ()


def told(
    config: Any, options: dict[str, Any], callbacks: list[Any], stage: str = "fit"
) -> tuple[list[str], list[str], int]:
    """Lines and warnings of a run, and the parameters that this rank holds."""
    rows = [{"tokens": row[:-1], "labels": row[1:]} for row in torch.arange(8 * 9).reshape(8, 9) % 40]
    heard, logger = Heard(), logging.getLogger("lightning.pytorch")
    logger.addHandler(heard)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            trainer = quiet_trainer(
                MegatronStrategy(micro_batch_size=1, **options),
                max_steps=2,
                accumulate_grad_batches=2,
                callbacks=[*callbacks, Throughput(1)],
                logger=Recorder(),
            )
            module = Quiet(config)
            getattr(trainer, stage)(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
    assert not {"lr", "grad_norm"} & trainer.callback_metrics.keys()
    assert stage != "fit" or "tok/s" in trainer.progress_bar_metrics
    return heard.lines, [str(warning.message) for warning in found], sum(p.numel() for p in module.parameters())


LAYOUTS = {
    "tp2": (CONFIG, {"tp": 2}, "tp 2 x dp 1, sequence parallel", "global batch 4 = 2 x 1 x 2 (batch, dp, accumulated)"),
    "pp2": (CONFIG, {"pp": 2}, "pp 2 x dp 1", "global batch 4 = 2 x 1 x 2 (batch, dp, accumulated)"),
    "dp2": (CONFIG, {}, "dp 2", "global batch 8 = 2 x 2 x 2 (batch, dp, accumulated)"),
    "ep2": (EXPERTS, {"ep": 2}, "dp 2, ep 2", "global batch 8 = 2 x 2 x 2 (batch, dp, accumulated)"),
    "tied": (
        CONFIG.replace(tie_embeddings=True),
        {"pp": 2},
        "pp 2 x dp 1",
        "global batch 4 = 2 x 1 x 2 (batch, dp, accumulated)",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_begins_with_the_size_of_the_whole_model(ranks: Ranks, name: str) -> None:
    config, options, layout, batch = LAYOUTS[name]
    results = ranks(2, told, config, options, [ModelSummary(), ThroughputMonitor(batch_size_fn=len)])
    lines, warned, _ = results[0]
    total, held = config.num_parameters(), max(count for _, _, count in results)
    shown = f"{total / 1e3:.1f} K"
    upto = "up to " if "pp" in options else ""
    line = f"MegatronStrategy: {layout}, {shown} parameters, {upto}{held / 1e3:.1f} K a rank, {batch}"
    assert [x for x in lines if x.startswith("MegatronStrategy")] == [line]
    assert not any("Total params" in x for x in lines), "of one rank, or said above"
    cut = {"tp2": 2, "pp2": 2, "tied": 2}.get(name)
    advice = f"ThroughputMonitor counts the samples of each rank, and {cut} ranks read the same"
    assert any(advice in x for x in warned) == (cut is not None)
    assert not any(x.startswith("MegatronStrategy") for x in results[1][0]), "one rank speaks"


class Own(ModelSummary):
    """A user's."""


def test_other_summaries_stay(ranks: Ranks) -> None:
    for summary in (Own(), ModelSummary(max_depth=2)):
        lines, _, _ = ranks(2, told, CONFIG, {"tp": 2}, [summary])[0]
        assert any("Total params" in x for x in lines)


def test_a_default_summary_stays_on_one_process() -> None:
    lines, _, _ = told(CONFIG, {}, [ModelSummary()])
    assert any("Total params" in x for x in lines)
    assert not any(x.startswith("MegatronStrategy: dp 1") for x in lines)


def test_an_evaluation_says_its_strategy_on_one_process_too() -> None:
    lines, _, _ = told(CONFIG, {}, [], "validate")
    assert any(x.startswith("MegatronStrategy: dp 1, ") for x in lines)


def test_one_process_counts_what_the_formula_counts() -> None:
    module = GPTModule(EXPERTS)
    module.configure_model()
    total, trained, held = count_parameters(module, module.mesh)
    assert total == trained == held == EXPERTS.num_parameters()
    layer = module.model.layers["0"].requires_grad_(False)  # type: ignore[union-attr]
    frozen = count_parameters(module, module.mesh)
    assert frozen == (total, total - sum(parameter.numel() for parameter in layer.parameters()), total)
    line = start_line(ParallelLayout().resolve(1), frozen, None, 1)
    assert f"{total / 1e3:.1f} K parameters ({frozen[1] / 1e3:.1f} K trained), " in line
    assert "trained" not in start_line(ParallelLayout().resolve(1), (total, total, total), None, 1)


@pytest.mark.parametrize(
    ("layout", "world", "text"),
    [
        (ParallelLayout(), 1, "dp 1"),
        (ParallelLayout(tp=2, pp=2, cp=2, vpp=2), 16, "tp 2 x pp 2 x cp 2 x dp 2, vpp 2, sequence parallel"),
        (ParallelLayout(tp=2, ep=2, etp=1, sequence_parallel=True), 8, "tp 2 x dp 4, ep 2, etp 1, sequence parallel"),
        (ParallelLayout(tp=2, sequence_parallel=False), 2, "tp 2 x dp 1"),
    ],
)
def test_a_layout_in_words(layout: ParallelLayout, world: int, text: str) -> None:
    assert layout_text(layout.resolve(world)) == text
