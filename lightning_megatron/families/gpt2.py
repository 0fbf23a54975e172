"""GPT-2, and GPT-3's shapes, which have its blocks; its linear layers (``Conv1D``) store ``[in, out]``."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.tensors import COLUMNS_OF_QKV, QKV, TRANSPOSED, Tensors, in_layers, rule
from lightning_megatron.config.reader import ConfigReader, refuse_uneven_heads
from lightning_megatron.config.transformer import TransformerConfig

ARCHITECTURE = "GPT2LMHeadModel"
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_TO_HF = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    activation = reader.expect("activation_function", "gelu_new", tuple(_ACTIVATIONS), "unknown activation")
    reader.expect("scale_attn_weights", True, (True,), "attention is scaled by the root of the head dimension")
    reader.expect("scale_attn_by_inverse_layer_idx", False, (False,), "attention is scaled alike in all layers")
    reader.expect("add_cross_attention", False, (False,), "the model is a decoder alone")
    dropout = reader.get("resid_pdrop", 0.1)
    reason = f"embeddings and sub-layers share one dropout, hidden_dropout, and resid_pdrop is {dropout}"
    reader.expect("embd_pdrop", 0.1, (dropout,), reason)
    return {
        "num_layers": reader.required("n_layer"),
        "hidden_size": reader.required("n_embd"),
        "num_attention_heads": reader.required("n_head"),
        "vocab_size": reader.required("vocab_size"),
        "max_position_embeddings": reader.get("n_positions", 1024),
        "ffn_hidden_size": reader.get("n_inner", 0, null=True),
        "norm": "layernorm",
        "norm_epsilon": reader.get("layer_norm_epsilon", 1e-5),
        "activation": _ACTIVATIONS.get(activation, activation),
        "position_embedding": "learned",
        "add_bias_linear": True,
        "tie_embeddings": reader.get("tie_word_embeddings", True),
        "init_std": reader.get("initializer_range", 0.02),
        "hidden_dropout": dropout,
        "attention_dropout": reader.get("attn_pdrop", 0.1),
    }


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    heads, hidden = reader["num_attention_heads"], reader["hidden_size"]
    only = {"norm": "layernorm", "position_embedding": "learned", "add_bias_linear": True}
    for name, value in (only | {"num_query_groups": heads, "head_dim": hidden // heads}).items():
        reader.expect(name, None, (value,), f"not what {ARCHITECTURE} computes")
    refuse_uneven_heads(reader, ARCHITECTURE)
    activation = reader.expect("activation", None, tuple(_TO_HF), f"not what {ARCHITECTURE} computes")
    return {
        "n_layer": reader["num_layers"],
        "n_embd": hidden,
        "n_head": heads,
        "n_inner": reader["ffn_hidden_size"],
        "n_positions": reader["max_position_embeddings"],
        "vocab_size": reader["vocab_size"],
        "activation_function": _TO_HF.get(activation),
        "layer_norm_epsilon": reader["norm_epsilon"],
        "initializer_range": reader["init_std"],
        "resid_pdrop": reader["hidden_dropout"],
        "embd_pdrop": reader["hidden_dropout"],
        "attn_pdrop": reader["attention_dropout"],
        "tie_word_embeddings": reader["tie_embeddings"],
    }


TENSORS = Tensors(
    (
        rule("embedding.word.weight", "transformer.wte.weight", tied="lm_head.weight"),
        rule("embedding.position", "transformer.wpe.weight"),
        *in_layers(
            "layers.{n}.",
            "transformer.h.{n}.",
            rule("attention.qkv.weight", "attn.c_attn.weight", kind=COLUMNS_OF_QKV),
            rule("attention.qkv.bias", "attn.c_attn.bias", kind=QKV),
            rule("attention.out.weight", "attn.c_proj.weight", kind=TRANSPOSED),
            rule("attention.out.bias", "attn.c_proj.bias"),
            rule("mlp.fc1.weight", "mlp.c_fc.weight", kind=TRANSPOSED),
            rule("mlp.fc1.bias", "mlp.c_fc.bias"),
            rule("mlp.fc2.weight", "mlp.c_proj.weight", kind=TRANSPOSED),
            rule("mlp.fc2.bias", "mlp.c_proj.bias"),
            rule("attention_norm.{kind}", "ln_1.{kind}"),
            rule("mlp_norm.{kind}", "ln_2.{kind}"),
        ),
        rule("head.norm.{kind}", "transformer.ln_f.{kind}"),
        rule("head.weight", "lm_head.weight"),
    ),
    prefix="transformer.",
    ignored=r"h\.\d+\.attn\.(bias|masked_bias)$",  # old versions wrote the causal mask of each layer
)


def _gpt(layers: int, hidden: int, heads: int, vocab: int, positions: int, **other: Any) -> Recipe:
    return partial(TransformerConfig, layers, hidden, heads, vocab, positions, **other)


# GPT-2: the published 124M configuration. GPT-3: table 1 of https://arxiv.org/abs/2104.04473 (vocabulary 51,200,
# sequence 2048).
PRESETS = {
    "gpt-tiny": _gpt(8, 512, 8, 32000, 1024),
    "gpt2": _gpt(12, 768, 12, 50257, 1024, activation="gelu_tanh"),
    "gpt3-1.7b": _gpt(24, 2304, 24, 51200, 2048),
    "gpt3-3.6b": _gpt(30, 3072, 32, 51200, 2048),
    "gpt3-7.5b": _gpt(36, 4096, 32, 51200, 2048),
    "gpt3-18.4b": _gpt(40, 6144, 48, 51200, 2048),
    "gpt3-39.1b": _gpt(48, 8192, 64, 51200, 2048),
    "gpt3-76.1b": _gpt(60, 10240, 80, 51200, 2048),
    "gpt3-145.6b": _gpt(80, 12288, 96, 51200, 2048),
    "gpt3-310.1b": _gpt(96, 16384, 128, 51200, 2048),
}

FAMILY = Family(
    "gpt2",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    default_preset="gpt2",
    passive=frozenset(
        {
            "n_ctx",
            "predict_special_tokens",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
)
