"""Recipe for ``fit`` from the values of a command line of Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from math import prod
from typing import Any

from lightning_megatron.checkpoint.formats.megatron import config_from_arguments
from lightning_megatron.config.recompute_plan import MODULES
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.data.blend_file import is_number
from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.tools.cli.common import one_line
from lightning_megatron.tools.cli.from_megatron.deepspeed import with_deepspeed
from lightning_megatron.tools.cli.from_megatron.faults import idle_flags, line_faults
from lightning_megatron.tools.cli.from_megatron.layout import SAME, layout_problems
from lightning_megatron.tools.cli.from_megatron.words import CommandLine
from lightning_megatron.tools.planning.settings import Feed

_CP_TYPES = {"p2p": "p2p", "a2a": "a2a", "allgather": "all_gather", "all_gather": "all_gather"}
_GRANULARITIES = {"recompute_activations": "selective", "checkpoint_activations": "full"}
"""Granularity that a flag implies on a line without `--recompute-granularity`; the first one of these counts."""
_SCORE = "moe_router_score_function"
_LEARNED, _ADDED = "learned_absolute", "add_position_embedding"
"""Positions that `--no-position-embedding` switches off, and its argument; rope has no embedding to switch off."""
_OURS = "lightning_megatron."


@dataclass(frozen=True)
class Devices:
    """Devices that the job will have.

    Attributes:
        on_node: those of a machine.
        nodes: machines.
    """

    on_node: int
    nodes: int = 1

    @property
    def all(self) -> int:
        """Devices of the job."""
        return self.on_node * self.nodes


def recipe_of(line: CommandLine, devices: Devices) -> dict[str, Any]:
    """The recipe.

    Args:
        line: the command line; what turns out to have no counterpart or no effect, and what the user must fill in, is
            added to it.
        devices: devices of the job.

    Raises:
        ConfigError: with everything that is invalid or missing.
    """
    problems = with_deepspeed(line)
    line.idle |= idle_flags(line)
    problems += line_faults(line)
    replica = prod(line.get(f"{axis}_model_parallel_size") for axis in ("tensor", "pipeline"))
    replica *= line.get("context_parallel_size")
    if devices.all % replica:
        reason = f"is no multiple of {replica} = tensor x pipeline x context parallel"
        near = (max(replica, devices.all // replica * replica), -(-devices.all // replica) * replica)
        problems.append(Problem("--devices", devices.all, reason, tuple(dict.fromkeys(near))))
    batch = _Batch.of(line, max(1, devices.all // replica), problems)
    model = _model(line, problems)
    strategy = _strategy(line, batch, problems)
    raise_if_any(problems)
    assert model is not None
    raise_if_any(layout_problems(line, model, Feed(devices.all, line.get("seq_length"), batch.replica), strategy))
    recipe: dict[str, Any] = {"seed_everything": line.get("seed")}
    recipe["trainer"] = _trainer(line, devices, batch, strategy)
    recipe["model"] = _module(line, model, batch)
    recipe["data"] = _data(line, batch)
    if "load" in line.values:
        recipe["ckpt_path"] = "last" if line.values["load"] == line.values.get("save") else line.values["load"]
    return recipe


@dataclass(frozen=True)
class _Batch:
    """Samples of a step, and the length of the run.

    Attributes:
        micro: samples of a micro-batch.
        replica: samples of a replica.
        all: samples of all replicas, at the end of a ramp.
        ramp: start, increment and length of a ramp; empty for none.
        steps: steps of the run, counted as if there were no ramp; 0 for unknown.
        samples: samples of the run, if that is its length.
    """

    micro: int
    replica: int
    all: int
    ramp: tuple[int, ...]
    steps: int
    samples: int | None

    @classmethod
    def of(cls, line: CommandLine, replicas: int, problems: list[Problem]) -> _Batch:
        """Batch sizes of a line; their faults are appended to ``problems``."""
        micro = line.get("micro_batch_size", 1)
        samples = line.get("global_batch_size", micro * replicas * line.get("gradient_accumulation_steps", 1))
        if samples % (micro * replicas):
            reason = f"does not split into micro-batches of {micro} on {replicas} replicas"
            unit = micro * replicas
            near = (max(unit, samples // unit * unit), -(-samples // unit) * unit)
            problems.append(Problem("--global-batch-size", samples, reason, tuple(dict.fromkeys(near))))
        steps, of_samples = line.values.get("train_iters"), line.values.get("train_samples")
        ramp = line.values.get("rampup_batch_size", ())
        if ramp and (len(ramp) != 3 or not all(word.isdigit() for word in ramp) or of_samples is None):
            reason = "must be a start, an increment and a number of samples, in a run whose length is --train-samples"
            problems.append(Problem("--rampup-batch-size", " ".join(ramp), reason))
            ramp = ()
        steps = steps or (of_samples or 0) // samples
        return cls(micro, samples // replicas, samples, tuple(map(int, ramp)), steps, of_samples)


def _model(line: CommandLine, problems: list[Problem]) -> TransformerConfig | None:
    """Shape of the model; ``None`` if there are problems."""
    arguments = dict(line.values)
    arguments["vocab_size"] = _vocab_size(line, problems)
    arguments.setdefault("bias_gelu_fusion", True)
    arguments.setdefault("num_query_groups", line.get("num_query_groups"))
    if "num_key_value_heads" in arguments:  # Megatron-DeepSpeed
        arguments |= {"group_query_attention": True, "num_query_groups": arguments["num_key_value_heads"]}
    if arguments.get("use_rotary_position_embeddings"):
        arguments["position_embedding_type"] = "rope"
    elif arguments.get("position_embedding_type", _LEARNED) == _LEARNED and not arguments.get(_ADDED, True):
        arguments["position_embedding_type"] = "none"
    if (normalization := arguments.get("normalization")) is not None:
        arguments["normalization"] = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}.get(normalization, normalization)
    if arguments.get("swiglu") and "ffn_hidden_size" not in arguments:
        # Megatron's rule: two thirds of four times, a multiple of 64.
        arguments["ffn_hidden_size"] = int((4 * arguments.get("hidden_size", 0) * 2 / 3) / 64) * 64
    ours = _beyond_checkpoints(arguments, line)
    try:
        return TransformerConfig(**config_from_arguments(arguments) | ours)
    except ConfigError as error:
        problems += error.problems
        return None


def _beyond_checkpoints(arguments: dict[str, Any], line: CommandLine) -> dict[str, Any]:
    """Remove from the arguments, and return, the fields that a Megatron checkpoint to convert must not have."""
    further = ("mtp_num_layers", "mtp_loss_scaling_factor")
    of_all = {name: arguments.pop(name) for name in further if name in arguments}
    return of_all | (_experts(arguments, line) if arguments.get("num_experts") else {})


def _experts(arguments: dict[str, Any], line: CommandLine) -> dict[str, Any]:
    names = {
        "moe_router_num_groups": "moe_router_num_groups",
        "moe_router_group_topk": "moe_router_group_topk",
        "moe_router_topk_scaling_factor": "moe_router_scaling_factor",
        "moe_shared_expert_intermediate_size": "moe_shared_expert_ffn_hidden_size",
        "moe_dynamic_hpu": "moe_dynamic",
        "moe_capacity_bins_num": "moe_capacity_bins",
        "moe_capacity_bins_exp_base": "moe_capacity_bins_base",
        "moe_capacity_bins_alignment": "moe_capacity_bins_alignment",
        "moe_capacity_bins_optimize_interval": "moe_capacity_bins_interval",
        "moe_capacity_bins_max_overhead_factor": "moe_capacity_bins_max_overhead",
    }
    found = {ours: arguments.pop(name) for name, ours in names.items() if name in arguments}
    if chosen := found.get("moe_router_group_topk"):  # Megatron's rule; our default, DeepSeek's, where it is the same
        best, usual = line.get("moe_router_topk", 2) // chosen, 2 if line.get(_SCORE) == "sigmoid" else 1
        found["moe_router_group_score_topk"] = 0 if best == usual else best
    if arguments.pop("moe_router_enable_expert_bias", False):
        found["moe_expert_bias_update_rate"] = line.get("moe_router_bias_update_rate")
    return found | {"moe_token_dispatcher": line.get("moe_token_dispatcher_type")}


def _vocab_size(line: CommandLine, problems: list[Problem]) -> int:
    """Size of the vocabulary: the one given, else that of the tokenizer, whose files must exist then."""
    kind = line.values.get("tokenizer_type")
    if (given := line.values.get("vocab_size")) is not None:
        return int(given) + (kind == "NullTokenizer")  # which adds an end of document
    from lightning_megatron.data.tokenizers import build_tokenizer  # a large module, which most lines do not need

    try:
        files = {name: line.values.get(name) for name in ("vocab_file", "merge_file")}
        return build_tokenizer(kind or "", line.values.get("tokenizer_model"), **files).vocab_size
    except (OSError, ValueError, ModuleNotFoundError) as error:
        reason = f"is not known: give it, or the tokenizer's files ({one_line(error)})"
        problems.append(Problem("--vocab-size", None, reason))
        return 1


def _strategy(line: CommandLine, batch: _Batch, problems: list[Problem]) -> dict[str, Any]:
    """Arguments of the strategy."""
    get, given = line.get, line.values
    found: dict[str, Any] = {
        "tp": get("tensor_model_parallel_size"),
        "pp": get("pipeline_model_parallel_size"),
        "cp": get("context_parallel_size"),
        "ep": get("expert_model_parallel_size"),
        "vpp": _virtual_stages(line, problems),
        "micro_batch_size": batch.micro,
    }
    found = {name: size for name, size in found.items() if size != 1 or name == "micro_batch_size"}
    if found.get("vpp"):
        found["pipeline_schedule"] = "interleaved"
    if "tp" in found:
        found["sequence_parallel"] = get("sequence_parallel", False)
    if "cp" in found:
        found["cp_comm_type"] = _CP_TYPES.get(get("cp_comm_type", "p2p"), get("cp_comm_type"))
    found |= {ours: given[name] for name, ours in SAME.items() if name in given}
    found["distributed_optimizer"] = get("use_distributed_optimizer", bool(get("zero_stage", 0)))
    found["overlap_grad_reduce"] = get("overlap_grad_reduce", False)
    found["overlap_param_gather"] = get("overlap_param_gather", False)
    if get("zero_stage", 0) > 1:
        line.without["--zero-stage"] = "stage 1 is what `distributed_optimizer` is; gradients and parameters stay whole"
    if get("grad_reduce_in_bf16"):
        found["main_grads_dtype"] = "bf16"  # of buffers, in which Megatron accumulates and sends
    if minutes := given.get("distributed_timeout_minutes"):
        hours, rest = divmod(int(minutes * 60), 3600)
        found["timeout"] = f"{hours}:{rest // 60:02}:{rest % 60:02}"
    if get("use_torch_compile") or get("use_regional_compilation"):
        found["compile"] = True
    return found | _recompute(line) | _ops(line)


def _virtual_stages(line: CommandLine, problems: list[Problem]) -> int:
    stages = line.values.get("num_virtual_stages_per_pipeline_rank")
    layers = line.values.get("num_layers_per_virtual_pipeline_stage")
    if stages or not layers:
        return int(stages or 1)
    per_stage = layers * line.get("pipeline_model_parallel_size")
    whole = line.values.get("num_layers", 0)
    if whole % per_stage:
        reason = f"{whole} layers do not split into stages of {layers} layers on each of {per_stage // layers} ranks"
        problems.append(Problem("--num-layers-per-virtual-pipeline-stage", layers, reason))
    return max(1, int(whole // per_stage))


def _recompute(line: CommandLine) -> dict[str, Any]:
    implied = next((kind for flag, kind in _GRANULARITIES.items() if line.get(flag)), None)
    granularity = line.get("recompute_granularity", implied)
    if granularity == "full":
        found = {"recompute": "full", "recompute_num_layers": line.get("recompute_num_layers", 1)}
        found["recompute_method"] = line.get("recompute_method", "uniform")
        return found | ({"recompute_shard_saved": True} if line.get("distribute_saved_activations") else {})
    modules = list(line.get("recompute_modules", ["core_attn"] if granularity else []))
    modules += ["moe"] if line.get("moe_layer_recompute") and "moe" not in modules else []
    if other := [name for name in modules if name not in MODULES]:
        reason = f"{', '.join(other)} cannot be recomputed alone: these can be {', '.join(MODULES)}"
        line.without["--recompute-modules"] = reason
    modules = [name for name in modules if name in MODULES]
    if not modules:
        return {}
    return {"recompute": "selective" if modules == ["core_attn"] else modules}


def _ops(line: CommandLine) -> dict[str, Any]:
    given, modes = line.values, {}
    if given.get("use_fused_sdpa") is False:
        modes["attention"] = "off"
    elif given.get("use_fast_softmax"):
        modes["attention"] = "fast_softmax"
    found: dict[str, Any] = {}
    if kind := given.get("fp8"):
        modes["linear_fp8"] = "auto"
        if kind != "hybrid":
            line.without["--fp8-format"] = "gradients are e5m2, all else e4m3, which Megatron calls hybrid"
        found["fp8"] = {
            "amax_history_len": line.get("fp8_amax_history_len"),
            "amax_compute": line.get("fp8_amax_compute_algo"),
            "margin": line.get("fp8_margin"),
            "first_layers": line.get("num_layers_at_start_in_bf16") if line.get("first_last_layers_bf16") else 0,
            "last_layers": line.get("num_layers_at_end_in_bf16") if line.get("first_last_layers_bf16") else 0,
            "keep_weights": line.get("cache_fp8_weight", True),
        }
    return found | ({"ops": modes} if modes else {})


def _trainer(line: CommandLine, devices: Devices, batch: _Batch, strategy: Mapping[str, Any]) -> dict[str, Any]:
    get = line.get
    precision = "bf16-mixed" if get("bf16") else "16-mixed" if get("fp16") else "32-true"
    found: dict[str, Any] = {
        "devices": devices.on_node,
        "num_nodes": devices.nodes,
        "strategy": {"class_path": f"{_OURS}MegatronStrategy", "init_args": dict(strategy)},
        "precision": precision,
        **({"max_steps": batch.steps} if batch.samples is None else {}),
        **_validation(line, batch),
        "log_every_n_steps": get("log_interval"),
    }
    if get("clip_grad"):
        found["gradient_clip_val"] = get("clip_grad")
    if get("deterministic_mode"):
        found["deterministic"] = True
    if loggers := _loggers(line):
        found["logger"] = loggers
    return found | {"callbacks": _callbacks(line)}


def _validation(line: CommandLine, batch: _Batch) -> dict[str, Any]:
    """Steps between validations, and their batches; none with an interval of 0."""
    if not (interval := line.get("eval_interval")):
        return {"limit_val_batches": 0}
    return {"val_check_interval": max(1, min(interval, batch.steps)), "limit_val_batches": line.get("eval_iters")}


def _loggers(line: CommandLine) -> list[dict[str, Any]]:
    given, found = line.values, []
    if "tensorboard_dir" in given:
        found.append(_part("TensorBoardLogger", save_dir=given["tensorboard_dir"]))
    if given.get("wandb_project"):
        names = {"wandb_project": "project", "wandb_exp_name": "name", "wandb_save_dir": "save_dir"}
        found.append(_part("WandbLogger", **{ours: given[name] for name, ours in names.items() if name in given}))
    return found


def _callbacks(line: CommandLine) -> list[dict[str, Any]]:
    get, given, found = line.get, line.values, []
    if get("log_throughput"):
        found.append(_part(f"{_OURS}Throughput"))
    if get("moe_per_layer_logging"):
        every = get("moe_token_distribution_logging_interval")
        found.append(_part(f"{_OURS}ExpertTelemetry", every_n_steps=every))
    if get("log_straggler"):
        found.append(_part(f"{_OURS}StragglerMonitor"))
    if get("check_for_spiky_loss"):
        found.append(_part(f"{_OURS}SpikeGuard"))
    if get("profile"):
        found.append(_part(f"{_OURS}DeviceProfiler", steps=[get("profile_step_start"), get("profile_step_end")]))
    if "exit_duration_in_mins" in given:
        found.append(_part("Timer", duration={"minutes": given["exit_duration_in_mins"]}))
    if "save" in given:
        every = {"every_n_train_steps": given["save_interval"]} if "save_interval" in given else {}
        found.append(_part("ModelCheckpoint", dirpath=given["save"], save_last="link", save_top_k=-1, **every))
    if "kill_switch_file" in given:
        found.append(_part(f"{_OURS}KillSwitch", path=given["kill_switch_file"]))
    return found


def _part(class_path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": class_path} | ({"init_args": arguments} if arguments else {})


def _module(line: CommandLine, config: TransformerConfig | None, batch: _Batch) -> dict[str, Any]:
    assert config is not None
    get = line.get
    if get("optimizer") not in ("adam", "fusedadamw"):
        line.without["--optimizer"] = "AdamW is the modules' own; others in `configure_optimizers`"
    arguments = {"lr": get("lr"), "min_lr": get("min_lr"), "init_lr": get("lr_warmup_init")}
    arguments |= _lengths(line, batch) | _weight_decay(line)
    arguments |= {"betas": [get("adam_beta1"), get("adam_beta2")], "eps": get("adam_eps")}
    if get("calculate_per_token_loss"):
        arguments["loss_reduction"] = "token"
    is_llama = (config.norm, config.activation, config.position_embedding) == ("rmsnorm", "swiglu", "rope")
    kind = ("MixtralModule" if config.num_experts else "LlamaModule") if is_llama else "GPTModule"
    return {"class_path": f"{_OURS}{kind}", "init_args": {"config": _changed_fields(config)} | arguments}


def _lengths(line: CommandLine, batch: _Batch) -> dict[str, Any]:
    """Shape of the learning rate, and its lengths, in steps or in samples as the run's own."""
    get, unit = line.get, "steps" if batch.samples is None else "samples"
    style, theirs = get("lr_decay_style"), "iters" if unit == "steps" else "samples"
    whole = batch.steps if batch.samples is None else batch.samples
    decay = get(f"lr_decay_{theirs}") or whole
    warmup = get(f"lr_warmup_{theirs}") or int(get("lr_warmup_fraction", 0.0) * decay)
    found: dict[str, Any] = {f"warmup_{unit}": warmup, f"decay_{unit}": max(decay, warmup + 1)}
    found["lr_schedule"] = "wsd" if style == "WSD" else style
    if style == "WSD":
        found |= {f"tail_{unit}": get(f"lr_wsd_decay_{theirs}"), "tail_style": get("lr_wsd_decay_style")}
    return found


def _weight_decay(line: CommandLine) -> dict[str, Any]:
    """Weight decay; with a schedule it goes from the one at the start to the one at the end."""
    style = line.get("weight_decay_incr_style")
    if style == "constant":
        return {"weight_decay": line.get("weight_decay")}
    ends = {"weight_decay": line.get("end_weight_decay"), "start_weight_decay": line.get("start_weight_decay")}
    return ends | {"weight_decay_schedule": style}


def _changed_fields(config: TransformerConfig) -> dict[str, Any]:
    """Fields that differ from their defaults, and those without one."""
    found = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.default is MISSING or value != field.default:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def _data(line: CommandLine, batch: _Batch) -> dict[str, Any]:
    get, given = line.get, line.values
    paths = given.get("data_path") or given.get("train_data_path")
    if not paths:
        line.to_fill["data.init_args.data_path"] = "the line names no data: give the prefix of a .bin and .idx file"
    found: dict[str, Any] = {"data_path": _blend(paths or ["?"])}
    for name, ours in (("valid_data_path", "val_data_path"), ("test_data_path", "test_data_path")):
        if name in given:
            found[ours] = _blend(given[name])
    found |= {"seq_length": get("seq_length"), **_batches(batch)}
    if "train_data_path" not in given:
        found["split"] = get("split").replace(" ", "")
    found |= {"seed": get("seed"), "num_workers": get("num_workers")}
    tokenizer = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    same = (*tokenizer, "eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    found |= {name: given[name] for name in same if name in given and given[name] != "NullTokenizer"}
    if "data_cache_path" in given:
        found["cache_dir"] = given["data_cache_path"]
    return {"class_path": f"{_OURS}MegatronDataModule", "init_args": found}


def _batches(batch: _Batch) -> dict[str, Any]:
    if batch.samples is None:
        return {"batch_size": batch.replica}
    found: dict[str, Any] = {"global_batch_size": batch.all, "train_samples": batch.samples}
    return found | ({"rampup_batch_size": list(batch.ramp)} if batch.ramp else {})


def _blend(words: list[str]) -> Any:
    """One prefix, or weights and prefixes in turn."""
    return words[0] if len(words) == 1 else [float(word) if is_number(word) else word for word in words]
