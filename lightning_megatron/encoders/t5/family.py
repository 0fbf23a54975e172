"""T5 (https://arxiv.org/abs/1910.10683), 1.0 with tied embeddings and 1.1 (and Flan-T5) with gates and a head."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.tensors import (
    KV,
    QKV,
    STACKED,
    TRANSPOSED,
    TensorRule,
    Tensors,
    in_layers,
    rule,
)
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.encoders.t5.config import T5Config

ARCHITECTURE = "T5ForConditionalGeneration"
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gated-gelu": "geglu_tanh",
    "gated-gelu_new": "geglu_tanh",
    "gated-silu": "swiglu",
    "gated-swish": "swiglu",
}
_TO_HF = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "geglu_tanh": "gated-gelu", "swiglu": "gated-silu"}


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    activation = reader.expect("feed_forward_proj", "relu", tuple(_ACTIVATIONS), "unknown activation")
    _expect_parts_of(str(activation), reader)
    reader.expect("is_decoder", False, (False,), "the model has both stacks")
    reader.expect("is_encoder_decoder", True, (True,), "the model has both stacks")
    tied = reader.get("tie_word_embeddings", True)
    scales = reader.get("scale_decoder_outputs", tied)
    if scales and not tied:
        reason = "an untied output layer has unscaled inputs"
        reader.refuse("scale_decoder_outputs", scales, reason, (False,))
    encoder = reader.get("num_layers", 6)
    decoder = reader.get("num_decoder_layers", encoder, null=True)
    head_dim, features = reader.get("d_kv", 64), reader.get("d_ff", 2048)
    sizes = {"num_layers": encoder, "num_decoder_layers": decoder, "d_kv": head_dim, "d_ff": features}
    for name, size in sizes.items():
        if size < 1:
            reader.refuse(name, size, "must be at least 1", (1,))
    return {
        "num_layers": encoder + decoder,
        "num_decoder_layers": decoder,
        "hidden_size": reader.get("d_model", 512),
        "num_attention_heads": reader.get("num_heads", 8),
        "head_dim": head_dim,
        "ffn_hidden_size": features,
        "vocab_size": reader.get("vocab_size", 32128),
        "max_position_embeddings": reader.get("n_positions", 512),
        "relative_buckets": reader.get("relative_attention_num_buckets", 32),
        "relative_distance": reader.get("relative_attention_max_distance", 128),
        "norm_epsilon": reader.get("layer_norm_epsilon", 1e-6),
        "activation": _ACTIVATIONS.get(activation, activation),
        "tie_embeddings": scales,
        "init_std": reader.get("initializer_factor", 1.0),
        "hidden_dropout": reader.get("dropout_rate", 0.1),
        "attention_dropout": reader.get("dropout_rate", 0.1),
    }


def _expect_parts_of(activation: str, reader: ConfigReader) -> None:
    """Refuse entries that transformers derives from the activation, if they contradict it."""
    gate, _, function = activation.rpartition("-")
    if activation == "gated-gelu":
        function = "gelu_new"
    reader.expect("dense_act_fn", function, (function,), f"feed_forward_proj={activation!r} says otherwise")
    reader.expect("is_gated_act", bool(gate), (bool(gate),), f"feed_forward_proj={activation!r} says otherwise")


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    heads = reader["num_attention_heads"]
    reader.expect("num_query_groups", None, (heads,), f"not what {ARCHITECTURE} computes")
    activation = reader.expect("activation", None, tuple(_TO_HF), f"not what {ARCHITECTURE} computes")
    decoder, tied = reader["num_decoder_layers"], reader["tie_embeddings"]
    return {
        "num_layers": reader["num_layers"] - decoder,
        "num_decoder_layers": decoder,
        "d_model": reader["hidden_size"],
        "num_heads": heads,
        "d_kv": reader["head_dim"],
        "d_ff": reader["ffn_hidden_size"],
        "vocab_size": reader["vocab_size"],
        "n_positions": reader["max_position_embeddings"],
        "relative_attention_num_buckets": reader["relative_buckets"],
        "relative_attention_max_distance": reader["relative_distance"],
        "layer_norm_epsilon": reader["norm_epsilon"],
        "feed_forward_proj": _TO_HF.get(activation),
        "tie_word_embeddings": tied,
        "scale_decoder_outputs": tied,
        "initializer_factor": reader["init_std"],
        "dropout_rate": reader["hidden_dropout"],
        "is_encoder_decoder": True,
    }


_OWN = (
    rule("attention_norm.weight", "layer.0.layer_norm.weight"),
    rule("attention.qkv.weight", *(f"layer.0.SelfAttention.{name}.weight" for name in "qkv"), kind=QKV),
    rule("attention.out.weight", "layer.0.SelfAttention.o.weight"),
)
_CROSS = (
    rule("cross_norm.weight", "layer.1.layer_norm.weight"),
    rule("cross.query.weight", "layer.1.EncDecAttention.q.weight"),
    rule("cross.key_value.weight", *(f"layer.1.EncDecAttention.{name}.weight" for name in "kv"), kind=KV),
    rule("cross.out.weight", "layer.1.EncDecAttention.o.weight"),
)


def _feed(layer: str) -> tuple[TensorRule, ...]:
    dense = f"{layer}.DenseReluDense."
    return (
        rule("mlp_norm.weight", f"{layer}.layer_norm.weight"),
        rule("mlp.fc1.weight", f"{dense}wi.weight", gated=False),
        rule("mlp.fc1.weight", f"{dense}wi_0.weight", f"{dense}wi_1.weight", kind=STACKED, gated=True),
        rule("mlp.fc2.weight", f"{dense}wo.weight"),
    )


_TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
TENSORS = Tensors(
    (
        rule(
            "embedding.word.weight",
            "shared.weight",
            tied="lm_head.weight",
            repeats=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        ),
        rule("encoder_bias.weight", f"encoder.{_TABLE}", kind=TRANSPOSED),
        *in_layers("layers.{n}.", "encoder.block.{n}.", *_OWN, *_feed("layer.1"), stack="encoder"),
        rule("encoder_end.norm.weight", "encoder.final_layer_norm.weight"),
        rule("decoder_bias.weight", f"decoder.{_TABLE}", kind=TRANSPOSED),
        *in_layers("layers.{n}.", "decoder.block.{n}.", *_OWN, *_CROSS, *_feed("layer.2"), stack="decoder"),
        rule("head.norm.weight", "decoder.final_layer_norm.weight"),
        rule("head.weight", "lm_head.weight", otherwise="shared.weight"),
    ),
    prefix="",
    ignored=r"EncDecAttention\.relative_attention_bias\.weight$",
)


def _t5(layers: int, hidden: int, heads: int, head_dim: int, ffn: int, **other: Any) -> Recipe:
    sizes: dict[str, Any] = {"head_dim": head_dim, "ffn_hidden_size": ffn}
    drops = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    return partial(T5Config, 2 * layers, hidden, heads, 32128, 512, **sizes | drops | other)


def _gated(*sizes: int) -> Recipe:
    return _t5(*sizes, activation="geglu_tanh", tie_embeddings=False)


# The published configurations of t5-small to t5-11b and t5-v1_1-small to -xxl, with the tables of both vocabularies'
# rows (32,128).
PRESETS = {
    "t5-tiny": _t5(2, 64, 4, 16, 128),
    "t5-small": _t5(6, 512, 8, 64, 2048),
    "t5-base": _t5(12, 768, 12, 64, 3072),
    "t5-large": _t5(24, 1024, 16, 64, 4096),
    "t5-3b": _t5(24, 1024, 32, 128, 16384),
    "t5-11b": _t5(24, 1024, 128, 128, 65536),
    "t5-v1.1-small": _gated(8, 512, 6, 64, 1024),
    "t5-v1.1-base": _gated(12, 768, 12, 64, 2048),
    "t5-v1.1-large": _gated(24, 1024, 16, 64, 2816),
    "t5-v1.1-xl": _gated(24, 2048, 32, 64, 5120),
    "t5-v1.1-xxl": _gated(24, 4096, 64, 64, 10240),
}

FAMILY = Family(
    "t5",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    module="lightning_megatron:T5Module",
    model="lightning_megatron.encoders.t5.model:T5Model",
    default_preset="t5-base",
    config_class=T5Config,
    recipes=Path(__file__).parent / "recipes",
    data_paths={
        "T5DataModule": ("data_path", "val_data_path", "test_data_path", "cache_dir", "tokenizer_model", "vocab_file")
    },
    passive=frozenset({"classifier_dropout", "gradient_checkpointing", "output_past"}),
)
