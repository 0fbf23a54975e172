"""A head, a loss and a parameter of a user's own beside each of our modules: every layout against one process.

``hidden`` gives whole hidden states, of which all ranks compute the same. Taken from inside the model instead, the
head's gradient is that of a shard of the sequence, and the first step says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from parity import Curve
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, LlamaModule, MegatronStrategy, MixtralModule
from lightning_megatron.params import named_specs
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from tests.routing import NearestTie

Ranks = Callable[..., list[Any]]
STEPS, BATCH, LENGTH, VOCABULARY, SEED, WIDTH = 10, 8, 12, 61, 25, 32
BOUND = 1e-5
OWN = {"value.weight", "value.bias", "slope"}
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 4, "vocab_size": VOCABULARY}
SIZES |= {"vocab_multiple": 4, "init_std": 0.1, "max_position_embeddings": 16, "lr": 1e-3, "weight_decay": 0.1}
EXPERTS: dict[str, Any] = {"ffn_hidden_size": 32, "num_query_groups": 2, "head_dim": 8, "num_experts": 4}
EXPERTS |= {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}


class Own:
    """Module of a user with a head, a loss of its output, and a parameter."""

    def configure_model(self) -> None:
        super().configure_model()  # type: ignore[misc]
        if not hasattr(self, "value"):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                self.value = nn.Linear(WIDTH, 1)
                self.slope = nn.Parameter(torch.tensor([1.5]))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.hidden(batch)  # type: ignore[attr-defined]
        assert hidden.shape == (*batch["tokens"].shape, WIDTH)
        losses = self.token_losses(batch, hidden)  # type: ignore[attr-defined]
        said = self.slope * self.value(hidden).squeeze(-1)
        own = F.mse_loss(said, batch["tokens"] / VOCABULARY)
        hard = (losses * losses.detach().sigmoid()).mean()
        loss: Tensor = self.loss(batch, hidden) + 3 * own + hard  # type: ignore[attr-defined]
        self.log("train_loss", loss, sync_dist=True)  # type: ignore[attr-defined]
        return loss


class OwnGPT(Own, GPTModule):
    preset, sizes = "gpt-tiny", SIZES


class OwnLlama(Own, LlamaModule):
    preset, sizes = "llama-tiny", SIZES | {"num_query_groups": 2, "ffn_hidden_size": 64}


class OwnMixtral(Own, MixtralModule):
    preset, sizes = "mixtral-tiny", SIZES | EXPERTS


MODULES = {module.__name__: module for module in (OwnGPT, OwnLlama, OwnMixtral)}


@dataclass(frozen=True)
class Run:
    """A module on a layout."""

    module: str
    layout: tuple[tuple[str, Any], ...] = ()

    @property
    def dp(self) -> int:
        return int(dict(self.layout).get("dp", 1))

    @property
    def world_size(self) -> int:
        return self.dp * prod(size for axis, size in self.layout if axis in ("tp", "pp", "cp"))


@dataclass(frozen=True)
class Found:
    """Values that a run reports on a rank, and the parameters that it holds whole."""

    curve: Curve
    whole: dict[str, Tensor]


def run(module: str, **layout: Any) -> Run:
    return Run(module, tuple(layout.items()))


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, ::5] = -100
    return [{"tokens": t[:-1], "labels": y} for t, y in zip(tokens, labels, strict=True)]


def train(runs: Sequence[Run]) -> list[Found]:
    return [found(run) for run in runs]


def found(run: Run) -> Found:
    seed_everything(SEED, verbose=False)
    kind = MODULES[run.module]
    module, recorder, tie = kind(kind.preset, **kind.sizes), Recorder(), NearestTie()
    # One sample a micro-batch: the losses that balance experts are those of a micro-batch.
    layout = {name: value for name, value in run.layout if name != "dp"}
    strategy = MegatronStrategy(micro_batch_size=1, bucket_size=5000, **layout)
    trainer = quiet_trainer(strategy, max_epochs=1, gradient_clip_val=1.0, logger=recorder, callbacks=[tie])
    trainer.fit(module, DataLoader(samples(), batch_size=BATCH // run.dp, shuffle=True))  # type: ignore[arg-type]
    if not run.layout:
        tie.check(1e-4, run.module)
    strategy.finish_param_gather()
    ranks = strategy.mesh.shard_ranks
    whole = {n: p.detach().clone() for n, p, spec in named_specs(module) if not spec.sharded_dims(ranks)}
    return Found(Curve(recorder.series("train_loss"), recorder.series("grad_norm")), whole)


@cache
def expected(ranks: Ranks) -> dict[str, Found]:
    (alone,) = ranks(1, train, [run(name) for name in MODULES])
    assert all(min(one.curve.norms) > 1.0 for one in alone), "clipping is meant to happen"
    return dict(zip(MODULES, alone, strict=True))


def check(ranks: Ranks, runs: Sequence[Run]) -> None:
    right = expected(ranks)
    (size,) = {one.world_size for one in runs}
    by_rank = ranks(size, train, runs)
    for i, one in enumerate(runs):
        found = [of_rank[i] for of_rank in by_rank]
        for rank in found:
            assert rank.curve.deviation(right[one.module].curve) <= BOUND, (one, rank.curve, right[one.module].curve)
            for name in OWN:
                torch.testing.assert_close(rank.whole[name], right[one.module].whole[name], rtol=1e-4, atol=1e-6)
        for first, second in combinations(found, 2):
            both = first.whole.keys() & second.whole.keys()
            assert both >= OWN, one
            assert not [name for name in both if not torch.equal(first.whole[name], second.whole[name])], one


@pytest.mark.slow
def test_a_head_on_llama_with_sequence_parallelism_and_in_a_pipeline(ranks: Ranks) -> None:
    check(ranks, [run("OwnLlama", tp=2), run("OwnLlama", pp=2)])


@pytest.mark.exhaustive
def test_own_head_loss_and_parameter_on_every_module_and_layout(ranks: Ranks) -> None:
    dense = [run(name, **layout) for name in ("OwnGPT", "OwnLlama") for layout in DENSE]
    check(ranks, [*dense, *(run("OwnMixtral", **layout) for layout in SPARSE)])


DENSE: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "sequence_parallel": False},
    {"pp": 2},
    {"pp": 2, "pipeline_schedule": "zero-bubble"},
    {"cp": 2},
    {"dp": 2},
]
SPARSE: list[dict[str, Any]] = [
    {"tp": 2, "etp": 1},
    {"tp": 2, "etp": 1, "ep": 2},
    {"pp": 2},
    {"cp": 2},
    {"dp": 2, "ep": 2},
]
FOUR: list[dict[str, Any]] = [{"tp": 2, "pp": 2}, {"tp": 2, "cp": 2}, {"pp": 2, "cp": 2}, {"pp": 2, "dp": 2}]


@pytest.mark.exhaustive
def test_own_head_loss_and_parameter_where_two_kinds_of_parallelism_meet(ranks: Ranks) -> None:
    check(ranks, [run(name, **layout) for name in ("OwnGPT", "OwnLlama") for layout in FOUR])
    grids: list[dict[str, Any]] = [{"tp": 2, "etp": 1, "pp": 2}, {"pp": 2, "dp": 2, "ep": 2}]
    check(ranks, [run("OwnMixtral", **grid) for grid in grids])


# As the page says


def blocks() -> list[str]:
    page = (Path(__file__).parents[3] / "docs" / "batches.md").read_text()
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def as_written() -> list[dict[str, Any]]:
    """The page's head and its step that counts tokens, on several layouts: first value of the head, and its end."""
    head, step = blocks()
    names: dict[str, Any] = {"LlamaModule": LlamaModule, "nn": nn, "F": F}
    exec(head, names)
    exec(step, names)
    counting = type("Counting", (names["WithValues"],), {"training_step": names["training_step"]})
    masked = [{**sample, "loss_mask": (sample["labels"] != -100).float()} for sample in samples()[: 2 * BATCH]]
    found = []
    for kind in (names["WithValues"], counting):
        for layout in ({"tp": 2}, {"pp": 2}):
            seed_everything(SEED, verbose=False)
            module, recorder = kind("llama-tiny", **OwnLlama.sizes), Recorder()
            strategy = MegatronStrategy(micro_batch_size=4, **layout)  # type: ignore[arg-type]
            trainer = quiet_trainer(strategy, max_epochs=1, logger=recorder)
            trainer.fit(module, DataLoader(masked, batch_size=BATCH))  # type: ignore[arg-type]
            found.append({"norms": recorder.series("grad_norm"), "value": module.value.weight.detach().clone()})
    return found


def test_what_the_page_shows_runs_and_keeps_copies_equal(ranks: Ranks) -> None:
    first, second = ranks(2, as_written)
    for one, other in zip(first, second, strict=True):
        assert one["norms"] == other["norms"]
        assert torch.equal(one["value"], other["value"])
    for tp, pp in (first[:2], first[2:]):
        assert tp["norms"] == pytest.approx(pp["norms"], rel=1e-5)
