"""DeepSeek-V2: multi-head latent attention, and routed experts beside a shared one in all layers but the first."""

from __future__ import annotations

from typing import Any

from lightning_megatron.config.hugging_face.decoder import decoder_from_hf, decoder_to_hf
from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.tensors import PAIRED_END, PAIRED_HEADS, STACKED, Tensors, in_layers, rule
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.config.rope_scaling import YarnScaling
from lightning_megatron.errors import is_whole
from lightning_megatron.families.llama import llama_recipe

ARCHITECTURE = "DeepseekV2ForCausalLM"
_EPSILON = 1e-6
_MOST_LAYERS = 100_000


def latents_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of the configuration without experts.

    The file has the sizes of a head's unrotated and rotated part; our ``head_dim`` is their sum.
    """
    bias, turned = reader.get("attention_bias", False), reader.get("qk_rope_head_dim", 64)
    whole = reader.get("qk_nope_head_dim", 128) + turned
    reason = f"norms of latents always use {_EPSILON}, and our model has one epsilon for all"
    reader.expect("rms_norm_eps", _EPSILON, (_EPSILON,), reason)
    if turned % 2 or turned < 2:
        reader.refuse("qk_rope_head_dim", turned, "pairs of features are rotated", (64,))
    latent = reader.get("q_lora_rank", None)
    if latent is not None and not is_whole(latent, at_least=1):
        reader.refuse("q_lora_rank", latent, "must be a whole number of at least 1, or null", (None,))
    found = decoder_from_hf(reader)
    heads = found["num_attention_heads"]
    reader.expect("num_key_value_heads", heads, (heads,), "every head has keys and values of its own", null=True)
    reader.expect("head_dim", turned, (turned,), f"is another name of qk_rope_head_dim={turned}", null=True)
    reader.expect("qk_head_dim", whole, (whole,), "is the sum of qk_nope_head_dim and qk_rope_head_dim")
    return found | {
        "num_query_groups": heads,
        "head_dim": whole,
        "rope_head_dim": turned,
        "v_head_dim": reader.get("v_head_dim", 128),
        "kv_lora_rank": reader.get("kv_lora_rank", 512),
        "q_lora_rank": latent or 0,
        "add_qkv_bias": bias,
        "add_attention_out_bias": bias,
    }


def latents_to_hf(reader: ConfigReader, architecture: str) -> dict[str, Any]:
    """Entries without experts."""
    turned, latent, bias = reader["rope_head_dim"], reader["kv_lora_rank"], reader["add_qkv_bias"]
    if not latent:
        reader.refuse("kv_lora_rank", 0, f"{architecture} makes keys and values from latents")
    for name, only in (("add_bias_linear", False), ("add_attention_out_bias", bias), ("norm_epsilon", _EPSILON)):
        reader.expect(name, None, (only,), f"not what {architecture} computes")
    written = decoder_to_hf(reader, architecture)
    return {name: value for name, value in written.items() if name != "head_dim"} | {
        "qk_nope_head_dim": reader["head_dim"] - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": reader["v_head_dim"] or reader["head_dim"],
        "kv_lora_rank": latent,
        "q_lora_rank": reader["q_lora_rank"] or None,
        "attention_bias": bias,
    }


def experts_from_hf(reader: ConfigReader, layers: int) -> dict[str, Any]:
    """Fields of experts that both versions have; empty if every layer is dense."""
    experts = reader.get("n_routed_experts", 64)
    for name in ("num_local_experts", "num_experts"):
        reader.expect(name, experts, (experts,), f"is another name of n_routed_experts={experts}")
    reader.expect("moe_layer_freq", 1, (1,), "transformers has experts in every layer after the first ones")
    reader.expect("ep_size", 1, (1,), "files hold whole weights")
    first, features = reader.get("first_k_dense_replace", 0, null=True), reader.get("moe_intermediate_size", 1407)
    shared = reader.get("n_shared_experts", 1)
    if shared < 1:
        reader.refuse("n_shared_experts", shared, "every layer with experts has one that every token visits", (1,))
    found = {
        "num_experts": experts,
        "moe_ffn_hidden_size": features,
        "moe_router_topk": reader.get("num_experts_per_tok", 1),
        "moe_shared_expert_ffn_hidden_size": features * shared,
        "moe_router_scaling_factor": float(reader.get("routed_scaling_factor", 1.0)),
        "moe_aux_loss_coeff": reader.get("aux_loss_alpha", 0.001),
        "moe_load_balancing": "seq_aux_loss" if reader.get("seq_aux", True) else "aux_loss",
    }
    if layers > _MOST_LAYERS:
        reader.refuse("num_hidden_layers", layers, "is more than any model has")
    elif 0 < first < layers:
        found["moe_layers"] = tuple(range(first, layers))
    return found if first < layers else {}


def groups_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of groups of experts; the chosen groups must hold as many experts as a token visits."""
    groups, chosen = reader.get("n_group", 1, null=True), reader.get("topk_group", 1, null=True)
    experts, topk = reader.get("n_routed_experts", 64), reader.get("num_experts_per_tok", 1)
    if not 1 <= chosen <= groups or experts % groups or experts // groups * chosen < topk:
        reason = (
            f"of n_routed_experts={experts} in n_group={groups} equal groups a token visits num_experts_per_tok={topk}"
            f" of topk_group={chosen} groups"
        )
        for name, value in (("n_group", groups), ("topk_group", chosen)):
            reader.refuse(name, value, reason, (1,))
    return {} if groups == 1 else {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    reader.expect("mlp_bias", False, (False,), "feed-forward layers have no biases here")
    reader.expect("scoring_func", "softmax", ("softmax",), "weights of experts are a softmax over all")
    reader.expect("norm_topk_prob", False, (False,), "transformers does not divide weights by their sum", null=True)
    methods = "greedy", "group_limited_greedy"
    method = reader.expect("topk_method", methods[0], methods, "unknown way to choose experts")
    found = latents_from_hf(reader)
    experts = experts_from_hf(reader, found["num_layers"])
    for name in ("n_group", "topk_group"):  # without effect where experts are not chosen by groups
        reader.get(name, 1, null=True)
    groups = groups_from_hf(reader) if method == methods[1] else {}
    return found | (experts | groups | {"moe_router_pre_softmax": True} if experts else {})


def experts_to_hf(reader: ConfigReader, architecture: str) -> dict[str, Any]:
    """Entries of experts that both versions have."""
    layers, experts, chosen = reader["num_layers"], reader["num_experts"], reader["moe_layers"]
    if not experts:
        return {"first_k_dense_replace": layers}
    first = chosen[0] if chosen else 0
    reason = f"{architecture} has experts in all layers after the first ones"
    reader.expect("moe_layers", (), ((), tuple(range(first, layers))), reason)
    features, shared = reader["moe_ffn_hidden_size"] or reader["ffn_hidden_size"], "moe_shared_expert_ffn_hidden_size"
    if reader[shared] % features or not reader[shared]:
        reason = f"{architecture} has a multiple of the features of an expert, {features}, in every layer"
        reader.refuse(shared, reader[shared], reason, (features,))
    kinds = {"seq_aux_loss": True, "aux_loss": False}
    return {
        "first_k_dense_replace": first,
        "n_routed_experts": experts,
        "num_experts_per_tok": reader["moe_router_topk"],
        "moe_intermediate_size": features,
        "n_shared_experts": reader[shared] // features,
        "routed_scaling_factor": reader["moe_router_scaling_factor"],
        "aux_loss_alpha": reader["moe_aux_loss_coeff"],
        "seq_aux": kinds.get(reader["moe_load_balancing"], True),
        "n_group": reader["moe_router_num_groups"] or 1,
        "topk_group": reader["moe_router_group_topk"] or 1,
    }


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    found = latents_to_hf(reader, ARCHITECTURE) | experts_to_hf(reader, ARCHITECTURE)
    reader.expect("moe_router_group_score_topk", None, (0, 1), f"not what {ARCHITECTURE} computes")
    if reader["num_experts"]:
        reader.expect("moe_router_pre_softmax", None, (True,), f"not what {ARCHITECTURE} computes")
    by_groups = reader["moe_router_num_groups"] > 0
    return found | {"topk_method": "group_limited_greedy" if by_groups else "greedy", "norm_topk_prob": False}


_IN_A_LAYER = (
    rule("attention_norm.weight", "input_layernorm.weight"),
    rule("attention.q.weight", "self_attn.q_proj.weight", kind=PAIRED_HEADS),
    rule("attention.q_down.{kind}", "self_attn.q_a_proj.{kind}"),
    rule("attention.q_norm.weight", "self_attn.q_a_layernorm.weight"),
    rule("attention.q_up.weight", "self_attn.q_b_proj.weight", kind=PAIRED_HEADS),
    rule("attention.kv_down.{kind}", "self_attn.kv_a_proj_with_mqa.{kind}", kind=PAIRED_END),
    rule("attention.kv_norm.weight", "self_attn.kv_a_layernorm.weight"),
    rule("attention.kv_up.weight", "self_attn.kv_b_proj.weight"),
    rule("attention.out.{kind}", "self_attn.o_proj.{kind}"),
    rule("mlp_norm.weight", "post_attention_layernorm.weight"),
    rule("mlp.fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", kind=STACKED),
    rule("mlp.fc2.weight", "mlp.down_proj.weight"),
    rule("mlp.router.weight", "mlp.gate.weight"),
    rule("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    rule("mlp.experts.fc1", "mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight", kind=STACKED),
    rule("mlp.experts.fc2", "mlp.experts.{e}.down_proj.weight", kind=STACKED),
    rule(
        "mlp.shared.fc1.weight",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        kind=STACKED,
    ),
    rule("mlp.shared.fc2.weight", "mlp.shared_experts.down_proj.weight"),
)
TENSORS = Tensors(
    (
        rule(
            "embedding.word.weight",
            "model.embed_tokens.weight",
            tied="lm_head.weight",
            copied="model.layers.{after}.embed_tokens.weight",
        ),
        *in_layers("layers.{n}.", "model.layers.{n}.", *_IN_A_LAYER),
        rule("head.norm.weight", "model.norm.weight"),
        rule("head.weight", "lm_head.weight", copied="model.layers.{after}.shared_head.head.weight"),
        *in_layers(
            "mtp.{n}.",
            "model.layers.{after}.",
            rule("token_norm.weight", "enorm.weight"),
            rule("hidden_norm.weight", "hnorm.weight"),
            rule("projection.weight", "eh_proj.weight"),
            rule("norm.weight", "shared_head.norm.weight"),
            stack="mtp",
        ),
        *in_layers("mtp.{n}.block.", "model.layers.{after}.", *_IN_A_LAYER, stack="mtp"),
    )
)


def deepseek_recipe(
    layers: int, hidden: int, heads: int, ffn: int, vocab: int, positions: int, dense: int, **other: Any
) -> Recipe:
    """Recipe of a shape with DeepSeek's blocks, of which the first ``dense`` have no experts."""
    latents = {"head_dim": 192, "rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "norm_epsilon": 1e-6}
    experts = {"moe_layers": tuple(range(dense, layers)), "moe_load_balancing": "seq_aux_loss"}
    return llama_recipe(layers, hidden, heads, heads, ffn, vocab, positions, **latents | experts | other)


def yarn(weight: float) -> YarnScaling:
    """The rule of all published models: 40 times the 4096 tokens of the pretraining."""
    return YarnScaling(40.0, 4096, mscale=weight, mscale_all_dim=weight)


_SHARED = {"moe_router_topk": 6, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.001}
_TINY = {"head_dim": 48, "rope_head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 64, "num_experts": 16}
_TINY |= {"moe_ffn_hidden_size": 128, "moe_shared_expert_ffn_hidden_size": 256}

# config.json of https://huggingface.co/deepseek-ai.
PRESETS = {
    "deepseek-v2-tiny": deepseek_recipe(4, 256, 8, 768, 32000, 2048, 1, **_SHARED | _TINY | {"moe_router_topk": 4}),
    "deepseek-v2-lite": deepseek_recipe(
        27,
        2048,
        16,
        10944,
        102400,
        163840,
        1,
        num_experts=64,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_ffn_hidden_size=2 * 1408,
        rope_scaling=yarn(0.707),
        **_SHARED,
    ),
    "deepseek-v2": deepseek_recipe(
        60,
        5120,
        128,
        12288,
        102400,
        163840,
        1,
        q_lora_rank=1536,
        num_experts=160,
        moe_ffn_hidden_size=1536,
        moe_shared_expert_ffn_hidden_size=2 * 1536,
        moe_router_scaling_factor=16.0,
        moe_router_num_groups=8,
        moe_router_group_topk=3,
        rope_scaling=yarn(0.707),
        **_SHARED,
    ),
}

_SIZES = {
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 1407,
}
FAMILY = Family(
    "deepseek_v2",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    defaults=_SIZES,
    passive=frozenset({"output_router_logits", "pretraining_tp"}),
)
