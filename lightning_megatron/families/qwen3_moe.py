"""Qwen3 with experts in some or all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.tensors import STACKED, in_layers, rule
from lightning_megatron.config.hugging_face.windows import window_everywhere_from_hf, window_everywhere_to_hf
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.families.mixtral import refuse_one_of_one
from lightning_megatron.families.qwen3 import TENSORS as QWEN3_TENSORS
from lightning_megatron.families.qwen3 import attention_from_hf, attention_to_hf, qwen3_recipe

ARCHITECTURE = "Qwen3MoeForCausalLM"
_MOST_LAYERS = 100_000
_SIZES = {"num_key_value_heads": 4, "max_position_embeddings": 32768}


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    found = attention_from_hf(reader) | window_everywhere_from_hf(reader)
    return found | qwen_experts_from_hf(reader, found["num_layers"])


def qwen_experts_from_hf(reader: ConfigReader, layers: int) -> dict[str, Any]:
    """Fields of experts; the coefficient of the load-balancing loss is converted as for Mixtral."""
    sparse = _sparse_layers(reader, layers)
    experts = reader.get("num_experts", reader.get("num_local_experts", 128))
    reader.expect("num_local_experts", experts, (experts,), f"is another name of num_experts={experts}")
    features = reader.get("moe_intermediate_size", 768)
    topk, sums_to_one = reader.get("num_experts_per_tok", 8), reader.get("norm_topk_prob", False)
    coefficient = reader.get("router_aux_loss_coef", 0.001)
    if sums_to_one:
        refuse_one_of_one(reader, topk)
    if not sparse or not experts:
        return {}
    return {
        "num_experts": experts,
        "moe_layers": () if len(sparse) == layers else tuple(sparse),
        "moe_ffn_hidden_size": features,
        "moe_router_topk": topk,
        "moe_router_pre_softmax": not sums_to_one,
        "moe_aux_loss_coeff": coefficient * topk / len(sparse),
    }


def _sparse_layers(reader: ConfigReader, layers: int) -> Sequence[int]:
    """Numbers of the layers with experts."""
    step, dense = reader.get("decoder_sparse_step", 1), reader.get("mlp_only_layers", [], null=True)
    if step < 1:
        reader.refuse("decoder_sparse_step", step, "must be at least 1", (1,))
    if layers > _MOST_LAYERS:
        reader.refuse("num_hidden_layers", layers, "is more than any model has")
        return ()
    return [layer for layer in range(layers) if (layer + 1) % max(1, step) == 0 and layer not in dense]


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    found = attention_to_hf(reader, ARCHITECTURE) | window_everywhere_to_hf(reader, ARCHITECTURE)
    return found | qwen_experts_to_hf(reader, ARCHITECTURE)


def qwen_experts_to_hf(reader: ConfigReader, architecture: str) -> dict[str, Any]:
    """Entries of experts."""
    layers, topk, chosen = range(reader["num_layers"]), reader["moe_router_topk"], reader["moe_layers"]
    dense = [layer for layer in layers if chosen and layer not in chosen]
    if not reader["num_experts"]:
        reader.refuse("num_experts", 0, f"{architecture} has experts")
    return {
        "num_experts": reader["num_experts"],
        "num_experts_per_tok": topk,
        "moe_intermediate_size": reader["moe_ffn_hidden_size"] or reader["ffn_hidden_size"],
        "norm_topk_prob": not reader["moe_router_pre_softmax"],
        "router_aux_loss_coef": reader["moe_aux_loss_coeff"] * (len(layers) - len(dense)) / topk,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


EXPERTS = in_layers(
    "layers.{n}.mlp.",
    "model.layers.{n}.mlp.",
    rule("router.weight", "gate.weight"),
    rule("experts.fc1", "experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight", kind=STACKED),
    rule("experts.fc2", "experts.{e}.down_proj.weight", kind=STACKED),
)
TENSORS = QWEN3_TENSORS.plus(*EXPERTS)


def _qwen3_moe(
    layers: int, hidden: int, heads: int, groups: int, expert: int, vocab: int, positions: int, **other: Any
) -> Recipe:
    experts: dict[str, Any] = {"moe_ffn_hidden_size": expert, "num_experts": 128, "moe_router_topk": 8}
    experts["moe_aux_loss_coeff"] = 0.001 * 8 / layers
    return qwen3_recipe(layers, hidden, heads, groups, 3 * hidden, vocab, positions, **experts | other)


# config.json of https://huggingface.co/Qwen.
PRESETS = {
    "qwen3-moe-tiny": _qwen3_moe(4, 256, 8, 4, 128, 32000, 2048, head_dim=48, num_experts=16, moe_router_topk=4),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 4, 768, 151936, 40960),
}

FAMILY = Family(
    "qwen3_moe",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    defaults=_SIZES,
    passive=frozenset({"output_router_logits", "max_window_layers"}),
)
