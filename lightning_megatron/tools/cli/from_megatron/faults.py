"""Faults of a Megatron command line that need no model to be found: sizes, pairs, lengths in the wrong unit."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_megatron.errors import Problem
from lightning_megatron.tools.cli.from_megatron.flags import TAKEN
from lightning_megatron.tools.cli.from_megatron.words import CommandLine

_LEAST: dict[str, int] = {
    **dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "micro_batch_size",
            "gradient_accumulation_steps",
            "global_batch_size",
            "train_iters",
            "train_samples",
            "seq_length",
            "log_interval",
            "save_interval",
        ),
        1,
    ),
    **dict.fromkeys(("eval_interval", "eval_iters", "num_workers", "zero_stage", "lr_warmup_iters"), 0),
    "lr_warmup_samples": 0,
}
"""Smallest value of sizes and lengths; those of the model are the model's own to check."""

_NEEDED = {
    "lr": "is needed: Megatron has no default for it",
    "seq_length": "is needed: Megatron has no default for it",
}

_EXCLUSIVE = (
    ("fp16", "bf16"),
    ("data_path", "train_data_path"),
    ("data_path", "valid_data_path"),
    ("data_path", "test_data_path"),
    ("lr_warmup_iters", "lr_warmup_fraction"),
    ("lr_warmup_samples", "lr_warmup_fraction"),
)
"""Pairs that Megatron refuses together: if the first is given, the second must not be."""

_FULL = ("recompute_granularity=full", "checkpoint_activations")
_BINS = ("exp_base", "alignment", "optimize_interval", "max_overhead_factor")
_NEEDS: dict[str, tuple[str, ...]] = {
    **{flag.key: ("num_experts",) for flag in TAKEN if flag.key.startswith("moe_")},
    **{f"moe_capacity_bins_{name}": ("moe_capacity_bins_num",) for name in _BINS},
    "moe_router_bias_update_rate": ("moe_router_enable_expert_bias",),
    "moe_token_distribution_logging_interval": ("moe_per_layer_logging",),
    "num_query_groups": ("group_query_attention",),
    "rope_scaling_factor": ("use_rope_scaling",),
    "sequence_parallel": ("tensor_model_parallel_size",),
    "cp_comm_type": ("context_parallel_size",),
    **dict.fromkeys(("recompute_method", "recompute_num_layers", "distribute_saved_activations"), _FULL),
    **{flag.key: ("fp8",) for flag in TAKEN if flag.key.startswith("fp8_")},
    **dict.fromkeys(("first_last_layers_bf16", "cache_fp8_weight"), ("fp8",)),
    **{f"num_layers_at_{end}_in_bf16": ("first_last_layers_bf16",) for end in ("start", "end")},
    **dict.fromkeys(("wandb_exp_name", "wandb_save_dir"), ("wandb_project",)),
    **dict.fromkeys(("profile_step_start", "profile_step_end"), ("profile",)),
    "save_interval": ("save",),
    **{f"lr_wsd_decay_{what}": ("lr_decay_style=WSD",) for what in ("iters", "samples", "style")},
    "eval_iters": ("eval_interval",),
}
"""Arguments that Megatron, too, reads only if one of others is given, has that value, or is a size above 1."""

_LENGTHS = ("lr_decay_{}", "lr_warmup_{}", "lr_wsd_decay_{}")


def line_faults(line: CommandLine) -> list[Problem]:
    """All faults of a line. Invalid sizes are removed from it, so that later checks can run too."""
    found = [*_missing(line), *_pairs(line), *_units(line), *_weight_decay(line), *_groups_of_experts(line)]
    small = list(_sizes(line))
    for name, _ in small:
        del line.values[name]
    return [problem for _, problem in small] + found


def idle_flags(line: CommandLine) -> dict[str, str]:
    """Flags that change nothing on a line, with the reason."""
    found = {}
    for name, others in _NEEDS.items():
        if name in line.values and not any(_holds(line, other) for other in others):
            needed, _, value = others[0].partition("=")
            found[line.flag(name)] = f"is not read without {line.flag(needed)} {value}".rstrip()
    if "split" in line.values and "train_data_path" in line.values:
        found[line.flag("split")] = f"is not read beside {line.flag('train_data_path')}"
    return found


def _holds(line: CommandLine, other: str) -> bool:
    name, _, value = other.partition("=")
    found = line.get(name)
    return bool(found == value if value else found and (found is True or found != 1))


def _sizes(line: CommandLine) -> Iterator[tuple[str, Problem]]:
    for name, least in _LEAST.items():
        if (value := line.values.get(name)) is not None and value < least:
            yield name, Problem(line.flag(name), value, f"must be at least {least}")


def _missing(line: CommandLine) -> Iterator[Problem]:
    for name, reason in _NEEDED.items():
        if name not in line.values:
            yield Problem(line.flag(name), None, reason)
    lengths = [line.values.get(name) for name in ("train_iters", "train_samples")]
    if lengths.count(None) != 1:
        yield Problem("--train-iters", lengths[0], "one of --train-iters and --train-samples is needed, and not both")


def _pairs(line: CommandLine) -> Iterator[Problem]:
    for first, second in _EXCLUSIVE:
        if line.values.get(first) and line.values.get(second) is not None:
            yield Problem(line.flag(second), line.values[second], f"cannot be beside {line.flag(first)}")


def _units(line: CommandLine) -> Iterator[Problem]:
    """Lengths of the schedule in steps for a run in samples, and the other way round."""
    if ("train_iters" in line.values) == ("train_samples" in line.values):
        return
    whole, other = ("train_iters", "samples") if "train_iters" in line.values else ("train_samples", "iters")
    for length in _LENGTHS:
        if value := line.values.get(name := length.format(other)):
            same = f"--{length.format(whole.removeprefix('train_')).replace('_', '-')}"
            reason = f"the run's length is {line.flag(whole)}: give {same}"
            yield Problem(line.flag(name), value, reason)


def _groups_of_experts(line: CommandLine) -> Iterator[Problem]:
    """More groups than experts that a token visits: Megatron would rank groups by the sum of none of their experts."""
    chosen, topk = line.values.get("moe_router_group_topk", 0), line.get("moe_router_topk", 2)
    if chosen > topk:
        reason = f"a token visits {topk} experts, fewer than groups"
        yield Problem(line.flag("moe_router_group_topk"), chosen, reason, (topk,))


def _weight_decay(line: CommandLine) -> Iterator[Problem]:
    ends = ("start_weight_decay", "end_weight_decay")
    given = [name for name in ends if name in line.values]
    style = line.get("weight_decay_incr_style")
    if style == "constant":
        for name in given:
            yield Problem(line.flag(name), line.values[name], "needs --weight-decay-incr-style linear or cosine")
    elif style not in ("linear", "cosine"):
        reason = "must be constant, linear or cosine"
        yield Problem("--weight-decay-incr-style", style, reason, ("constant", "linear", "cosine"))
    elif len(given) < 2:
        missing = " and ".join(line.flag(name) for name in ends if name not in given)
        yield Problem("--weight-decay-incr-style", style, f"needs {missing} too")
