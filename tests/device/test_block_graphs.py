"""Graphs of compiled blocks where collectives may not be in graphs, and batches that make no new ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from habana_frameworks.torch.utils.internal import is_lazy
from lightning.pytorch import seed_everything
from torch import Tensor
from torch._dynamo.trace_rules import is_callable_disallowed
from torch.utils.data import DataLoader
from tracing import compiled

from lightning_megatron import LlamaModule, MegatronHPUStrategy
from lightning_megatron.lightning.compat._private import CompilerCounts
from lightning_megatron.lightning.step.graphs import BlockGraphs, graph_line
from lightning_megatron.testing.block_graphs import CASES, PARTS, Case, count, gradients
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

pytestmark = pytest.mark.skipif(is_lazy(), reason="nothing is compiled in the lazy mode")

Ranks = Callable[..., list[Any]]
HPU = torch.device("hpu")


def train(rows: int = 8, epochs: int = 1, **options: Any) -> list[float]:
    """Losses and norms of epochs with a validation each; batches of 4, the last may be smaller."""
    seed_everything(5, verbose=False)
    sizes: dict[str, Any] = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61}
    module = LlamaModule("llama-tiny", lr=1e-3, vocab_multiple=4, **sizes)
    ids = torch.randint(61, (rows, 17), generator=torch.Generator().manual_seed(3))
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in ids]
    recorder = Recorder()
    strategy = MegatronHPUStrategy(**options)
    trainer = quiet_trainer(strategy, accelerator="hpu", max_epochs=epochs, gradient_clip_val=1.0, logger=recorder)
    trainer.fit(module, *(DataLoader(samples, batch_size=4) for _ in range(2)))  # type: ignore[arg-type]
    return [x for name in ("train_loss", "grad_norm", "val_loss") for x in recorder.series(name)]


def test_the_bridge_disallows_collectives_in_graphs() -> None:
    names = [
        *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier"),
        *("batch_isend_irecv", "broadcast", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter"),
        *("reduce_scatter_tensor", "scatter", "send"),
    ]
    assert [name for name in names if not is_callable_disallowed(getattr(dist, name))] == []
    assert not is_callable_disallowed(dist.get_rank)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 1": (1, {}),
    "tp 2": (2, {"tp": 2, "sequence_parallel": False}),
    "tp 2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
}


MOST_GRAPHS_ON_RANKS = 24 if torch.__version__.startswith("2.13") else 26
"""Of a block, the embedding and the head, in training and in validation."""


def both(options: dict[str, Any]) -> tuple[list[float], list[float], int, list[str]]:
    return train(**options), *compiled(train, **options, compile="aot_eager")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "tp 2" else ()) for name in LAYOUTS]
)
def test_graphs_and_breaks_of_a_run(ranks: Ranks, name: str) -> None:
    world, options = LAYOUTS[name]
    for plain, traced, graphs, breaks in ranks(world, both, options):
        assert traced == pytest.approx(plain, rel=1e-5)
        assert bool(breaks) == (world > 1)
        assert graphs == 6 if world == 1 else 6 < graphs <= MOST_GRAPHS_ON_RANKS


WHOLE = ((1, 0), (1, 0), (1, 0))
ON_TWO = ((6, 13), (1, 5), (7, 9))
GRAPHS_AND_BREAKS = {
    "tp 1": WHOLE,
    "tp 1, bf16": WHOLE,
    "tp 1, GPT with dropout": WHOLE,
    "tp 1, recompute selective": WHOLE,
    "tp 1, recompute mlp": ((2, 2), (1, 0), (1, 0)),
    "tp 2": ON_TWO,
    "tp 2, sequence parallel": ON_TWO,
    "tp 2, sequence parallel, recompute selective": ON_TWO,
    "cp 2, a2a": WHOLE,
    "cp 2, p2p": ((9, 12), (1, 0), (1, 0)),
    "experts, moe_dynamic": WHOLE,
    "experts, capacity bins": ((4, 4), (1, 0), (1, 0)),
}
"""Of a block, the embedding and the head: the table in ``docs/compiled-graphs.md``."""


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another torch breaks graphs elsewhere")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiled_parts_compute_the_same_in_as_few_graphs_as_before(ranks: Ranks, case: Case) -> None:
    found = ranks(case.ranks, counted, case)
    for part, expected in zip(PARTS, GRAPHS_AND_BREAKS[case.name], strict=True):
        most = max((each[part] for each in found), key=lambda counts: counts.graphs)  # on a ring they see other keys
        assert (most.graphs, sum(most.breaks.values())) == expected, (part, list(most.breaks))


def counted(case: Case) -> dict[str, CompilerCounts]:
    """Graphs and breaks of the parts, with the loss and gradients of ones that are not compiled."""
    found, plain = count(case, "hpu"), gradients(case, None, "hpu")
    near = {"rtol": 2**-6, "atol": 2**-9} if case.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    assert all(grad.any() for grad in plain.values())
    for part in PARTS:
        torch.testing.assert_close(gradients(case, part, "hpu"), plain, **near)
    return found


def test_an_odd_batch_gets_a_graph_when_it_comes_again(ranks: Ranks) -> None:
    ((even, odd, again),) = ranks(1, _graphs_of_runs)
    assert even == odd == 6, "block, embedding and head, in training and validation"
    assert again == 12


def _graphs_of_runs() -> list[int]:
    runs = ({"rows": 8}, {"rows": 10}, {"rows": 10, "epochs": 2})
    return [compiled(train, **given, compile="aot_eager")[1] for given in runs]


def test_each_length_has_a_graph_of_its_own(ranks: Ranks) -> None:
    """From the second length on torch would make one graph for all, with sizes that are symbols."""
    assert ranks(1, _graphs_of_three_lengths) == [3 * 3]  # of block, embedding and head


def _graphs_of_three_lengths() -> int:
    def run() -> None:
        sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61}
        module = LlamaModule("llama-tiny", vocab_multiple=4, **sizes)
        batches = [torch.zeros(2, length, dtype=torch.long) for length in (16, 16, 12, 12, 8, 8)]
        loader = DataLoader([{"tokens": ids, "labels": ids} for ids in batches], batch_size=None)  # type: ignore[arg-type]
        quiet_trainer(MegatronHPUStrategy(compile="aot_eager"), accelerator="hpu", max_epochs=1).fit(module, loader)

    return compiled(run)[1]


def test_shapes_that_come_again_are_compiled() -> None:
    graphs, large, small = BlockGraphs(True, HPU), torch.zeros(4, 8), torch.zeros(2, 8)

    def may_compile(stage: str, batch: Any, *rest: Any) -> bool:
        found: list[Tensor] = []
        with graphs.batch(stage, batch, *rest):
            compiled(torch.compile(lambda x: found.append(x) or x + 1, backend="eager"), small)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0

    assert may_compile("training", {"tokens": large}, 0)
    assert not may_compile("training", {"tokens": small}, 1)
    assert may_compile("training", {"tokens": small}, 2)
    assert may_compile("validation_step", {"tokens": small}, 0, 0)
    assert not may_compile("validation_step", {"tokens": large}, 1, 0)
    assert may_compile("validation_step", {"tokens": large}, 0, 1)


def test_the_log_has_a_line_about_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        train(compile="aot_eager")
    (line,) = (record.getMessage() for record in caplog.records if "breaks so far" in record.getMessage())
    assert line.startswith("torch.compile: ")
    assert "0 breaks so far" in line


def test_breaks_are_counted_by_reason() -> None:
    found = CompilerCounts(5, {"a\nlong one": 3, "b": 1}).since(CompilerCounts(1, {"b": 1}))
    assert found == CompilerCounts(4, {"a\nlong one": 3})
    assert graph_line(found).endswith("4 graphs and 3 breaks so far; equal blocks share their graphs (3 x a)")
