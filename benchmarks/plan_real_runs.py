"""Bytes of a rehearsal compared with those of a real run, for small jobs of one to four processes on a CPU.

    python benchmarks/plan_real_runs.py            # prints the table of plan_real_runs_202611.md

The same tracker counts the storages of both: of fake tensors in one process, and of real ones in each process of the
job, from its fourth step on (the first three compare replicas, which a rehearsal leaves out). For each job the first
and the last rank are compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_megatron.testing.measured import SmallJob, rehearse_measured, run_measured
from lightning_megatron.testing.workers import WorkerPool

_SIZES: Mapping[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
_GROUPED = {**_SIZES, "num_query_groups": 2}
_EXPERTS = {**_GROUPED, "num_layers": 2, "num_experts": 4, "moe_ffn_hidden_size": 64}
_FULL: Mapping[str, Any] = {"recompute": "full"}


def _gpt(world_size: int, precision: str = "bf16-mixed", batch_size: int = 2, **strategy: Any) -> SmallJob:
    return SmallJob("gpt2", world_size, batch_size, 128, precision, _SIZES, strategy)


def _llama(world_size: int, precision: str = "bf16-mixed", batch_size: int = 2, **strategy: Any) -> SmallJob:
    return SmallJob("llama3.1-8b", world_size, batch_size, 128, precision, _GROUPED, strategy)


def _mixtral(world_size: int, model: Mapping[str, Any], batch_size: int = 2, **strategy: Any) -> SmallJob:
    return SmallJob("mixtral-8x7b", world_size, batch_size, 128, "bf16-mixed", {**_EXPERTS, **model}, strategy)


JOBS: Mapping[str, SmallJob] = {
    "GPT, one rank": _gpt(1),
    "GPT, fp32": _gpt(1, "32-true"),
    "GPT, bf16-true": _gpt(1, "bf16-true"),
    "GPT, dp 2": _gpt(2),
    "GPT, dp 2, no sharded optimizer": _gpt(2, distributed_optimizer=False),
    "GPT, tp 2": _gpt(2, tp=2),
    "GPT, tp 2 without sequence parallel": _gpt(2, tp=2, sequence_parallel=False),
    "GPT, pp 2 (tied embeddings)": _gpt(2, batch_size=4, pp=2),
    "LLaMA, one rank, one micro-batch": _llama(1, batch_size=1),
    "LLaMA, dp 2, bf16 gradients on the wire": _llama(2, grad_reduce_dtype="bf16"),
    "LLaMA, dp 2, no overlap": _llama(2, overlap_grad_reduce=False, overlap_param_gather=False),
    "LLaMA, pp 2, GPipe": _llama(2, batch_size=4, pp=2, pipeline_schedule="gpipe"),
    "LLaMA, pp 2, 1F1B": _llama(2, batch_size=4, pp=2),
    "LLaMA, pp 2, vpp 2": _llama(2, batch_size=4, pp=2, vpp=2),
    "LLaMA, pp 2, zero-bubble": _llama(2, batch_size=4, pp=2, pipeline_schedule="zero-bubble"),
    "LLaMA, cp 2, ring": _llama(2, cp=2),
    "LLaMA, cp 2, all-gather": _llama(2, cp=2, cp_comm_type="all_gather"),
    "LLaMA, cp 2, all-to-all": _llama(2, cp=2, cp_comm_type="a2a"),
    "LLaMA, every layer recomputed": _llama(1, **_FULL),
    "LLaMA, core attention recomputed, tp 2": _llama(2, tp=2, recompute="selective"),
    "LLaMA, two layers of a stage recomputed, pp 2": _llama(
        2, batch_size=4, pp=2, recompute="full", recompute_method="block", recompute_num_layers=1
    ),
    "LLaMA, tp 2, pp 2": _llama(4, batch_size=4, tp=2, pp=2),
    "Mixtral, all-gather, ep 2": _mixtral(2, {"moe_token_dispatcher": "allgather"}, ep=2),
    "Mixtral, padded to capacity, ep 2, experts recomputed": _mixtral(
        2,
        {"moe_token_dispatcher": "alltoall", "moe_capacity_factor": 1.0, "moe_pad_to_capacity": True},
        ep=2,
        recompute="moe",
    ),
}


def rows(names: list[str]) -> Iterator[str]:
    """Rows of the table.

    Args:
        names: names of the jobs.
    """
    yield "| job | rank | peak, rehearsed | peak, run | | after the step, rehearsed | run | |"
    yield "|---|---|---|---|---|---|---|---|"
    with WorkerPool(4, timeout=600) as pool:
        for name in names:
            job = JOBS[name]
            runs = pool.run(job.world_size, run_measured, job)
            for rank in sorted({0, job.world_size - 1}):
                found, run = rehearse_measured(job, rank), runs[rank]
                peak, after = found.peak / run.peak - 1, found.after_step / run.after_step - 1
                yield (
                    f"| {name} | {rank} | {found.peak:,} | {run.peak:,} | {peak:+.2%} "
                    f"| {found.after_step:,} | {run.after_step:,} | {after:+.2%} |"
                )


if __name__ == "__main__":
    for row in rows(sys.argv[1:] or list(JOBS)):
        print(row, flush=True)
