"""Memory by formula, against the tracker of a rehearsal: real modules, optimizer and schedule on fake tensors.

The whole table, of models of true size, is ``benchmarks/plan_memory.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.models.presets import preset
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.memory.peak import memory_of
from lightning_megatron.tools.planning.memory.shapes import HOST
from lightning_megatron.tools.rehearsal.rehearse import rehearse_job

pytestmark = pytest.mark.slow

GPT = TransformerConfig(4, 512, 8, 8192, 2048)
LLAMA = GPT.replace(
    norm="rmsnorm", activation="swiglu", position_embedding="rope", add_bias_linear=False, tie_embeddings=False
)
QWEN3 = LLAMA.replace(qk_norm=True, num_query_groups=4, head_dim=96)
PARTLY = QWEN3.replace(rope_head_dim=48)
WINDOW = LLAMA.replace(sliding_window=256)
GEMMA2 = preset("gemma2-tiny").replace(num_layers=2, sliding_window_layers=(0,), vocab_size=8192)
GEMMA3 = preset("gemma3-tiny").replace(num_layers=2, sliding_window_layers=(0,), vocab_size=8192)
BLOOM = preset("bloom-tiny").replace(num_layers=2, vocab_size=8192)
GPT_OSS = preset("gpt-oss-tiny").replace(num_layers=2, sliding_window_layers=(0,), vocab_size=8192)
DEEPSEEK = LLAMA.replace(
    kv_lora_rank=128, q_lora_rank=192, head_dim=96, rope_head_dim=32, v_head_dim=64, num_query_groups=8
)
FINE = DEEPSEEK.replace(
    q_lora_rank=0, num_experts=16, moe_router_topk=4, moe_ffn_hidden_size=128, moe_shared_expert_ffn_hidden_size=256
)
MIXTRAL = LLAMA.replace(num_experts=4, moe_router_topk=2)
MANY = {"num_micro_batches": 8}
OWNED = ("parameters", "gradients", "main parameters", "optimizer state")
Case = tuple[TransformerConfig, dict[str, Any], int, dict[str, Any]]
# Model, layout, pipeline rank, other fields of the job. One replica: a CPU's sums of gradients would hide the rest.
CASES: list[Case] = [
    (GPT, {}, 0, {}),
    (LLAMA, {"tp": 2}, 0, {"recompute": RecomputePlan("full")}),
    (LLAMA, {"tp": 2}, 0, {"recompute": RecomputePlan("mlp"), "precision": "bf16-true"}),
    (LLAMA, {"tp": 2}, 0, {"main_grads_dtype": "bf16"}),
    (GPT, {"pp": 2}, 0, {"main_grads_dtype": "auto", **MANY}),
    (GPT, {"tp": 4, "sequence_parallel": False}, 0, {"precision": "32-true"}),
    (GPT, {"tp": 2, "pp": 2}, 0, {"schedule": "gpipe", **MANY}),
    (LLAMA, {"pp": 2, "vpp": 2}, 0, MANY),
    (LLAMA, {"pp": 4}, 1, {"recompute": RecomputePlan("attention"), **MANY}),
    (LLAMA, {"pp": 2}, 0, {"schedule": "zero-bubble", **MANY}),
    (QWEN3, {"tp": 2}, 0, {}),
    (QWEN3, {}, 0, {"precision": "32-true"}),
    (PARTLY, {}, 0, {}),
    (PARTLY.replace(qk_norm=False, num_query_groups=8), {"tp": 2}, 0, {"precision": "32-true"}),
    (WINDOW, {}, 0, {}),
    (MIXTRAL, {"ep": 1}, 0, {}),
    (MIXTRAL.replace(moe_capacity_bins=4), {"tp": 2, "ep": 2, "etp": 1}, 0, {}),
    (MIXTRAL.replace(moe_capacity_factor=1.5, moe_pad_to_capacity=True), {"tp": 2, "ep": 2, "etp": 1}, 0, {}),
    (MIXTRAL, {"tp": 2, "ep": 2, "etp": 1}, 0, {"recompute": RecomputePlan("moe")}),
    (DEEPSEEK, {}, 0, {}),
    (DEEPSEEK, {"tp": 2}, 0, {"recompute": RecomputePlan("selective")}),
    (DEEPSEEK.replace(v_head_dim=96), {"tp": 2, "sequence_parallel": False}, 0, {"precision": "32-true"}),
    (DEEPSEEK, {"pp": 2}, 0, {"schedule": "zero-bubble", **MANY}),
    (FINE.replace(moe_layers=(1, 2, 3)), {"tp": 2, "ep": 2, "etp": 1}, 0, {}),
    (FINE, {"tp": 2}, 0, {"recompute": RecomputePlan("attention"), "precision": "bf16-true"}),
    (LLAMA.replace(mtp_num_layers=1), {}, 0, {}),
    (LLAMA.replace(mtp_num_layers=2), {"tp": 2}, 0, {"recompute": RecomputePlan("full")}),
    (FINE.replace(mtp_num_layers=1), {"pp": 2}, 1, {"split": LayerSplit(layout="balanced")}),
    (LLAMA.replace(mtp_num_layers=1), {"pp": 2}, 1, {"schedule": "zero-bubble", **MANY}),
]

LONG: list[Case] = [
    (WINDOW, {"tp": 2}, 0, {"recompute": RecomputePlan("selective"), "precision": "32-true"}),
    (GEMMA2, {}, 0, {}),
    (BLOOM, {"tp": 2}, 0, {"precision": "bf16-true"}),
    (GEMMA3, {"tp": 2}, 0, {}),
    (GPT_OSS, {"tp": 2, "ep": 2, "etp": 1}, 0, {}),
]
"""Windows are computed in many blocks, of many operations."""
PARAMS = [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in LONG)]


@pytest.mark.parametrize(("config", "sizes", "rank", "options"), PARAMS, ids=[str(i) for i in range(len(PARAMS))])
def test_the_peak_is_within_two_percent(config, sizes, rank, options):
    layout = ParallelLayout(**sizes)
    layout = layout.resolve(layout.model_parallel_size)
    fields = {"num_micro_batches": 2, "overlap_grad_reduce": False, **options}
    found = rehearse_job(PlannedJob(config, layout, 2048, 2, **fields), rank)
    fields["num_micro_batches"] = found.micro_batches
    estimate = memory_of(PlannedJob(config, layout, 2048, 2, **fields), rank, HOST)
    assert estimate.peak == pytest.approx(found.peak, rel=0.02), (estimate.by_cause, found.by_cause)
    states = sum(found.after_step_by_cause[cause] for cause in OWNED if cause in found.after_step_by_cause)
    assert estimate.after_step == pytest.approx(states, rel=0.001)
