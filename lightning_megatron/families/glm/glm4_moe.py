"""GLM-4.5: LLaMA's attention with a part of each head rotated, and DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from lightning_megatron.config.hugging_face.decoder import decoder_from_hf, decoder_to_hf
from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.rope import rope_from_hf, share_to_hf
from lightning_megatron.config.hugging_face.tensors import QKV, in_layers, rule
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.families.deepseek.v2 import TENSORS as DEEPSEEK_TENSORS
from lightning_megatron.families.deepseek.v2 import experts_from_hf, experts_to_hf, groups_from_hf
from lightning_megatron.families.llama import llama_recipe
from lightning_megatron.families.mixtral import refuse_one_of_one

ARCHITECTURE = "Glm4MoeForCausalLM"
_ROTATED = 0.5


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    further = reader.get("num_nextn_predict_layers", reader.get("num_mtp_layers", 1))
    reader.expect("num_mtp_layers", further, (further,), f"is another name of num_nextn_predict_layers={further}")
    found = decoder_from_hf(reader, angles=partial(rope_from_hf, share=_ROTATED)) | {
        "mtp_num_layers": further,
        "qk_norm": reader.get("use_qk_norm", False),
        "add_qkv_bias": reader.get("attention_bias", False),
    }
    experts, sums_to_one = experts_from_hf(reader, found["num_layers"]), reader.get("norm_topk_prob", True)
    if sums_to_one and experts:
        refuse_one_of_one(reader, experts["moe_router_topk"])
    router = groups_from_hf(reader) | {
        "moe_router_score": "sigmoid",
        "moe_router_normalize": sums_to_one,
        "moe_expert_bias": True,
    }
    return found | (experts | router if experts else {})


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    reason = f"not what {ARCHITECTURE} computes"
    if not reader["num_experts"]:
        reader.refuse("num_experts", 0, f"{ARCHITECTURE} has experts")
    elif not (reader["moe_expert_bias"] or reader["moe_expert_bias_update_rate"] > 0):
        reader.refuse("moe_expert_bias", False, reason, (True,))
    reader.expect("moe_router_score", None, ("sigmoid",), reason)
    reader.expect("moe_router_group_score_topk", None, (0, 2), reason)
    reader.expect("add_bias_linear", None, (False,), reason)
    return {
        **decoder_to_hf(reader, ARCHITECTURE),
        **share_to_hf(reader),
        **experts_to_hf(reader, ARCHITECTURE),
        "attention_bias": reader["add_qkv_bias"],
        "use_qk_norm": reader["qk_norm"],
        "norm_topk_prob": reader["moe_router_normalize"],
        "num_nextn_predict_layers": reader["mtp_num_layers"],
    }


_LATENTS = (".attention.q", ".attention.kv")
_HEADS = (
    rule("qkv.{kind}", *(f"{part}_proj.{{kind}}" for part in "qkv"), kind=QKV),
    rule("q_norm.weight", "q_norm.weight"),
    rule("k_norm.weight", "k_norm.weight"),
)
_SHARED_RULES = tuple(each for each in DEEPSEEK_TENSORS.rules if not any(part in each.native for part in _LATENTS))
TENSORS = replace(DEEPSEEK_TENSORS, rules=_SHARED_RULES).plus(
    *in_layers("layers.{n}.attention.", "model.layers.{n}.self_attn.", *_HEADS),
    *in_layers("mtp.{n}.block.attention.", "model.layers.{after}.self_attn.", *_HEADS, stack="mtp"),
)


def _glm(layers: int, hidden: int, heads: int, ffn: int, expert: int, dense: int, **other: Any) -> Recipe:
    usual: dict[str, Any] = {
        "head_dim": 128,
        "rope_head_dim": 64,
        "rope_theta": 1e6,
        "add_qkv_bias": True,
        "moe_ffn_hidden_size": expert,
        "moe_shared_expert_ffn_hidden_size": expert,
        "moe_layers": tuple(range(dense, layers)),
        "moe_router_topk": 8,
        "moe_router_score": "sigmoid",
        "moe_expert_bias_update_rate": 0.001,
        "moe_load_balancing": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.0001,
    }
    sizes = {"vocab_size": 151552, "max_position_embeddings": 131072}
    vocabulary, positions = (other.pop(name, usual_size) for name, usual_size in sizes.items())
    return llama_recipe(layers, hidden, heads, 8, ffn, vocabulary, positions, **usual | other)


# config.json of https://huggingface.co/zai-org; losses and bias as in https://arxiv.org/abs/2508.06471, section 2.
PRESETS = {
    "glm4.5-tiny": _glm(
        4,
        256,
        8,
        768,
        128,
        1,
        vocab_size=32000,
        max_position_embeddings=2048,
        head_dim=48,
        rope_head_dim=24,
        num_experts=16,
        moe_router_topk=4,
        qk_norm=True,
    ),
    "glm4.5-air": _glm(46, 4096, 96, 10944, 1408, 1, num_experts=128),
    "glm4.5": _glm(92, 5120, 96, 12288, 1536, 3, num_experts=160, qk_norm=True, moe_router_scaling_factor=2.5),
}

FAMILY = Family(
    "glm4_moe",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
    },
    stack_keys={"mtp": "num_nextn_predict_layers"},
    passive=frozenset({"output_router_logits"}),
)
