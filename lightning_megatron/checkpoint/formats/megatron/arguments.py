"""Megatron's command line as fields of ``TransformerConfig``, by the names that its checkpoints store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_megatron.config.reader import ConfigReader

_POSITIONS = {"rope": "rope", "learned_absolute": "learned", "none": "none"}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
# Arguments that change the model and have no counterpart in ours, with the values that switch them off.
# Some were renamed when Megatron began to generate its parser from its TransformerConfig; both names are listed.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (None,),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_output_gate": (False,),
    "enable_hyper_connections": (False,),
    "enable_mhc_connections": (False,),
    "experimental_attention_variant": (None,),
    "glu_linear_offset": (0.0,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "is_hybrid_model": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "linear_attention_freq": (None,),
    "linear_attention_type": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_expert_rank_capacity_factor": (None,),
    "moe_latent_size": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_force_biased": (None,),
    "moe_router_force_load_balancing": (False,),
    "moe_router_group_topk": (None,),
    "moe_router_num_groups": (None,),
    "moe_router_topk_limited_devices": (None,),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_shared_expert_gate": (False,),
    "moe_shared_expert_intermediate_size": (None, 0),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False,),
    "no_rope_freq": (None, 0),
    "qk_l2_norm": (False,),
    "quick_geglu": (False,),
    "retro_add_retriever": (False,),
    "rotary_interleaved": (False,),
    "rotary_percent": (1.0,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "softmax_scale": (None,),
    "softmax_type": ("vanilla",),
    "spec": (None, [], ["local"]),
    "squared_relu": (False,),
    "use_mup": (False,),
    "window_size": (None,),
}


def config_from_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` from Megatron's arguments.

    The vocabulary is ``vocab_size`` if the run stored it, else the padded one.

    Raises:
        ConfigError: naming every argument that our model cannot reproduce.
    """
    reader = ConfigReader(arguments, "arguments of Megatron", nulls=True)
    for name, allowed in _OFF.items():
        reader.expect(name, allowed[0], allowed, "our model does not support it")
    smoothing = "Megatron's s is s V / (V - 1) in ours (torch's), with V the slice of the vocabulary on one rank"
    reader.expect("label_smoothing", 0.0, (0.0,), smoothing)
    bias = reader.get("add_bias_linear", True)
    heads = reader.required("num_attention_heads")
    grouped = reader.get("group_query_attention", False)
    norm = reader.expect("normalization", "LayerNorm", tuple(_NORMS), "unknown norm")
    position = reader.expect("position_embedding_type", "learned_absolute", tuple(_POSITIONS), "unknown positions")
    found = {
        "num_layers": reader.required("num_layers"),
        "hidden_size": reader.required("hidden_size"),
        "num_attention_heads": heads,
        "num_query_groups": reader.get("num_query_groups", heads) if grouped else heads,
        "head_dim": reader.get("kv_channels", 0),
        "ffn_hidden_size": reader.get("ffn_hidden_size", 0),
        "vocab_size": reader.get("vocab_size", None) or reader.required("padded_vocab_size"),
        "vocab_multiple": reader.get("make_vocab_size_divisible_by", 128),
        "max_position_embeddings": reader.required("max_position_embeddings"),
        "norm": _NORMS.get(norm, norm),
        "norm_epsilon": reader.get("norm_epsilon", reader.get("layernorm_epsilon", 1e-5)),
        "activation": _activation(reader),
        "position_embedding": _POSITIONS.get(position, position),
        "rope_theta": float(reader.get("rotary_base", 10000)),
        "rope_scaling": _rope_scaling(reader),
        "add_bias_linear": bias,
        "add_qkv_bias": reader.get("add_qkv_bias", False) and not bias,
        "qk_norm": reader.get("qk_layernorm", False),
        "tie_embeddings": not reader.get("untie_embeddings_and_output_weights", False),
        "init_std": reader.get("init_method_std", 0.02),
        "hidden_dropout": reader.get("hidden_dropout", 0.1),
        "attention_dropout": reader.get("attention_dropout", 0.1),
        **_experts(reader),
    }
    reader.finish()
    return found


def _activation(reader: ConfigReader) -> str:
    if reader.get("swiglu", False):
        return "swiglu"
    # The fused kernel of bias and GELU computes the approximation by tanh.
    approximate = reader.get("bias_gelu_fusion", False) or reader.get("openai_gelu", False)
    return "gelu_tanh" if approximate else "gelu"


def _rope_scaling(reader: ConfigReader) -> dict[str, Any] | None:
    """LLaMA 3's rule with Megatron's constants; only the factor is an argument."""
    if not reader.get("use_rope_scaling", False):
        return None
    return {"factor": float(reader.get("rope_scaling_factor", 8.0))}


def _experts(reader: ConfigReader) -> dict[str, Any]:
    experts = reader.get("num_experts", 0)
    if not experts:
        return {}
    layers, every = reader.required("num_layers"), reader.get("moe_layer_freq", None) or 1
    pattern = every if isinstance(every, list) else [int(number % every == 0) for number in range(layers)]
    balancing = reader.get("moe_router_load_balancing_type", "aux_loss")
    known = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
    return {
        "num_experts": experts,
        "moe_layers": () if all(pattern) else tuple(n for n, has in enumerate(pattern) if has),
        "moe_ffn_hidden_size": reader.get("moe_ffn_hidden_size", 0),
        "moe_router_topk": reader.get("moe_router_topk", 2),
        "moe_router_pre_softmax": reader.get("moe_router_pre_softmax", False),
        "moe_router_score": reader.get("moe_router_score_function", "softmax"),
        "moe_load_balancing": reader.expect("moe_router_load_balancing_type", balancing, known, "unknown"),
        "moe_aux_loss_coeff": reader.get("moe_aux_loss_coeff", 0.0),
        "moe_z_loss_coeff": reader.get("moe_z_loss_coeff", 0.0),
        "moe_input_jitter_eps": reader.get("moe_input_jitter_eps", 0.0),
        # Megatron also uses negative values for 'no token is dropped'.
        "moe_capacity_factor": max(reader.get("moe_expert_capacity_factor", 0.0), 0.0),
        "moe_pad_to_capacity": reader.get("moe_pad_expert_input_to_capacity", False),
        "moe_token_drop_policy": reader.get("moe_token_drop_policy", "probs"),
    }
