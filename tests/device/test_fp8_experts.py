"""Training experts in fp8 on simulated HPUs: near bf16, and the same in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import simulated_gaudi as hpu
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_megatron import MegatronHPUStrategy, MixtralModule
from lightning_megatron.ops.fp8 import Fp8Recipe
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

RECIPE = Fp8Recipe(first_layers=0, last_layers=0, stochastic_rounding=False)


def train(ops: str, model: dict[str, Any], layout: dict[str, Any]) -> tuple[list[float], int]:
    """Losses of four steps, and how many products were made in fp8."""
    seed_everything(5, verbose=False)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 4, "vocab_size": 61}
    experts = {"ffn_hidden_size": 32, "num_experts": 4, "moe_router_topk": 2, "vocab_multiple": 4}
    module = MixtralModule("mixtral-tiny", lr=1e-3, **sizes, **experts, **model)
    rows = torch.randint(61, (16, 17), generator=torch.Generator().manual_seed(3))
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    recorder, strategy = Recorder(), MegatronHPUStrategy(ops=ops, fp8=RECIPE, micro_batch_size=2, **layout)
    trainer = quiet_trainer(
        strategy, accelerator="hpu", precision="bf16-mixed", max_steps=4, logger=recorder, use_distributed_sampler=False
    )
    hpu.reset_calls()
    trainer.fit(module, DataLoader(samples, batch_size=4))  # type: ignore[arg-type]
    return recorder.series("train_loss"), hpu.calls()["hpu::fp8_gemm_v2"]


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, {"moe_dynamic": True}], ids=["alltoall", "dynamic"])
def test_losses_are_near_bf16s(model: dict[str, Any]) -> None:
    found, products = train("linear_fp8=require", model, {})
    plain, none = train("linear_fp8=off", model, {})
    steps, micro_batches, layers, attention = 4, 2, 2, 2
    assert products > steps * micro_batches * layers * attention * 3  # those of attention alone
    assert none == 0
    assert found == pytest.approx(plain, rel=0.01)
    assert found != plain


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2}], ids=["tp", "tp and ep", "pp"])
def test_layouts_train_alike(ranks: Callable[..., list[Any]], layout: dict[str, Any]) -> None:
    (losses, products) = ranks(2, train, "linear_fp8=require", {}, layout)[-1]
    alone, _ = train("linear_fp8=require", {}, {})
    assert products > 0
    assert losses == pytest.approx(alone, rel=2e-3)  # sums of bf16 in another order, then rounded to fp8
