"""Translation of a published row into a job, a device and a program; or the reason why it cannot be translated."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from anchors.programs import program_name
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.presets import preset
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.tools.planning.core.job import PlannedJob

Row = dict[str, Any]

DATA = Path(__file__).parents[1] / "data" / "plan_anchors.json"
CI_FLAGS = DATA.with_name("megatron_ci_flags.json")
"""Flags of Megatron-LM's functional tests that decide on memory and are not in the rows, from their YAML files."""
GiB = 1 << 30

DEVICES = {
    "a100_40gb": "a100-40",
    "a100_80gb": "a100-80",
    "A100-80GB": "a100-80",
    "A100-80GB SXM": "a100-80",
    "h100_80gb": "h100",
    "H100": "h100",
    "H100-80GB": "h100",
    "H100 SXM": "h100",
    "H100 (8 a node)": "h100-slow-network",
    "DGX-H100": "h100",
    "DGX H100": "h100",
    "H100 96GB HBM2e 500W": "h100-500w",
    "H800": "h800",
    "H200": "h200",
    "B200-SXM": "b200",
    "DGX-GB200": "gb200",
    "GB200": "gb200",
}
"""Device files by the sources' words; those with another name than a device file are variants, see ``timing.py``."""

EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral 8x7B": {"num_experts": 8, "moe_router_topk": 2},
    "mixtral_8x7b": {"num_experts": 8, "moe_router_topk": 2},
    "Qwen3_30B": {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "head_dim": 128},
    "Qwen3_235B": {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 1536, "head_dim": 128},
    "Qwen3-235B": {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 1536, "head_dim": 128},
}
"""Experts by model: the published configurations."""

SHAPES: dict[str, Row] = {
    "GPT3-175B": {"layers": 96, "hidden": 12288, "heads": 96, "kv": 96, "ffn": 49152, "vocab": 51200},
}
"""Shapes of well-known models that a source names without them."""

PRESETS = {"DeepSeek-V2": "deepseek-v2", "DeepSeek-V3": "deepseek-v3", "DeepSeekV3": "deepseek-v3"}
PRESETS["DeepSeek V3"] = "deepseek-v3"
"""Models whose rows are too short for all of their shape, by our presets."""

VOCABULARIES = {"Qwen3": 151936, "Mixtral": 32000, "mixtral": 32000}
_GATED = ("llama", "qwen", "mixtral")
_FP8 = ("fp8", "mxfp8", "float8", "nvfp4")


@dataclass(frozen=True)
class Anchor:
    """A published point with the job that made it.

    Attributes:
        row: the row as published.
        job: the job.
        device: name of the device.
        program: name of the program.
        dtype: number format of the linear layers' products.
        tokens_per_second: measured tokens a second and device; ``None`` if the row has only memory.
        memory: measured peak, bytes; ``None`` if the row has only time.
        after_step: measured bytes after a step, or ``None``.
    """

    row: Row
    job: PlannedJob
    device: str
    program: str
    dtype: str
    tokens_per_second: float | None
    memory: float | None
    after_step: float | None

    @property
    def source(self) -> str:
        """Short name of the source."""
        return source_name(self.row)

    @property
    def is_for_the_fit(self) -> bool:
        """True for the half of rows that constants are fitted to: by the hash of source and model."""
        return is_for_the_fit(self.row)


def is_for_the_fit(row: Row) -> bool:
    """True if the first byte of the SHA-256 of ``source|model`` is even."""
    return hashlib.sha256(f"{row['source']}|{row['model']}".encode()).digest()[0] % 2 == 0


def source_name(row: Row) -> str:
    """Short name of a row's source."""
    framework, source = row["framework"], row["source"]
    if "functional_tests" in source:
        return "Megatron-LM CI"
    if "SimuMax" in source:
        return "SimuMax B200"
    if "table_1" in source:
        return "Narayanan 2021"
    if "megatron_moe_benchmark" in source:
        return "xtuner, Megatron"
    return re.sub(r" [\d.]+ NeMo Container| main .*| 0\.5", "", framework)


def read_rows(path: Path = DATA) -> list[Row]:
    """The published rows."""
    rows: list[Row] = json.loads(path.read_text())
    return rows


def translate(row: Row) -> Anchor | str:
    """The anchor of a row, or the reason why there is none."""
    row = {**row, **next((shape for name, shape in SHAPES.items() if row["model"] == name), {})}
    reason = _untranslatable(row)
    if reason:
        return reason
    device, program = DEVICES[row["gpu"]], program_name(row["framework"])
    assert program is not None
    try:
        job = _job(row)
    except ConfigError as error:
        return f"no layout of ours: {error.problems[0]}"
    if source_name(row) == "Megatron-LM CI":
        program = "megatron-ci"
    fp8 = _is_fp8(row)
    measured = row["measured"]
    # nanotron writes bytes over 1024^3 under the name of GB (its helpers.py, `create_table_log`).
    unit = GiB if measured.get("memory_unit") == "GiB" or program == "nanotron" else 1e9
    memory, after = measured.get("memory_gb"), measured.get("memory_after_step_gb")
    return Anchor(
        row,
        job,
        device,
        program,
        "fp8" if fp8 else "bf16",
        _tokens_per_second(row, job),
        None if memory is None else memory * unit,
        None if after is None else after * unit,
    )


def _untranslatable(row: Row) -> str:
    """Reason why a row cannot be a job of ours; empty if it can."""
    missing = [name for name in ("layers", "hidden", "heads", "seq", "n_gpu", "tp", "pp") if row.get(name) is None]
    if missing:
        return f"the source does not say {', '.join(missing)}"
    if row.get("gpu") not in DEVICES:
        return f"no device file for {row.get('gpu')}"
    if program_name(row["framework"]) is None:
        return f"no description of {row['framework']}"
    words = f"{row['model']} {row.get('notes', '')}"
    for word in ("LoRA", "multi-latent", "Moonlight", "Nemotron", "GPT OSS", "Kimi", "op-fuser"):
        if word in words:
            return f"{word}: no such model here"
    named = re.search(r"experts \d", row.get("notes") or "")
    if (row.get("ep") or 1) > 1 and not (_preset(row) or _experts(row) or named):
        return "experts that the source does not describe"
    if row["sharding"] if row.get("sharding") == "FSDP" else False:
        return "Megatron FSDP: not described"
    return ""


def _experts(row: Row) -> dict[str, Any]:
    return next((given for name, given in EXPERTS.items() if name in row["model"]), {}) or _experts_of_notes(row)


def _experts_of_notes(row: Row) -> dict[str, Any]:
    found = re.search(r"experts (\d+), top-k (\d+)", row.get("notes") or "")
    if found is None:
        return {}
    return {"num_experts": int(found[1]), "moe_router_topk": int(found[2]), "moe_router_pre_softmax": True}


def _is_fp8(row: Row) -> bool:
    return any(word in (row.get("precision") or "").lower() for word in _FP8)


@cache
def _all_ci_flags() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(CI_FLAGS.read_text())
    return found


def _ci_flags(row: Row) -> dict[str, Any]:
    """Flags of a functional test of Megatron-LM; none for other rows."""
    return _all_ci_flags().get(row["model"].split()[-1], {}) if source_name(row) == "Megatron-LM CI" else {}


def _preset(row: Row) -> TransformerConfig | None:
    """A preset with the row's layers. Of few ones the first is dense, as the source says of its rows."""
    name = next((known for word, known in PRESETS.items() if row["model"].startswith(word)), None)
    if name is None:
        return None
    whole, layers = preset(name), row["layers"]
    return whole if layers == whole.num_layers else whole.replace(num_layers=layers, moe_layers=tuple(range(1, layers)))


def _config(row: Row) -> TransformerConfig:
    if (known := _preset(row)) is not None:
        return known
    name, ci = row["model"].lower(), _ci_flags(row)
    flags = row.get("notes") or ""
    gated = any(word in name for word in _GATED) or "swiglu" in flags
    experts = _experts(row)
    vocab = row.get("vocab") or next((n for word, n in VOCABULARIES.items() if word in row["model"]), 50257)
    return TransformerConfig(
        row["layers"],
        row["hidden"],
        row["heads"],
        vocab,
        max(row["seq"], 2048),
        ffn_hidden_size=row.get("ffn") or ci.get("ffn_hidden_size", 0),
        num_query_groups=row.get("kv") or 0,
        norm=ci.get("norm") or ("rmsnorm" if gated and not ci else "layernorm"),
        activation="swiglu" if gated else "gelu",
        position_embedding=_positions(row, gated),
        hidden_dropout=ci.get("hidden_dropout", 0.0),
        add_bias_linear=not gated and "mpt" not in name and not experts and "disable-bias-linear" not in flags,
        tie_embeddings=_is_tied(row, gated),
        vocab_multiple=1 if "mpt" in name else 128,
        **experts,
    )


def _is_tied(row: Row, gated: bool) -> bool:
    if source_name(row) == "nanotron":
        return bool(row["ffn"] < 10_000)  # the rule of its scaling_benchmarks.py
    if source_name(row) == "Megatron-LM CI":
        return "untie-embeddings" not in (row.get("notes") or "")
    return not gated


def _positions(row: Row, gated: bool) -> Any:
    given = _ci_flags(row).get("position_embedding")
    if given:
        return {"rope": "rope", "yarn": "rope", "none": "none"}.get(given, "learned")
    if _ci_flags(row):
        return "learned"
    return "rope" if gated else "none" if "mpt" in row["model"].lower() else "learned"


def _split(row: Row, config: TransformerConfig, stages: int) -> LayerSplit:
    """Layers of the stages: even, as flags of Megatron-LM's tests say, or by the rule of the program."""
    ci = _ci_flags(row)
    given: dict[str, Any] = {
        name: ci[name] for name in ("first_stage_layers", "last_stage_layers", "layout") if name in ci
    }
    given |= {name: True for name in ("count_embedding", "count_loss") if ci.get(name)}
    if given:
        return LayerSplit(**given)
    if source_name(row) == "nanotron" and stages > 1:
        return _nanotron_split(config, stages)
    if config.num_layers % stages == 0:
        return LayerSplit()
    if (config.num_layers + 2) % stages == 0:
        return LayerSplit(count_embedding=True, count_loss=True)
    return LayerSplit(layout="balanced")


def _nanotron_split(config: TransformerConfig, stages: int) -> LayerSplit:
    """Split in which a stage ends once the work of all layers so far exceeds the share of all stages so far."""
    layer = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.ffn_hidden_size
    share = (config.num_layers * layer + config.vocab_size * config.hidden_size) / stages
    letters, stage = "E", 0
    for number in range(1, config.num_layers + 1):
        letters += "t"
        if number * layer > share * (stage + 1) and stage < stages - 1:
            letters, stage = letters + "|", stage + 1
    return LayerSplit(layout=letters + "|" * (stages - 1 - stage) + "L")


def _job(row: Row) -> PlannedJob:
    config = _config(row)
    ep = row.get("ep") or 1
    etp_given = re.search(r"etp (\d+)", row.get("notes") or "")
    follows_tp = ep == 1 or "etp None" in (row.get("notes") or "")
    etp = int(etp_given[1]) if etp_given else None if follows_tp else 1
    layout = ParallelLayout(
        row["tp"],
        row["pp"],
        row.get("cp") or 1,
        ep,
        etp if config.num_experts else None,
        vpp=row.get("vpp") or 1,
        sequence_parallel=_sequence_parallel(row),
    ).resolve(row["n_gpu"])
    micro = row.get("micro_bs") or 1
    if row.get("global_bs"):
        micros = max(1, row["global_bs"] // (layout.data_parallel_size * micro))
    else:
        micros = 8 if layout.pp > 1 else 1  # torchtitan's pipelines: a local batch of 8
    of_2021 = source_name(row) == "Narayanan 2021"  # before fused attention, sequence parallelism and overlap
    overlaps = source_name(row) not in ("Narayanan 2021", "xtuner, Megatron")  # the latter names it where it is on
    sharding = row.get("sharding") or ""
    return PlannedJob(
        config,
        layout,
        row["seq"],
        micro,
        micros,
        precision="bf16-mixed",
        fp8=_is_fp8(row),
        split=_split(row, config, layout.pp * layout.vpp),
        recompute=_recompute(row.get("recompute") or "none", bool(config.num_experts)),
        distributed_optimizer="DDP" not in sharding and "ZeRO-0" not in sharding,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        attention="reference" if of_2021 or _ci_flags(row).get("scores_kept") else "flash",
    )


def _sequence_parallel(row: Row) -> bool | None:
    """``None`` for the default, on with tp: the sources that name their flags, or are too old, may have it off."""
    if row["tp"] == 1 or (row.get("ep") or 1) > 1:
        return None
    name = source_name(row)
    if name == "Megatron-LM CI":
        return "sequence-parallel" in (row.get("notes") or "")
    return False if name == "Narayanan 2021" else None


def _recompute(text: str, has_experts: bool) -> RecomputePlan:
    """The plan; parts smaller than ours (a norm, an activation) count as nothing."""
    if text.startswith("full"):
        return RecomputePlan("full")
    parts = [name for name in ("core_attn", "mlp", "moe") if re.search(rf"\b{name}\b", text)]
    parts = [name for name in parts if has_experts or name != "moe"]
    return RecomputePlan(parts or None)


def _tokens_per_second(row: Row, job: PlannedJob) -> float | None:
    """Measured tokens a second and device, FLOPs turned into tokens by the source's own convention."""
    measured = row["measured"]
    if "tokens_per_s_per_gpu" in measured:
        return float(measured["tokens_per_s_per_gpu"])
    if "step_s" in measured and row.get("global_bs"):
        return float(row["global_bs"] * row["seq"] / measured["step_s"] / row["n_gpu"])
    seq, config = row["seq"], job.config
    full = 2 * config.flops_per_token(seq) - config.flops_per_token(0)  # all scores counted, masked ones too
    name = source_name(row)
    if name == "Narayanan 2021":  # with the forward that is computed again
        head = 6.0 * config.hidden_size * config.vocab_size
        return float(measured["tflops_per_gpu"] * 1e12 / ((full - head) * 4 / 3 + head))
    if name == "nanotron":
        return float(measured["mfu"] * 989e12 / full)
    return None
