"""Names that our fields have in other programs' configurations."""

from __future__ import annotations

ELSEWHERE = {
    "num_hidden_layers": "num_layers",
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "num_query_groups",
    "kv_channels": "head_dim",
    "seq_length": "max_position_embeddings",
    "n_positions": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "layernorm_epsilon": "norm_epsilon",
    "normalization": "norm",
    "hidden_act": "activation",
    "rotary_base": "rope_theta",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "init_std",
    "init_method_std": "init_std",
    "num_local_experts": "num_experts",
    "num_moe_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "make_vocab_size_divisible_by": "vocab_multiple",
}
"""Our fields by their names in Hugging Face's and Megatron's configurations."""
