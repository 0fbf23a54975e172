"""Mixtral: LLaMA's attention, and experts in every layer."""

from __future__ import annotations

from typing import Any

from lightning_megatron.config.hugging_face.decoder import decoder_from_hf, decoder_to_hf
from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.tensors import STACKED, in_layers, rule
from lightning_megatron.config.hugging_face.windows import one_window, window_from_hf
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.families.llama import TENSORS as LLAMA_TENSORS
from lightning_megatron.families.llama import llama_recipe

ARCHITECTURE = "MixtralForCausalLM"


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of the configuration.

    Mixtral's load-balancing loss pools all layers and is ``k`` times that of a layer; ours is a sum over layers. The
    coefficient is converted so that both are equal if the load of all layers is the same.
    """
    reader.get("num_key_value_heads", 8)  # LLaMA may have null here, and Mixtral not
    topk = reader.get("num_experts_per_tok", 2)
    refuse_one_of_one(reader, topk)
    found = decoder_from_hf(reader) | {"sliding_window": window_from_hf(reader)}
    return found | {
        "num_experts": reader.required("num_local_experts"),
        "moe_router_topk": topk,
        "moe_aux_loss_coeff": reader.get("router_aux_loss_coef", 0.001) * topk / max(1, found["num_layers"]),
        "moe_input_jitter_eps": reader.get("router_jitter_noise", 0.0),
    }


def refuse_one_of_one(reader: ConfigReader, topk: int) -> None:
    """Refuse one expert per token if the weights of the chosen experts sum to 1."""
    if topk == 1:
        reason = "the weight of one chosen expert is always 1, and the router would not learn"
        reader.refuse("num_experts_per_tok", topk, reason, (2,))


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    layers, topk = reader["num_layers"], reader["moe_router_topk"]
    reason = f"not what {ARCHITECTURE} computes"
    reader.expect("moe_layers", (), ((), tuple(range(layers))), reason)
    reader.expect("add_bias_linear", None, (False,), reason)
    if not reader["num_experts"]:
        reader.refuse("num_experts", 0, f"{ARCHITECTURE} has experts in every layer")
    found = decoder_to_hf(reader, ARCHITECTURE)
    return found | {
        "intermediate_size": reader["moe_ffn_hidden_size"] or found["intermediate_size"],
        "num_local_experts": reader["num_experts"],
        "num_experts_per_tok": topk,
        "router_aux_loss_coef": reader["moe_aux_loss_coeff"] * layers / topk,
        "router_jitter_noise": reader["moe_input_jitter_eps"],
        "sliding_window": one_window(reader, ARCHITECTURE),
    }


TENSORS = LLAMA_TENSORS.plus(
    *in_layers(
        "layers.{n}.mlp.",
        "model.layers.{n}.block_sparse_moe.",
        rule("router.weight", "gate.weight"),
        rule("experts.fc1", "experts.{e}.w1.weight", "experts.{e}.w3.weight", kind=STACKED),
        rule("experts.fc2", "experts.{e}.w2.weight", kind=STACKED),
    ),
)


def _mixtral(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, positions: int, **other: Any
) -> Recipe:
    experts: dict[str, Any] = {"num_experts": 8, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.02}
    return llama_recipe(layers, hidden, heads, groups, ffn, vocab, positions, **experts | other)


# https://arxiv.org/abs/2401.04088 and the model cards; balance of load as Intel's recipe for Gaudi.
PRESETS = {
    "mixtral-tiny": _mixtral(4, 256, 8, 4, 512, 32000, 2048),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 8, 14336, 32000, 32768, rope_theta=1e6),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 8, 16384, 32768, 65536, rope_theta=1e6),
}

FAMILY = Family(
    "mixtral",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    module="lightning_megatron:MixtralModule",
    default_preset="mixtral-8x7b",
    defaults={
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
    },
    passive=frozenset({"output_router_logits"}),
)
