"""DeepSpeed's JSON file, which ``--deepspeed_config`` of a command line of Megatron-DeepSpeed names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from lightning_megatron.errors import Problem
from lightning_megatron.files.small import read_object
from lightning_megatron.tools.cli.common import one_line
from lightning_megatron.tools.cli.from_megatron.words import CommandLine

KEYS: Mapping[str, tuple[str, str]] = {
    "train_micro_batch_size_per_gpu": ("micro_batch_size", "`micro_batch_size`"),
    "train_batch_size": ("global_batch_size", "`data.batch_size` of a replica"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "`data.batch_size` of a replica"),
    "gradient_clipping": ("clip_grad", "`trainer.gradient_clip_val`"),
    "steps_per_print": ("log_interval", "`trainer.log_every_n_steps`"),
    "bf16.enabled": ("bf16", "`trainer.precision`"),
    "fp16.enabled": ("fp16", "`trainer.precision`"),
    "zero_optimization.stage": ("zero_stage", "`distributed_optimizer`, of stage 1"),
    "zero_optimization.overlap_comm": ("overlap_grad_reduce", "`overlap_grad_reduce`"),
    "zero_optimization.reduce_bucket_size": ("ddp_bucket_size", "`bucket_size`"),
    "optimizer.params.lr": ("lr", "`model.lr`"),
    "optimizer.params.eps": ("adam_eps", "`model.eps`"),
    "optimizer.params.weight_decay": ("weight_decay", "`model.weight_decay`"),
}
"""Keys that a recipe is made of: Megatron's name of the value, and its place in the recipe."""

HERE: Mapping[str, str] = {
    "zero_optimization.contiguous_gradients": "gradients lie in flat buffers",
    "zero_optimization.reduce_scatter": "gradients are reduce-scattered",
    "zero_optimization.allgather_partitions": "parameters are gathered bucket by bucket",
    "zero_allow_untested_optimizer": "what an optimizer needs is checked",
    "wall_clock_breakdown": "the callback `Throughput` logs times",
    "data_types.grad_accum_dtype": "gradients are added up in fp32 where parameters have 16 bits",
}
"""Keys for behaviour that is always on here."""

NONE: Mapping[str, str] = {
    "scheduler": "give the schedule by Megatron's flags",
    "zero_optimization.offload_optimizer": "state stays on the device",
    "zero_optimization.offload_param": "state stays on the device",
    "zero_optimization.allgather_bucket_size": "buckets of parameters are those of gradients",
    "fp16.loss_scale": "the loss scale is dynamic",
    "fp16.initial_scale_power": "the loss scale is dynamic",
    "fp16.loss_scale_window": "the loss scale is dynamic",
    "fp16.hysteresis": "the loss scale is dynamic",
    "fp16.min_loss_scale": "the loss scale is dynamic",
    "activation_checkpointing": "`recompute` selects what is recomputed",
    "communication_data_type": "give `grad_reduce_dtype`",
}
"""Keys without a counterpart, with the reason or an alternative."""

_RATES = ("lr", "adam_eps", "weight_decay", "clip_grad")
_BETAS, _TYPE = "optimizer.params.betas", "optimizer.type"


def with_deepspeed(line: CommandLine) -> list[Problem]:
    """Add the values of DeepSpeed's file, if a line names one, to those of the line.

    Args:
        line: the command line; keys without a counterpart are added to those of its flags.

    Returns:
        Faults of the file, and values that contradict the line.
    """
    path = line.values.get("deepspeed_config")
    if path is None:
        return []
    try:
        contents = read_object(path)
    except (OSError, ValueError) as error:
        return [Problem(line.flag("deepspeed_config"), path, f"cannot be read: {one_line(error)}")]
    problems = []
    for key, value in _leaves(contents):
        if key in KEYS:
            problems += _taken(line, key, value)
        elif key in (_BETAS, _TYPE):
            problems += _optimizer(line, key, value)
        elif key not in HERE and value not in (False, 0, None) and value != "auto":
            parent = next((name for name in NONE if f"{key}.".startswith(f"{name}.")), "")
            line.without[f"{path}: {key}"] = NONE.get(parent, "not known here")
    return problems


def _leaves(part: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Values with their keys, joined by dots."""
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _taken(line: CommandLine, key: str, value: Any) -> list[Problem]:
    name, _ = KEYS[key]
    if value in (None, "auto"):
        return []
    if key.endswith((".enabled", ".overlap_comm")):
        if not isinstance(value, bool):
            return [Problem(key, value, "must be true or false")]
        if not value and name in line.values:
            return [Problem(key, value, f"is on by {line.flag(name)}")]
        return _put(line, key, name, value) if value else []
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return [Problem(key, value, "must be a number")]
    if name in _RATES:
        return _put(line, key, name, float(value))
    if int(value) != value:
        return [Problem(key, value, "must be a whole number")]
    return _put(line, key, name, int(value))


def _put(line: CommandLine, key: str, name: str, value: Any) -> list[Problem]:
    if name in line.values and line.values[name] != value:
        return [Problem(key, value, f"is {line.values[name]} by {line.flag(name)}")]
    line.values.setdefault(name, value)
    line.written.setdefault(name, key)
    return []


def _optimizer(line: CommandLine, key: str, value: Any) -> list[Problem]:
    if key == _TYPE:
        known = str(value).lower() in ("adam", "adamw", "fusedadam")
        return _put(line, key, "optimizer", "adam") if known else _put(line, key, "optimizer", str(value))
    if not isinstance(value, list) or len(value) != 2:
        return [Problem(key, value, "must be two numbers")]
    return [
        problem
        for name, beta in zip(("adam_beta1", "adam_beta2"), value, strict=True)
        for problem in _put(line, key, name, beta)
    ]
