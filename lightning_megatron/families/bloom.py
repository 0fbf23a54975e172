"""BLOOM: ALiBi, and a norm after the token embedding (https://arxiv.org/abs/2211.05100)."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.tensors import Tensors, in_layers, rule
from lightning_megatron.config.reader import ConfigReader, refuse_uneven_heads
from lightning_megatron.config.transformer import TransformerConfig

ARCHITECTURE = "BloomForCausalLM"


def _size(reader: ConfigReader, name: str, other: str) -> int:
    """A size that has two names; if a file has both, they must agree."""
    mine, theirs = reader.get(name, None), reader.get(other, None)
    if mine is None and theirs is not None:
        return reader.required(other)
    if theirs not in (None, mine):
        reader.refuse(other, theirs, f"contradicts {name}={mine}", (mine,))
    return reader.required(name)


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    hidden = _size(reader, "hidden_size", "n_embed")
    after_norm = "the residual is taken before the norm"
    reader.expect("apply_residual_connection_post_layernorm", False, (False,), after_norm)
    reader.expect("hidden_dropout", 0.0, (0.0,), f"{ARCHITECTURE} has no dropout of embeddings, our model has")
    reader.expect("n_inner", None, (None, 4 * hidden), f"{ARCHITECTURE} always has 4 hidden_size")
    reader.get("slow_but_exact", False)  # sums in the order of pretraining_tp ranks: the same up to rounding
    reader.get("pretraining_tp", 1)
    return {
        "num_layers": _size(reader, "n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": _size(reader, "n_head", "num_attention_heads"),
        "vocab_size": reader.required("vocab_size"),
        "max_position_embeddings": reader.get("seq_length", 2048),
        "norm": "layernorm",
        "norm_epsilon": reader.get("layer_norm_epsilon", 1e-5),
        "activation": "gelu_tanh",
        "position_embedding": "alibi",
        "embedding_norm": True,
        "add_bias_linear": True,
        "tie_embeddings": reader.get("tie_word_embeddings", True),
        "init_std": reader.get("initializer_range", 0.02),
        "attention_dropout": reader.get("attention_dropout", 0.0),
    }


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    heads, hidden = reader["num_attention_heads"], reader["hidden_size"]
    only = {
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "position_embedding": "alibi",
        "embedding_norm": True,
        "add_bias_linear": True,
        "num_query_groups": heads,
        "head_dim": hidden // heads,
        "ffn_hidden_size": 4 * hidden,
    }
    for name, value in only.items():
        reader.expect(name, None, (value,), f"not what {ARCHITECTURE} computes")
    refuse_uneven_heads(reader, ARCHITECTURE)
    return {
        "n_layer": reader["num_layers"],
        "hidden_size": hidden,
        "n_head": heads,
        "vocab_size": reader["vocab_size"],
        "seq_length": reader["max_position_embeddings"],
        "layer_norm_epsilon": reader["norm_epsilon"],
        "initializer_range": reader["init_std"],
        "attention_dropout": reader["attention_dropout"],
        "tie_word_embeddings": reader["tie_embeddings"],
    }


TENSORS = Tensors(
    (
        rule("embedding.word.weight", "transformer.word_embeddings.weight", tied="lm_head.weight"),
        rule("embedding.norm.{kind}", "transformer.word_embeddings_layernorm.{kind}"),
        *in_layers(
            "layers.{n}.",
            "transformer.h.{n}.",
            rule("attention_norm.{kind}", "input_layernorm.{kind}"),
            # Rows lie head by head, each with its query, key and value, as ours do where every head is a group.
            rule("attention.qkv.{kind}", "self_attention.query_key_value.{kind}"),
            rule("attention.out.{kind}", "self_attention.dense.{kind}"),
            rule("mlp_norm.{kind}", "post_attention_layernorm.{kind}"),
            rule("mlp.fc1.{kind}", "mlp.dense_h_to_4h.{kind}"),
            rule("mlp.fc2.{kind}", "mlp.dense_4h_to_h.{kind}"),
        ),
        rule("head.norm.{kind}", "transformer.ln_f.{kind}"),
        rule("head.weight", "lm_head.weight"),
    ),
    prefix="transformer.",
)


def _bloom(layers: int, hidden: int, heads: int, vocab: int = 250880) -> Recipe:
    family: dict[str, Any] = {"activation": "gelu_tanh", "position_embedding": "alibi", "embedding_norm": True}
    return partial(TransformerConfig, layers, hidden, heads, vocab, 2048, **family)


# The published configurations of BLOOM 560m, 7b1 and 176B. bloom-13b is BigScience's tr1-13B, from before BLOOM: a GPT
# with learned positions, whose vocabulary is GPT-2's, padded for tp=4.
PRESETS: dict[str, Recipe] = {
    "bloom-tiny": _bloom(8, 512, 8, 32000),
    "bloom-560m": _bloom(24, 1024, 16),
    "bloom-7b1": _bloom(30, 4096, 32),
    "bloom-13b": partial(TransformerConfig, 40, 5120, 32, 50688, 2048),
    "bloom-176b": _bloom(70, 14336, 112),
}

FAMILY = Family(
    "bloom",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    module="lightning_megatron:BloomModule",
    default_preset="bloom-560m",
    # Settings of the code that trained BLOOM: published files have them, and transformers does not read them.
    passive=frozenset(
        {
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "offset_alibi",
            "skip_bias_add",
            "skip_bias_add_qkv",
        }
    ),
)
