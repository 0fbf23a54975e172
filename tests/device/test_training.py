"""LLaMA, GPT and Mixtral trained over ranks on simulated HPUs: losses as on CPUs, by the device's own kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import simulated_gaudi as hpu
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, LlamaModule, MegatronHPUStrategy, MixtralModule
from lightning_megatron.errors import DataError
from lightning_megatron.ops.registry import SELECTABLE
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

MODULES: dict[str, type[GPTModule]] = {"gpt": GPTModule, "llama": LlamaModule, "mixtral": MixtralModule}
LAYOUTS: dict[str, dict[str, Any]] = {
    "gpt": {"tp": 2, "cp": 2},
    "llama": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "mixtral": {"tp": 2, "pp": 2, "ep": 2},
}
DP = {"gpt": 1, "llama": 2, "mixtral": 2}
RANKS = {"gpt": 4, "llama": 8, "mixtral": 8}
EVERY = ("optimizer_adamw",)
LLAMAS = (*EVERY, "sdpa", "rms_norm", "rotary_pos_embedding")
USED = {
    "gpt": EVERY,  # attention over cp is put together from parts, and LayerNorm is torch's own
    "llama": LLAMAS,
    "mixtral": (*LLAMAS, "mixture_of_experts") if os.environ.get(hpu.PROFILE) != "1.19" else LLAMAS,
}
"""Operators that a family comes down to; before 1.21 that of experts has no gradient."""


def losses(family: str, accelerator: str, world_size: int, modes: Any) -> list[float]:
    """Six steps. The tiny eps takes away what ``FusedAdamW`` does otherwise with it."""
    seed_everything(5, verbose=False)
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    sizes |= {"vocab_size": 61, "ffn_hidden_size": 64, "init_std": 0.1, "vocab_multiple": 4}
    if family == "gpt":
        del sizes["num_query_groups"]
    if family == "mixtral":
        sizes |= {"num_experts": 4, "moe_token_dispatcher": "allgather"}
    module = MODULES[family](f"{family}-tiny", lr=1e-3, eps=1e-20, **sizes)
    tokens = torch.randint(61, (48, 17), generator=torch.Generator().manual_seed(3))
    rows = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    recorder = Recorder()
    strategy = MegatronHPUStrategy(micro_batch_size=2, ops=modes, **LAYOUTS[family])
    trainer = quiet_trainer(
        strategy, accelerator=accelerator, devices=world_size, max_epochs=1, logger=recorder, gradient_clip_val=1.0
    )
    trainer.fit(module, DataLoader(rows, batch_size=8 // DP[family], shuffle=True))  # type: ignore[arg-type]
    return recorder.series("train_loss")


def compare(family: str, world_size: int) -> dict[str, Any]:
    """Losses by device and mode, and the operators that were called."""
    right = losses(family, "cpu", world_size, None)
    found: dict[str, Any] = {}
    for name, modes in (("auto", None), ("off", dict.fromkeys(SELECTABLE, "off"))):
        hpu.reset_calls()
        found[name] = losses(family, "hpu", world_size, modes), hpu.calls()
    return found | {"right": right}


@pytest.mark.parametrize("family", list(MODULES))
def test_losses_are_those_on_cpus_and_the_devices_kernels_are_called(
    ranks: Callable[..., list[Any]], family: str
) -> None:
    for answer in ranks(RANKS[family], compare, family, RANKS[family]):
        right = answer["right"]
        assert len(right) == 6
        assert right[-1] != right[0]
        for name in ("auto", "off"):
            assert answer[name][0] == pytest.approx(right, rel=1e-5)
        calls, without = answer["auto"][1], answer["off"][1]
        for operator in USED[family]:
            assert any(operator in call for call in calls), f"{operator} is not among {sorted(calls)}"
            assert not any(operator in call for call in without), f"{operator} is off, and was called"


class Plain(LightningModule):
    """An ordinary module that looks at no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(torch.ones(1, 1, device=self.device)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def errors_of_batches_on_the_device() -> list[str]:
    """Errors of a run with equal batches, and of one in which each rank has its own."""
    found = []
    for own in (0, torch.distributed.get_rank()):
        samples = [torch.arange(4.0) + own] * 2
        loader = DataLoader(samples, batch_size=None, collate_fn=lambda sample: sample.to("hpu"))  # type: ignore[arg-type]
        try:
            quiet_trainer(MegatronHPUStrategy(tp=2), max_epochs=1).fit(Plain(), loader)
            found.append("")
        except DataError as error:
            found.append(str(error))
    return found


def test_ranks_of_one_replica_that_make_their_batches_on_the_device_must_make_equal_ones(
    ranks: Callable[..., list[Any]],
) -> None:
    for same, own in ranks(2, errors_of_batches_on_the_device):
        assert same == ""
        assert "ranks [0, 1] are one replica" in own
