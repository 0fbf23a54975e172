"""Dispatchers that are rehearsed, and jobs that are refused: each refusal names what a rehearsal has not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_megatron.config.layout import BatchShape, ParallelLayout
from lightning_megatron.device import CPU
from lightning_megatron.errors import ConfigError
from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.models.presets import configuration
from lightning_megatron.testing.trainer import kind_in_tests
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.rehearsal.errors import RehearsalError
from lightning_megatron.tools.rehearsal.rehearse import rehearse, rehearse_job

pytestmark = pytest.mark.skipif(kind_in_tests() is not CPU, reason="what is rehearsed is a run on a CPU")

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 512,
}
DISPATCHERS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "allgather": {"moe_token_dispatcher": "allgather"},
    "dropped": {"moe_capacity_factor": 1.0},
    "dropped by place": {"moe_capacity_factor": 1.0, "moe_token_drop_policy": "position"},
    "padded": {"moe_capacity_factor": 1.5, "moe_pad_to_capacity": True},
    "bins": {"moe_capacity_bins": 2, "moe_capacity_bins_alignment": 8},
    "dynamic": {"moe_dynamic": True},
    "sigmoid": {"moe_router_score": "sigmoid", "moe_expert_bias_update_rate": 0.01, "moe_input_jitter_eps": 0.1},
    "shared expert": {"moe_shared_expert_ffn_hidden_size": 64, "moe_load_balancing": "global_aux_loss"},
}
SHAPE = BatchShape(2, 1, 64)


def planned(model: dict[str, Any] | None = None, sizes: dict[str, Any] | None = None, **options: Any) -> PlannedJob:
    config = configuration("mixtral-8x7b", **{**SIZES, "num_experts": 4, "moe_ffn_hidden_size": 64, **(model or {})})
    return PlannedJob(config, ParallelLayout(**(sizes or {"dp": 1})), 64, 1, 2, **options)


def trainer(precision: str = "bf16-mixed", ranks: int = 1, **strategy: Any) -> Trainer:
    arguments = {"micro_batch_size": 1, **strategy}
    return Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=MegatronStrategy(**arguments),
        precision=precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "etp"), [*((name, 1) for name in DISPATCHERS), ("alltoall", 2), ("allgather", 2), ("padded", 2)]
)
def test_every_dispatcher_is_rehearsed(name: str, etp: int) -> None:
    found = rehearse_job(planned(DISPATCHERS[name], {"tp": 2, "ep": 2, "etp": etp, "dp": 2}))
    assert found.peak > found.after_step
    sent = found.traffic["etp_ep"]
    assert {"all_gather", "reduce_scatter"} <= set(sent) if name in ("allgather", "dynamic") else "all_to_all" in sent


@pytest.mark.slow
def test_more_tokens_for_the_experts_of_a_rank_take_more_memory() -> None:
    sizes = {"ep": 4, "dp": 4}
    even, uneven = (rehearse_job(planned({}, sizes, expert_imbalance=x)) for x in (1.0, 2.0))
    assert uneven.peak > even.peak


@pytest.mark.slow
def test_bytes_of_a_cpus_reduce_scatter_are_told_apart() -> None:
    alone, shared = (rehearse_job(planned(sizes={"dp": n})) for n in (1, 2))
    assert alone.peak_without_pieces == alone.peak
    assert shared.after_step < shared.peak_without_pieces < shared.peak


def test_a_planned_job_in_fp8_is_refused() -> None:
    with pytest.raises(RehearsalError, match=r"fp8=True: fp8 products need a Gaudi"):
        rehearse_job(planned(fp8=True))
    with pytest.raises(RehearsalError, match=r"optimizer_states=1: .* AdamW"):
        rehearse_job(planned(optimizer_states=1))


def test_fp8_layers_are_refused() -> None:
    """On a CPU ``auto`` would silently be another program than the one that is asked about."""
    with pytest.raises(RehearsalError, match="linear_fp8=auto in ops"):
        rehearse(trainer(ops={"linear_fp8": "auto"}), GPTModule("llama3.1-8b", **SIZES), SHAPE)


def test_what_a_cpu_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision='16-mixed'.*not for cpu"):
        rehearse_job(planned(precision="16-mixed"))
    with pytest.raises(ConfigError, match=r"linear_fp8=require.*for cpu"):
        trainer(ops={"linear_fp8": "require"})


def test_other_strategies_and_unknown_batches_are_refused() -> None:
    module = GPTModule("llama3.1-8b", **SIZES)
    with pytest.raises(RehearsalError, match="SingleDeviceStrategy"):
        rehearse(Trainer(accelerator="cpu", devices=1, logger=False), module, SHAPE)
    with pytest.raises(RehearsalError, match="BatchShape"):
        rehearse(trainer(), module, object())


class OwnStages(GPTModule):
    """A module with stages of its own."""

    def configure_model(self) -> None:
        """Build the model."""
        super().configure_model()


class ReadsItsLoss(GPTModule):
    """A module whose program depends on values."""

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Look at the loss."""
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss.detach().item() > 1 else loss


def test_stages_of_other_modules_are_refused() -> None:
    module = OwnStages("llama3.1-8b", **SIZES)
    with pytest.raises(RehearsalError, match="OwnStages builds its pipeline stages itself"):
        rehearse(trainer(ranks=2, pp=2), module, SHAPE)


@pytest.mark.slow
def test_a_program_that_reads_values_is_refused() -> None:
    with pytest.raises(RehearsalError, match="float32 tensor"):
        rehearse(trainer(), ReadsItsLoss("llama3.1-8b", **SIZES), SHAPE)
    assert not torch.distributed.is_initialized()
