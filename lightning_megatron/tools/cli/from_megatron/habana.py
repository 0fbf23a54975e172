"""Command lines that the scripts of Megatron-LM's fork for Gaudi make of ``HL_*`` variables, in release 1.24."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_megatron.errors import Problem, nearest_names, raise_if_any
from lightning_megatron.tools.cli.from_megatron.variables import (
    COMPUTED,
    FLAGS,
    HERE,
    NONE,
    SWITCHES,
    WITH_BINS,
    WITH_FP8,
)

_MODELS: Mapping[str, tuple[str, ...]] = {
    # layers, width, heads, groups, features of a feed-forward layer; rate at its highest and lowest
    "1/7": ("32", "4096", "32", "32", "11008", "3e-4", "3e-5"),
    "1/13": ("40", "5120", "40", "40", "13824", "3e-4", "3e-5"),
    "1/65": ("80", "8192", "64", "64", "22016", "1.5e-4", "1.5e-5"),
    "2/7": ("32", "4096", "32", "32", "11008", "3e-4", "3e-5"),
    "2/13": ("40", "5120", "40", "40", "13824", "3e-4", "3e-5"),
    "2/34": ("48", "8192", "64", "8", "22016", "1.5e-4", "1.5e-5"),
    "2/70": ("80", "8192", "64", "8", "28672", "1.5e-4", "1.5e-5"),
    "3.1/8": ("32", "4096", "32", "8", "14336", "3e-4", "3e-6"),
    "3.1/70": ("80", "8192", "64", "8", "28672", "1.5e-4", "1.5e-6"),
    "3.1/405": ("126", "16384", "128", "8", "53248", "8e-5", "8e-7"),
    "3.2/1": ("16", "2048", "32", "8", "8192", "4e-4", "4e-6"),
    "8x7b": ("32", "4096", "32", "8", "14336", "3e-4", "3e-6"),
}
_VERSIONS: Mapping[str, tuple[str, ...]] = {
    # samples of a step, tokens, steps, eps of Adam, steps of warm-up, base of rotary embeddings, tokenizer
    "1": ("2048", "2048", "250000", "1e-8", "2000", "10000", "GPTSentencePieceTokenizer"),
    "2": ("1024", "4096", "500000", "1e-8", "2000", "10000", "GPTSentencePieceTokenizer"),
    "3.1": ("2048", "8192", "937500", "1e-5", "8000", "500000", "HuggingFaceTokenizer"),
    "3.2": ("1024", "8192", "937500", "1e-5", "8000", "500000", "HuggingFaceTokenizer"),
    "mixtral": ("", "32768", "250000", "1e-8", "2000", "1000000", "GPTSentencePieceTokenizer"),
}
_SIZES = ("HL_NUM_LAYERS", "HL_HIDDEN_SIZE", "HL_NUM_HEADS", "HL_NUM_QUERY_GROUPS", "HL_FFN_HIDDEN_SIZE")
_COMMON = {
    "HL_NUM_NODES": "1", "HL_DEVICES_PER_NODE": "8", "HL_CP": "1", "HL_MICRO_BATCH": "1", "HL_DROPOUT": "0.0",
    "HL_EVAL_ITERS": "100", "HL_EVAL_INTERVAL": "1000", "HL_LOG_INTERVAL": "10", "HL_OPTIMIZER": "fusedadamw",
    "HL_USE_FUSED_SDPA": "1", "HL_USE_FAST_SOFTMAX": "1", "HL_USE_TORCH_COMPILE": "0", "HL_BF16": "1",
    "HL_SEQ_PARALLEL": "1", "HL_CKP_ACT": "0", "HL_RECOMPUTE_NUM_LAYERS": "1", "HL_SAVE_INTERVAL": "2000",
    "HL_DATA_DIR_ROOT": "/data/datasets/red_pajama", "HL_RESULTS_DIR_PREFIX": ".", "HL_FP8": "0",
    "HL_FP8_FORMAT": "hybrid", "HL_FP8_MARGIN": "0", "HL_FP8_AMAX_COMPUTE_ALGO": "max", "HL_PROFILE_STEP_START": "3",
    "HL_PROFILE_STEP_END": "4",
}  # fmt: skip
_LLAMA = {
    "HL_LLAMA_VER": "3.1", "HL_LLAMA_MODEL_SIZE": "8", "HL_DP": "2", "HL_TP": "2", "HL_PP": "2", "HL_NUM_WORKERS": "2",
    "HL_CP_COMM_TYPE": "p2p", "HL_SAVE": "1", "HL_USE_DISTRIBUTED_OPTIMIZER": "1", "HL_DETERMINISTIC_MODE": "1",
    "HL_DATA_FILE_PREFIX": "redpajama",
}  # fmt: skip
_MIXTRAL = {
    "HL_MIXTRAL_MODEL": "8x7b", "HL_DP": "1", "HL_TP": "8", "HL_PP": "1", "HL_NUM_WORKERS": "0", "HL_SAVE": "0",
    "HL_DATA_FILE_PREFIX": "medium", "HL_ETP": "0", "HL_MOE_NUM_EXPERTS": "8", "HL_MOE_TOPK": "2",
    "HL_MOE_AUX_LOSS_COEFF": "2e-2", "HL_MOE_ROUTER_PRE_SOFTMAX": "1", "HL_TOKEN_DISPATCHER_TYPE": "alltoall",
    "HL_MOE_LOAD_BALANCING_TYPE": "aux_loss", "HL_MOE_NUM_CAPACITY_BINS": "10", "HL_MOE_CAPACITY_BINS_EXP_BASE": "1.5",
    "HL_MOE_CAPACITY_BINS_ALIGNMENT": "64", "HL_MOE_CAPACITY_BINS_OPTIMIZE_INTERVAL": "300",
    "HL_MOE_CAPACITY_BINS_MAX_OVERHEAD_FACTOR": "0.0", "HL_MOE_TOKEN_DISTRIBUTION_LOGGING_INTERVAL": "50",
}  # fmt: skip
_FIXED = (
    "--use-mcore-models --group-query-attention --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--untie-embeddings-and-output-weights --disable-bias-linear --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 "
    "--adam-beta2 0.95 --lr-decay-style cosine --log-throughput"
)
SCRIPTS: Mapping[str, Mapping[str, str]] = {"llama": _COMMON | _LLAMA, "mixtral": _COMMON | _MIXTRAL}
"""Defaults by script."""
_CHECKED = {"llama": ("HL_DP", "HL_LLAMA_VER", "HL_LLAMA_MODEL_SIZE"), "mixtral": ("HL_DP", "HL_MIXTRAL_MODEL")}
"""Variables by script that become no flag themselves: the model is chosen by them, or the devices are counted."""
_UNREAD = "the script does not read it, or not without another variable that switches on what it belongs to"
_KNOWN = (*FLAGS, *SWITCHES, *WITH_BINS, *WITH_FP8, *COMPUTED, *HERE, *NONE)


class _Values(dict[str, str]):
    """Values of variables, which remember the names that are read."""

    def __init__(self, values: Mapping[str, str]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a variable, or ``default``."""
        self.read.add(name)
        return super().get(name, default)


@dataclass
class HabanaLine:
    """A command line made from variables.

    Attributes:
        text: the words, with a launcher in front.
        without: variables without a counterpart, with the reason.
    """

    text: str
    without: dict[str, str] = field(default_factory=dict)


def habana_line(script: str, environment: Mapping[str, str]) -> HabanaLine:
    """The line that a script of the fork makes.

    Args:
        script: ``"llama"`` or ``"mixtral"``.
        environment: variables; those that do not begin with ``HL_``, and empty ones, are left out.

    Raises:
        ConfigError: for values that the script refuses.
    """
    given = {name: value for name, value in environment.items() if name.startswith("HL_") and value}
    values = {**SCRIPTS[script], **given}
    problems = [*_problems(script, values), *_model_problems(script, values)]
    raise_if_any(problems)
    _fill(script, values)
    raise_if_any(_devices_problems(values))
    values = _Values(values)
    words = ["torchrun", "--nproc_per_node", values["HL_DEVICES_PER_NODE"], "--nnodes", values["HL_NUM_NODES"]]
    words += ["pretrain_gpt.py", *_FIXED.split(), *_flags(values)]
    for part in (_folders, _recompute, _fp8, _profile, *((_experts,) if script == "mixtral" else ())):
        words += part(values)
    usual, read = SCRIPTS[script], {*values.read, *_CHECKED[script], *HERE}
    without = {name: _reason(name) for name, value in given.items() if _is_without(name, value)}
    unread = [name for name, value in given.items() if name not in {*read, *NONE} and value != usual.get(name)]
    return HabanaLine(shlex.join(words), dict.fromkeys(unread, _UNREAD) | without)


def _is_without(name: str, value: str) -> bool:
    return name not in _KNOWN or (name in NONE and value != "0")


def _reason(name: str) -> str:
    return NONE.get(name, f"not known here; nearest: {', '.join(nearest_names(name, _KNOWN)[:3])}")


def _problems(script: str, values: Mapping[str, str]) -> list[Problem]:
    """Problems of switches that are not 0 or 1, and of values that must be numbers since they are calculated with."""
    switches = (*SWITCHES, "HL_SAVE", "HL_FP8")
    found = [Problem(n, values[n], "must be 0 or 1") for n in switches if values.get(n, "0") not in ("0", "1")]
    numbers = ["HL_DP", "HL_TP", "HL_PP", "HL_CP", "HL_NUM_NODES", "HL_DEVICES_PER_NODE", "HL_MICRO_BATCH", "HL_GBS"]
    numbers += ["HL_SEQ_LEN", "HL_MOE_NUM_EXPERTS"]
    for name in numbers:
        if name in values and (not values[name].isdigit() or int(values[name]) < 1):
            found.append(Problem(name, values[name], "must be a whole number of at least 1"))
    if values["HL_CKP_ACT"] not in ("0", "1", "2", *(("3",) if script == "mixtral" else ())):
        found.append(Problem("HL_CKP_ACT", values["HL_CKP_ACT"], "the script knows 0, 1 and 2, and for Mixtral 3"))
    return found


def _model_problems(script: str, values: Mapping[str, str]) -> list[Problem]:
    name = "HL_MIXTRAL_MODEL" if script == "mixtral" else "HL_LLAMA_VER"
    if _model(script, values) in _MODELS:
        return []
    known = [each.replace("/", " of ") for each in _MODELS if ("/" in each) == (script == "llama")]
    given = _model(script, values).replace("/", " of ")
    return [Problem(name, given, "is no model of the script", tuple(known))]


def _model(script: str, values: Mapping[str, str]) -> str:
    if script == "mixtral":
        return values["HL_MIXTRAL_MODEL"]
    return f"{values['HL_LLAMA_VER']}/{values['HL_LLAMA_MODEL_SIZE']}"


def _fill(script: str, values: dict[str, str]) -> None:
    """Add the values that follow from the model."""
    *sizes, lr, min_lr = _MODELS[_model(script, values)]
    samples, tokens, steps, eps, warmup, base, tokenizer = _VERSIONS[
        "mixtral" if script == "mixtral" else values["HL_LLAMA_VER"]
    ]
    own = dict(zip(_SIZES, sizes, strict=True)) | {"HL_SEQ_LEN": tokens, "HL_TRAIN_ITERS": steps}
    own |= {"HL_LR_WARMUP_ITERS": warmup, "HL_TOKENIZER_TYPE": tokenizer}
    values |= own | values
    values.setdefault("HL_GBS", samples or str(2**22 // int(values["HL_SEQ_LEN"])))
    values |= {"lr": lr, "min-lr": min_lr, "adam-eps": eps, "rotary-base": base, "script": script}
    devices = int(values["HL_NUM_NODES"]) * int(values["HL_DEVICES_PER_NODE"])
    if script == "llama" and devices > 128:
        values["HL_OVERLAP_GRAD_REDUCE"] = "1"
    if script == "mixtral" and values["HL_TP"] != "1":
        values["HL_SEQ_PARALLEL"] = "1"
    if script == "mixtral":
        values.setdefault("HL_MOE_EP", str(min(int(values["HL_MOE_NUM_EXPERTS"]), devices)))


def _devices_problems(values: Mapping[str, str]) -> list[Problem]:
    ranks = 1
    for name in ("HL_DP", "HL_TP", "HL_PP", "HL_CP"):
        ranks *= int(values[name])
    devices = int(values["HL_NUM_NODES"]) * int(values["HL_DEVICES_PER_NODE"])
    if ranks == devices:
        return []
    reason = f"DP x TP x PP x CP are {ranks} ranks, the machines have {devices} devices"
    rest = ranks // int(values["HL_DP"])
    return [Problem("HL_DP", values["HL_DP"], reason, () if devices % rest else (devices // rest,))]


def _flags(values: Mapping[str, str]) -> list[str]:
    found = [word for name in ("lr", "min-lr", "adam-eps", "rotary-base") for word in (f"--{name}", values[name])]
    left = _left_out(values)
    for name, flags in FLAGS.items():
        if name in values and name not in left:
            found += [word for flag in flags for word in (flag, values[name])]
    return found + [flag for name, flag in SWITCHES.items() if name not in left and values.get(name) == "1"]


def _left_out(values: Mapping[str, str]) -> set[str]:
    """Variables that the script does not read beside these values."""
    left = set[str]()
    if not values.get("HL_MOE_EXPERT_CAPACITY_FACTOR"):
        left |= {"HL_MOE_TOKEN_DROP_POLICY", "HL_MOE_PAD_EXPERT_INPUT_TO_CAPACITY"}
    if values.get("HL_MOE_DYNAMIC") == "1" or values["script"] == "llama":
        left.add("HL_TOKEN_DISPATCHER_TYPE")
    if values["script"] == "llama":
        left |= {name for name in (*FLAGS, *SWITCHES) if name.startswith("HL_MOE_")}
    return left


def _folders(values: Mapping[str, str]) -> list[str]:
    """Data, tokenizer, checkpoints and logs."""
    root, script = values["HL_DATA_DIR_ROOT"], values["script"]
    output = values.get("HL_RESULTS_DIR") or f"{values['HL_RESULTS_DIR_PREFIX']}/out/{script}"
    found = ["--data-path", f"{root}/{values['HL_DATA_FILE_PREFIX']}", "--distributed-timeout-minutes"]
    found += ["60" if script == "mixtral" else "120"]
    if values["HL_TOKENIZER_TYPE"] == "GPT2BPETokenizer":
        found += ["--vocab-file", f"{root}/gpt2-vocab.json", "--merge-file", f"{root}/gpt2-merges.txt"]
    else:
        found += ["--tokenizer-model", values.get("HL_TOKENIZER_MODEL") or f"{root}/tokenizer.model"]
    if "HL_TENSORBOARD_DIR" not in values:
        found += ["--tensorboard-dir", f"{output}/tensorboard"]
    saved = values.get("HL_CHECKPOINTS_DIR") or f"{output}/checkpoints"
    if values["HL_SAVE"] == "1":
        found += ["--save", saved, "--save-interval", values["HL_SAVE_INTERVAL"]]
        found += ["--load", values.get("HL_LOAD_DIR") or saved]
    elif "HL_LOAD_DIR" in values:
        found += ["--load", values["HL_LOAD_DIR"]]
    return found


def _recompute(values: Mapping[str, str]) -> list[str]:
    selective = ["--recompute-granularity", "selective"]
    full = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
    kinds = {"0": [], "1": full, "2": selective, "3": [*selective, "--recompute-modules", "moe"]}
    layers = ["--recompute-num-layers", values["HL_RECOMPUTE_NUM_LAYERS"]] if values["HL_CKP_ACT"] == "1" else []
    return [*kinds[values["HL_CKP_ACT"]], *layers]


def _fp8(values: Mapping[str, str]) -> list[str]:
    if values["HL_FP8"] != "1":
        return []
    micros = int(values["HL_GBS"]) // int(values["HL_MICRO_BATCH"]) // int(values["HL_DP"])
    usual = {"HL_FP8_AMAX_HISTORY_LEN": str(micros if values["script"] == "mixtral" else (micros + 15) // 16)}
    small = (values.get("HL_LLAMA_VER"), values.get("HL_LLAMA_MODEL_SIZE")) == ("3.1", "8")
    usual |= {"HL_CACHE_FP8_WEIGHT": "0" if small else "1"}
    return [word for name, flag in WITH_FP8.items() for word in (flag, values.get(name) or usual[name])]


def _profile(values: Mapping[str, str]) -> list[str]:
    if "HL_PROFILE_TYPE" not in values:
        return []
    first, last = values["HL_PROFILE_STEP_START"], values["HL_PROFILE_STEP_END"]
    return ["--profile", "--profile-step-start", first, "--profile-step-end", last]


def _experts(values: Mapping[str, str]) -> list[str]:
    """Experts over ranks, and capacity bins.

    Raises:
        ConfigError: for two of the three ways to size their inputs.
    """
    bins, factor = values["HL_MOE_NUM_CAPACITY_BINS"], values.get("HL_MOE_EXPERT_CAPACITY_FACTOR")
    ways = {"HL_MOE_DYNAMIC": values.get("HL_MOE_DYNAMIC") == "1", "HL_MOE_NUM_CAPACITY_BINS": bins != "0"}
    on = [name for name, is_on in (ways | {"HL_MOE_EXPERT_CAPACITY_FACTOR": bool(factor)}).items() if is_on]
    if len(on) > 1:
        reason = f"cannot be beside {on[1]}: the script refuses both; HL_MOE_NUM_CAPACITY_BINS=0 switches bins off"
        raise_if_any([Problem(on[0], values[on[0]], reason)])
    etp = values["HL_TP"] if values["HL_ETP"] == "0" else values["HL_ETP"]
    found = ["--expert-model-parallel-size", values["HL_MOE_EP"], "--expert-tensor-parallel-size", etp]
    if values.get("HL_MOE_TOKEN_DISTRIBUTION_LOGGING") == "1":
        interval = values["HL_MOE_TOKEN_DISTRIBUTION_LOGGING_INTERVAL"]
        found += ["--moe-token-distribution-logging-interval", interval]
    if bins == "0":
        return found
    found += ["--moe-capacity-bins-num", bins]
    return found + [word for name, flag in WITH_BINS.items() for word in (flag, values[name])]
