"""A user's own ``torch.utils.checkpoint`` around a model or its blocks, against the same program without it.

Nothing may differ in a bit: losses, gradients, statistics of experts, and what generators draw afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import preset
from lightning_megatron.moe.router import Router
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.stage import StageBoundary
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer
from lightning_megatron.testing.workers import WorkerError

Ranks = Callable[..., list[Any]]
STEPS, BATCH, LENGTH = 2, 4, 8
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 61}
SIZES |= {"vocab_multiple": 4, "hidden_dropout": 0.2, "attention_dropout": 0.2, "init_std": 0.2}
EXPERTS: dict[str, Any] = {"num_query_groups": 2, "ffn_hidden_size": 24, "moe_router_score": "sigmoid"}
EXPERTS |= {"moe_input_jitter_eps": 0.1, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
EXPERTS |= {"moe_load_balancing": "global_aux_loss", "moe_expert_bias_update_rate": 0.1, "mtp_num_layers": 1}
BINS: dict[str, Any] = {"moe_capacity_bins": 2, "moe_capacity_bins_alignment": 1}


def around_blocks(module: GPTModule, reentrant: bool) -> None:
    """Let each block run its forward under a checkpoint, as users do with models that have no switch for it."""

    def again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=reentrant)

    assert module.model is not None
    for block in module.model.layers.values():
        block.forward = partial(again, block.forward)


class Program(GPTModule):
    """A language model with a checkpoint of its own, ``how``; writes down the gradients of each step."""

    def __init__(self, config: str, how: str | None, by_hand: bool = False, **options: Any) -> None:
        super().__init__(config, lr=1e-2, **(SIZES | options))
        self.how, self.found = how, list[dict[str, Tensor]]()
        self.automatic_optimization = not by_hand

    def configure_model(self) -> None:
        super().configure_model()
        if self.how in ("blocks", "blocks, reentrant"):
            around_blocks(self, reentrant=self.how != "blocks")

    def loss(self, batch: Any, hidden: Tensor | None = None) -> Tensor:
        if self.how == "model" and self.training:
            return checkpoint(super().loss, batch, use_reentrant=False)
        if self.how == "other numbers":
            return checkpoint(super().loss, batch, use_reentrant=False, preserve_rng_state=False)
        return super().loss(batch)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        self.manual_backward(loss := self.loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.found.append({name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None})


def data(packed: bool) -> Any:
    documents = {"segment_ids": torch.tensor([1, 1, 1, 2, 2, 3, 3, 3])} if packed else {}
    tokens = torch.randint(61, (STEPS * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return [{"tokens": row[:-1], "labels": row[1:], **documents} for row in tokens]


def outcome(config: str, how: str | None, layout: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Everything that a run of two steps leaves on this rank."""
    options, packed = {name: options[name] for name in options if name != "packed"}, "packed" in options
    seed_everything(5, verbose=False)
    module, recorder = Program(config, how, **options), Recorder()
    trainer = quiet_trainer(MegatronStrategy(**layout), max_epochs=1, logger=recorder)
    size = BATCH // (2 if "ep" in layout else 1)
    trainer.fit(module, DataLoader(data(packed), batch_size=size))
    found: dict[str, Any] = {"logged": [{**row} for row in recorder.rows], "next": torch.rand(3)}
    for step, gradients in enumerate(module.found):
        found |= {f"step {step}: {name}": gradient for name, gradient in gradients.items()}
    found |= {name: value.detach().clone() for name, value in module.state_dict().items()}
    for name, part in module.named_modules():
        if isinstance(part, Router):
            found[f"load of {name}"] = part.load.take(torch.device("cpu"))
    return found


def differing(config: str, layout: dict[str, Any], options: dict[str, Any], hows: list[str]) -> dict[str, list[str]]:
    plain = outcome(config, None, layout, options)
    wrong = {}
    for how in hows:
        again = outcome(config, how, layout, options)
        names = [name for name in plain.keys() | again.keys() if not same(plain.get(name), again.get(name))]
        if names:
            wrong[how] = sorted(names)
    return wrong


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


HOWS = ["model", "blocks", "blocks, reentrant"]


PACKED: dict[str, Any] = {"packed": True, "attention_dropout": 0.0}
PROGRAMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("gpt-tiny", {"micro_batch_size": 2}, {}),
    "experts": ("mixtral-tiny", {"micro_batch_size": 2}, EXPERTS | BINS),
    "packed documents": ("mixtral-tiny", {}, EXPERTS | PACKED),
    "optimized by hand": ("mixtral-tiny", {}, EXPERTS | {"by_hand": True}),
}


NOT_ON_GAUDI = pytest.mark.skipif(kind_in_tests().type == "hpu", reason="packed documents are refused there")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=NOT_ON_GAUDI) if name == "packed documents" else name for name in PROGRAMS
])  # fmt: skip
def test_a_checkpoint_around_model_or_blocks_changes_no_bit(ranks: Ranks, name: str) -> None:
    assert ranks(1, differing, *PROGRAMS[name], HOWS) == [{}]


LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp": ("gpt-tiny", {"tp": 2, "sequence_parallel": False, "micro_batch_size": 2}, {}),
    "tp, sequence parallel": ("mixtral-tiny", {"tp": 2, "micro_batch_size": 2}, EXPERTS),
    "tp, recomputed": ("mixtral-tiny", {"tp": 2, "recompute": ["moe", "attention"]}, EXPERTS),
    "ep": ("mixtral-tiny", {"ep": 2}, EXPERTS),
    "cp": ("gpt-tiny", {"cp": 2}, {"attention_dropout": 0.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("tp, sequence parallel", marks=pytest.mark.gate), *list(LAYOUTS)[:1],
                                  *list(LAYOUTS)[2:]])  # fmt: skip
def test_a_checkpoint_changes_no_bit_on_two_ranks(ranks: Ranks, name: str) -> None:
    assert ranks(2, differing, *LAYOUTS[name], HOWS) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_checkpoint_around_blocks_changes_no_bit_of_a_pipeline(ranks: Ranks, schedule: str) -> None:
    layout = {"pp": 2, "micro_batch_size": 2, "pipeline_schedule": schedule}
    assert ranks(2, differing, "mixtral-tiny", layout, EXPERTS, HOWS[1:]) == [{}, {}]


def test_a_checkpoint_that_draws_other_numbers_is_refused_by_name(ranks: Ranks) -> None:
    with pytest.raises(WorkerError, match=r"preserve_rng_state=False.*count twice.*pass recompute"):
        ranks(1, outcome, "mixtral-tiny", "other numbers", {}, EXPERTS)


def test_a_checkpoint_around_a_stage_is_refused_by_name() -> None:
    boundary = StageBoundary(2)
    config = preset("gpt-tiny").replace(**SIZES)
    model = GPTModel(config, parts=LayerSplit().stages(2, 2)[1:], boundary=boundary)
    tokens, hidden = torch.ones(1, LENGTH, dtype=torch.int64), torch.ones(LENGTH, 1, 16, requires_grad=True)
    with boundary.at(1, hidden):
        loss = checkpoint(model, tokens, tokens, use_reentrant=False)
    with pytest.raises(ConfigError, match=r"torch.utils.checkpoint=.*around the model's call.*recompute='full'"):
        loss.backward()
