"""DeepSeek-V3 and R1: DeepSeek-V2 with sigmoid router scores and a bias that evens out the load of experts."""

from __future__ import annotations

from typing import Any

from lightning_megatron.config.hugging_face.family import Family
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.families.deepseek.v2 import (
    TENSORS,
    deepseek_recipe,
    experts_from_hf,
    experts_to_hf,
    groups_from_hf,
    latents_from_hf,
    latents_to_hf,
    yarn,
)
from lightning_megatron.families.mixtral import refuse_one_of_one

ARCHITECTURE = "DeepseekV3ForCausalLM"


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    reader.expect("scoring_func", "sigmoid", ("sigmoid",), "scores of experts are sigmoids")
    reader.expect("topk_method", "noaux_tc", ("noaux_tc",), "experts are chosen by groups and with a bias")
    reader.expect("rope_interleave", True, (True,), "adjacent pairs of features are rotated", null=True)
    further = reader.get("num_nextn_predict_layers", reader.get("num_mtp_layers", 1))
    reader.expect("num_mtp_layers", further, (further,), f"is another name of num_nextn_predict_layers={further}")
    found = latents_from_hf(reader) | {"mtp_num_layers": further}
    experts, sums_to_one = experts_from_hf(reader, found["num_layers"]), reader.get("norm_topk_prob", True, null=True)
    if sums_to_one and experts:
        refuse_one_of_one(reader, experts["moe_router_topk"])
    router = groups_from_hf(reader) | {
        "moe_router_score": "sigmoid",
        "moe_router_normalize": sums_to_one,
        "moe_expert_bias": True,
    }
    return found | (experts | router if experts else {})


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    found = latents_to_hf(reader, ARCHITECTURE) | experts_to_hf(reader, ARCHITECTURE)
    reader.expect("moe_router_group_score_topk", None, (0, 2), f"not what {ARCHITECTURE} computes")
    has_bias = reader["moe_expert_bias"] or reader["moe_expert_bias_update_rate"] > 0
    if reader["num_experts"] and not has_bias:
        reader.refuse("moe_expert_bias", False, f"not what {ARCHITECTURE} computes", (True,))
    reader.expect("moe_router_score", None, ("sigmoid",), f"not what {ARCHITECTURE} computes")
    return found | {
        "norm_topk_prob": reader["moe_router_normalize"],
        "rope_interleave": True,
        "num_nextn_predict_layers": reader["mtp_num_layers"],
    }


_SHARED = {
    "moe_router_score": "sigmoid",
    "moe_router_scaling_factor": 2.5,
    "moe_expert_bias_update_rate": 0.001,
    "moe_aux_loss_coeff": 0.0001,
}

# config.json of https://huggingface.co/deepseek-ai/DeepSeek-V3; losses and bias as in https://arxiv.org/abs/2412.19437.
PRESETS = {
    "deepseek-v3-tiny": deepseek_recipe(
        4,
        256,
        8,
        768,
        32000,
        2048,
        1,
        head_dim=48,
        rope_head_dim=16,
        v_head_dim=32,
        q_lora_rank=96,
        kv_lora_rank=64,
        num_experts=16,
        moe_ffn_hidden_size=128,
        moe_shared_expert_ffn_hidden_size=128,
        moe_router_topk=4,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        **_SHARED,
    ),
    "deepseek-v3": deepseek_recipe(
        61,
        7168,
        128,
        18432,
        129280,
        163840,
        3,
        q_lora_rank=1536,
        num_experts=256,
        moe_ffn_hidden_size=2048,
        moe_shared_expert_ffn_hidden_size=2048,
        moe_router_topk=8,
        moe_router_num_groups=8,
        moe_router_group_topk=4,
        rope_scaling=yarn(1.0),
        **_SHARED,
    ),
}

_SIZES = {
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 4096,
}
FAMILY = Family(
    "deepseek_v3",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    defaults=_SIZES,
    stack_keys={"mtp": "num_nextn_predict_layers"},
    passive=frozenset({"output_router_logits", "pretraining_tp"}),
)
