"""No operation of a step makes the host wait for the device, so that its queue never runs empty.

Shown without a device: on the CPU by the operators that are called, and on ``meta`` tensors, which have no values that
the host could read, with the implementations that would be chosen on CUDA. On a simulated Gaudi, copies from the host
that block count too, and reads of the host's own tensors do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_waits import HostWaits
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.device import CPU
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import configuration
from lightning_megatron.ops.registry import Ops
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "vocab_multiple": 4}
GPT = {"config": "gpt-tiny"}
LLAMA = {"config": "llama-tiny", "num_query_groups": 2, "ffn_hidden_size": 48}
MIXTRAL = LLAMA | {"config": "mixtral-tiny", "num_experts": 4}

OF_THE_HOST = {
    "_local_scalar_dense in lightning/modules/text_batch.py:<genexpr>",  # ids, before they go to the device
    "_local_scalar_dense in lightning/streams/batch_watch.py:_step",  # votes of ranks, a tensor of the host
    "equal in lightning/streams/batch_watch.py:compare",  # hashes of batches
    "_local_scalar_dense in lightning/stopping/agreement.py:answer",  # votes on signals
    "_local_scalar_dense in lightning/step/stage_work.py:__init__",  # a seed
    "_local_scalar_dense in lightning/step/log_capture.py:_has_changed",  # a message of another host
}
"""Reads of tensors that are on the host on every device."""
DOCUMENTS = "documents.py"
"""File whose functions read bounds of documents, which stay on the host."""
BLOCKS_NOT = {"_to_copy in device/memory.py:copy_to_device"}
"""Copies that block on a Gaudi alone."""
if kind_in_tests() is CPU:  # where there is no device to wait for
    BLOCKS_NOT |= {"_local_scalar_dense in optim/finite_check.py:_check", "tolist in device/memory.py:begin_read"}


def waits_in(found: dict[str, int]) -> dict[str, int]:
    """What a device would be waited for."""
    known = OF_THE_HOST | BLOCKS_NOT
    mine = (name for name in found if name not in known and "hpex" not in name)  # the simulation itself
    return {name: found[name] for name in mine if DOCUMENTS not in name}


class Watched(GPTModule):
    """Watches from the first micro-batch's ``training_step`` to the end of the last one's backward."""

    waits = HostWaits()
    watching = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.watching:
            self.waits.__enter__()
        self.watching = True
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.waits.__exit__()
        self.watching = False


def waits_of(model: dict[str, Any], strategy: dict[str, Any], precision: str = "bf16-mixed") -> dict[str, int]:
    """Operations for which the host waits in two steps of two micro-batches."""
    seed_everything(11, verbose=False)
    Watched.waits = HostWaits()
    tokens = torch.randint(61, (8, 17), generator=torch.Generator().manual_seed(3))
    rows = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]
    trainer = quiet_trainer(MegatronStrategy(micro_batch_size=2, **strategy), max_epochs=1, precision=precision)
    trainer.fit(Watched(lr=1e-3, **SIZES | model), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    return waits_in(Watched.waits.found)


@pytest.mark.parametrize(
    ("model", "strategy", "precision"),
    [
        (GPT, {}, "32-true"),
        (LLAMA, {}, "bf16-mixed"),
        (LLAMA, {"recompute": "full"}, "bf16-true"),
    ],
    ids=["gpt", "llama", "recomputed"],
)
def test_the_host_waits_for_nothing_within_a_micro_batch(
    model: dict[str, Any], strategy: dict[str, Any], precision: str
) -> None:
    assert waits_of(model, strategy, precision) == {}


@pytest.mark.parametrize("strategy", [{"tp": 2}, {}], ids=["tp", "dp"])
def test_ranks_do_not_wait_within_a_micro_batch_either(
    ranks: Callable[..., list[Any]], strategy: dict[str, Any]
) -> None:
    assert ranks(2, waits_of, LLAMA, strategy) == [{}, {}]


FIRST = 4
"""First step of those that are watched: no batch is compared any more, and no copies of parameters."""


class WatchedSteps(GPTModule):
    """Watches two whole steps, from the start of one batch to that of the next but one."""

    waits = HostWaits()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            self.waits.__enter__()
        if batch_idx == FIRST + 2:
            self.waits.__exit__()


def waits_of_steps(model: dict[str, Any], strategy: dict[str, Any], documents: bool = False) -> dict[str, int]:
    """Operations for which the host waits in two steps that are not logged, with a progress bar."""
    seed_everything(11, verbose=False)
    WatchedSteps.waits = HostWaits()
    rows = []
    for tokens in torch.randint(61, (64, 17), generator=torch.Generator().manual_seed(3)):
        rows.append({"tokens": tokens[:-1], "labels": tokens[1:]})
        if documents:
            rows[-1]["segment_ids"] = torch.arange(16) // 5 + 1
    own = MegatronStrategy(micro_batch_size=2, **strategy)
    options: dict[str, Any] = {"enable_progress_bar": True, "precision": "bf16-mixed", "log_every_n_steps": 50}
    trainer = quiet_trainer(own, max_steps=FIRST + 3, **options)
    trainer.fit(WatchedSteps(lr=1e-3, **SIZES | model), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    assert trainer.progress_bar_metrics["train_loss"] == pytest.approx(float(trainer.callback_metrics["train_loss"]))
    return waits_in(WatchedSteps.waits.found)


@pytest.mark.parametrize(
    "documents",
    [False, pytest.param(True, marks=pytest.mark.skipif(kind_in_tests() is not CPU, reason="refused on Gaudi"))],
)
def test_the_host_waits_for_nothing_in_a_step(documents: bool) -> None:
    """The loss in the progress bar is read a step later, the rate is a number of the host, and so on."""
    assert waits_of_steps(LLAMA, {}, documents) == {}


@pytest.mark.parametrize("strategy", [{"pp": 2}, {"tp": 2}, {}], ids=["pp", "tp", "dp"])
def test_ranks_wait_for_nothing_in_a_step_either(ranks: Callable[..., list[Any]], strategy: dict[str, Any]) -> None:
    """Stages know without the device what the last one logs."""
    assert ranks(2, waits_of_steps, LLAMA, strategy) == [{}, {}]


def test_experts_wait_once_a_layer_and_micro_batch_where_they_count_the_tokens_of_each() -> None:
    found = waits_of(MIXTRAL, {})
    assert {name.partition(" in ")[2].partition(":")[0] for name in found} == {"moe/dispatch.py"}, found
    layers, micro_batches = SIZES["num_layers"], 4
    assert sum(found.values()) == layers * micro_batches


@pytest.mark.parametrize("family", ["gpt-tiny", "llama-tiny"])
def test_forward_and_backward_as_on_cuda_read_no_value(family: str) -> None:
    """A value, a shape that follows from values, or a copy to the host would be an error here."""
    sizes = {k: v for k, v in ((GPT if family == "gpt-tiny" else LLAMA) | SIZES).items() if k != "config"}
    config: TransformerConfig = configuration(family, **sizes)
    with torch.device("meta"):
        model = GPTModel(config, ops=Ops("cuda"))
        tokens = torch.empty(2, 16, dtype=torch.int64)
    model.to(torch.bfloat16)
    loss = model(tokens, labels=tokens)
    loss.backward()
    assert loss.shape == ()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    with pytest.raises((RuntimeError, NotImplementedError)):
        loss.item()
