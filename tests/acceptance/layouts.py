"""Models of the acceptance checks: tiny ones over the layouts, and the values that each rank saw.

The checks are numbered; a test named ``test_07_...`` holds check 7. A job is a function that runs on every rank and
returns what it saw there. The global batch is the same in all layouts, so all must come out as one process does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

Ranks = Callable[..., list[Any]]

LIGHTNING_2_6 = RequirementCache("lightning>=2.6")
since_2_6 = pytest.mark.skipif(not LIGHTNING_2_6, reason="Lightning has this from 2.6 on")

GLOBAL_BATCH, LENGTH, VOCABULARY, SEED = 8, 8, 32, 7
# AdamW amplifies what sums in another order leave in the last bit; a fault shows as 1e-3 and more.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Layout:
    """Ranks of a job; with ``stock`` it is Lightning's own single device instead."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    stock: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def batch_size(self) -> int:
        """Of one replica."""
        return GLOBAL_BATCH // self.dp

    def __str__(self) -> str:
        if self.stock:
            return "stock"
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp": self.dp, "ep": self.ep}
        return "".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one"

    def strategy(self, **options: Any) -> Any:
        if self.stock:
            return SingleDeviceStrategy(torch.device("cpu"))
        micro = {"micro_batch_size": self.batch_size // 2} if self.pp > 1 else {}
        return MegatronStrategy(tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep, **micro | options)


STOCK, ONE, TP2, PP2, TP2PP2, DP2 = Layout(stock=True), Layout(), Layout(2), Layout(1, 2), Layout(2, 2), Layout(dp=2)
CP2, EP2 = Layout(cp=2), Layout(dp=2, ep=2)
LAYOUTS = (ONE, TP2, PP2, TP2PP2, CP2, DP2, EP2)
SPREAD = LAYOUTS[1:]


def language_model(kind: type[GPTModule] = GPTModule, preset: str = "mixtral-tiny", **options: Any) -> Any:
    """Two layers, weights large enough for gradients that matter; the same weights in every layout.

    By default it has two experts, of which each token visits both: ``ep`` has something to share out, and rounding
    cannot send a token elsewhere.
    """
    seed_everything(SEED, verbose=False)
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    sizes |= {"max_position_embeddings": 16, "vocab_multiple": 2, "init_std": 0.1}
    if not preset.startswith("gpt"):
        sizes |= {"num_query_groups": 2, "ffn_hidden_size": 24, "head_dim": 8}
    if preset.startswith("mixtral"):
        sizes |= {"num_experts": 2, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.0}
    return kind(preset, **{"lr": 1e-3} | sizes | options)


def texts(samples: int) -> list[dict[str, Tensor]]:
    """Random tokens, each sample with its number."""
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    return [{"tokens": t[:-1], "labels": t[1:], "number": torch.tensor(i)} for i, t in enumerate(tokens)]


def shard(layout: Layout, rows: Sequence[Any]) -> Sequence[Any]:
    """The samples of this rank, so that the batches of all replicas together are those of one process, in order."""
    rank = dist.get_rank() // (layout.tp * layout.cp) % layout.dp if dist.is_initialized() else 0
    return rows[rank :: layout.dp]


def loader(layout: Layout, samples: int = 4 * GLOBAL_BATCH, **options: Any) -> DataLoader[Any]:
    rows = shard(layout, texts(samples))
    return DataLoader(rows, **{"batch_size": layout.batch_size} | options)  # type: ignore[arg-type]


def trainer_for(layout: Layout, strategy: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """A quiet Trainer whose loaders keep their order."""
    quiet: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False}
    return quiet_trainer(layout.strategy(**strategy or {}), **quiet | options)


def fit(
    layout: Layout,
    module: Any = None,
    batches: Any = None,
    validation: Any = None,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Trainer, Recorder]:
    """Train; by default one epoch of four steps."""
    recorder = Recorder()
    trainer = trainer_for(layout, strategy, **{"logger": recorder} | options)
    batches = loader(layout) if batches is None else batches
    trainer.fit(language_model() if module is None else module, batches, validation)
    return trainer, recorder


def series(layout: Layout, names: Sequence[str] = ("train_loss",), **options: Any) -> dict[str, list[float]]:
    """Train and return what was logged."""
    _, recorder = fit(layout, **options)
    return {name: recorder.series(name) for name in names}


def on_all(ranks: Ranks, layout: Layout, job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Result of a job, which must be the same on all ranks."""
    results = ranks(layout.world_size, job, layout, *args, **kwargs)
    assert all(result == results[0] for result in results), (str(layout), results)
    return results[0]


def distinct(results: Sequence[Any]) -> list[Any]:
    """Different results, in the order of ranks."""
    return [result for index, result in enumerate(results) if result not in results[:index]]


def flat(lists: Iterable[Sequence[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def assert_close(ours: Any, expected: Any, rtol: float = ROUNDING) -> None:
    """Numbers in dicts and lists of equal shape."""
    if isinstance(expected, dict):
        assert ours.keys() == expected.keys()
        for name in expected:
            assert_close(ours[name], expected[name], rtol)
    elif isinstance(expected, list | tuple):
        assert len(ours) == len(expected)
        for mine, its in zip(ours, expected, strict=True):
            assert_close(mine, its, rtol)
    else:
        assert ours == pytest.approx(expected, rel=rtol, abs=1e-7)


def trained(layout: Layout, *callbacks: Callback, module: Any = None, **options: Any) -> Any:
    """Train with checkpoints on; four steps of an epoch, validated at its end."""
    return fit(
        layout, module, validation=loader(layout, 16), callbacks=list(callbacks), enable_checkpointing=True, **options
    )
