"""gpt-oss: sinks, a window in every second layer, YaRN, and experts with biases and a clamped SwiGLU."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_megatron.config.hugging_face.decoder import decoder_from_hf, decoder_to_hf
from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.rope import rope_from_hf
from lightning_megatron.config.hugging_face.tensors import (
    INTERLEAVED,
    INTERLEAVED_COLUMNS,
    TRANSPOSED,
    in_layers,
    rule,
)
from lightning_megatron.config.hugging_face.windows import kinds_to_hf, layer_windows_from_hf, window_from_hf
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.config.rope_scaling import YarnScaling
from lightning_megatron.families.llama import TENSORS as LLAMA_TENSORS
from lightning_megatron.families.llama import llama_recipe
from lightning_megatron.families.mixtral import refuse_one_of_one

ARCHITECTURE = "GptOssForCausalLM"
_CLAMPED = {"silu": "swiglu_clamped"}
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of the configuration; the coefficient of the load-balancing loss is converted as for Mixtral."""
    found = decoder_from_hf(reader, _CLAMPED, angles=partial(rope_from_hf, usual=_YARN))
    layers, bias = found["num_layers"], reader.get("attention_bias", True)
    windows = layer_windows_from_hf(reader, layers, window_from_hf(reader), lambda number: number % 2 == 0)
    experts = reader.get("num_local_experts", reader.get("num_experts", 128))
    topk = reader.get("num_experts_per_tok", 4)
    refuse_one_of_one(reader, topk)
    _expect_same(reader, "num_experts", "num_local_experts", experts)
    _expect_same(reader, "experts_per_token", "num_experts_per_tok", topk)
    if (scaling := found["rope_scaling"]) and scaling["kind"] == "yarn":
        original = "original_max_position_embeddings"
        _expect_same(reader, "initial_context_length", f"rope_scaling.{original}", scaling[original])
    return (
        found
        | windows
        | {
            "add_qkv_bias": bias,
            "add_attention_out_bias": bias,
            "attention_sinks": True,
            "swiglu_alpha": reader.get("swiglu_alpha", 1.702),
            "swiglu_limit": reader.get("swiglu_limit", 7.0),
            "num_experts": experts,
            "moe_linear_bias": True,
            "moe_router_topk": topk,
            "moe_aux_loss_coeff": reader.get("router_aux_loss_coef", 0.001) * topk / max(1, layers),
        }
    )


def _expect_same(reader: ConfigReader, name: str, other: str, value: Any) -> None:
    """Refuse a second name of an entry with another value."""
    reader.expect(name, value, (value,), f"is another name of {other}={value}")


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    reason, bias = f"not what {ARCHITECTURE} computes", reader["add_qkv_bias"]
    layers, topk = reader["num_layers"], reader["moe_router_topk"]
    for name, only in (
        ("add_bias_linear", False),
        ("add_attention_out_bias", bias),
        ("attention_sinks", True),
        ("moe_linear_bias", True),
    ):
        reader.expect(name, None, (only,), reason)
    reader.expect("moe_layers", (), ((), tuple(range(layers))), reason)
    if not reader["num_experts"]:
        reader.refuse("num_experts", 0, f"{ARCHITECTURE} has experts in every layer")
    found = decoder_to_hf(reader, ARCHITECTURE, _CLAMPED)
    return (
        found
        | kinds_to_hf(reader)
        | {
            "rope_scaling": found["rope_scaling"] or {"rope_type": "default"},  # null would mean YaRN
            "attention_bias": bias,
            "swiglu_alpha": reader["swiglu_alpha"],
            "swiglu_limit": reader["swiglu_limit"],
            "intermediate_size": reader["moe_ffn_hidden_size"] or found["intermediate_size"],
            "num_local_experts": reader["num_experts"],
            "num_experts_per_tok": topk,
            "router_aux_loss_coef": reader["moe_aux_loss_coeff"] * layers / topk,
        }
    )


TENSORS = LLAMA_TENSORS.plus(
    *in_layers(
        "layers.{n}.",
        "model.layers.{n}.",
        rule("attention.sinks", "self_attn.sinks"),
        rule("mlp.router.{kind}", "mlp.router.{kind}"),
        rule("mlp.experts.fc1", "mlp.experts.gate_up_proj", kind=INTERLEAVED_COLUMNS),
        rule("mlp.experts.fc1_bias", "mlp.experts.gate_up_proj_bias", kind=INTERLEAVED),
        rule("mlp.experts.fc2", "mlp.experts.down_proj", kind=TRANSPOSED),
        rule("mlp.experts.fc2_bias", "mlp.experts.down_proj_bias"),
    )
)


def _gpt_oss(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, positions: int, **other: Any
) -> Recipe:
    attention: dict[str, Any] = {
        "add_qkv_bias": True,
        "add_attention_out_bias": True,
        "attention_sinks": True,
        "sliding_window": 128,
        "sliding_window_layers": tuple(range(0, layers, 2)),
        "head_dim": 64,
        "rope_theta": 150000.0,
        "rope_scaling": YarnScaling(32.0, 4096, truncate=False),
    }
    experts: dict[str, Any] = {
        "activation": "swiglu_clamped",
        "moe_linear_bias": True,
        "moe_router_topk": 4,
        "moe_aux_loss_coeff": 0.001 * 4 / layers,
    }
    return llama_recipe(layers, hidden, heads, groups, ffn, vocab, positions, **attention | experts | other)


# config.json of https://huggingface.co/openai/gpt-oss-*; balance of load by transformers' default.
PRESETS = {
    "gpt-oss-tiny": _gpt_oss(4, 256, 8, 4, 256, 32000, 2048, head_dim=32, num_experts=8, rope_scaling=None),
    "gpt-oss-20b": _gpt_oss(24, 2880, 64, 8, 2880, 201088, 131072, num_experts=32),
    "gpt-oss-120b": _gpt_oss(36, 2880, 64, 8, 2880, 201088, 131072, num_experts=128),
}

FAMILY = Family(
    "gpt_oss",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
    },
    passive=frozenset({"output_router_logits"}),
)
