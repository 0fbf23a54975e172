"""The layout of a Megatron command line, checked as the strategy checks it, by the flags of the line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, problems_of
from lightning_megatron.tools.cli.from_megatron.words import CommandLine
from lightning_megatron.tools.planning.settings import Feed, job_of

SAME = {
    "expert_tensor_parallel_size": "etp",
    "decoder_first_pipeline_num_layers": "first_stage_layers",
    "decoder_last_pipeline_num_layers": "last_stage_layers",
    "pipeline_model_parallel_layout": "pipeline_layout",
    "account_for_embedding_in_pipeline_split": "count_embedding",
    "account_for_loss_in_pipeline_split": "count_loss",
    "ddp_bucket_size": "bucket_size",
    "check_for_nan_in_loss_and_grad": "check_for_nan_in_loss_and_grad",
    "async_save": "async_save",
}
"""Arguments of Megatron that the strategy takes unchanged if they are given, with the strategy's names."""
_THEIRS = {ours: theirs for theirs, ours in SAME.items()} | {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
    "recompute_shard_saved": "distribute_saved_activations",
}
"""Megatron's names of what makes a layout, by the strategy's."""


def layout_problems(
    line: CommandLine, model: TransformerConfig, feed: Feed, strategy: Mapping[str, Any]
) -> list[Problem]:
    """Reasons why the strategy would refuse the layout for this model and batch, by the line's flags."""
    found = problems_of(job_of, model, feed, strategy)
    return [replace(each, argument=line.flag(_THEIRS.get(each.argument, each.argument))) for each in found]
