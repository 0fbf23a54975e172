"""BERT (https://arxiv.org/abs/1810.04805), with both heads or only that of masked tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.tensors import QKV, Tensors, in_layers, rule
from lightning_megatron.config.reader import ConfigReader, refuse_uneven_heads
from lightning_megatron.encoders.bert.config import BertConfig

ARCHITECTURE, OF_TOKENS_ALONE = "BertForPreTraining", "BertForMaskedLM"
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_TO_HF = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    activation = reader.expect("hidden_act", "gelu", tuple(_ACTIVATIONS), "unknown activation")
    reader.expect("is_decoder", False, (False,), "every token sees both sides")
    reader.expect("add_cross_attention", False, (False,), "the model is an encoder alone")
    reader.expect("tie_word_embeddings", True, (True,), "the output layer is the embedding")
    reader.expect("position_embedding_type", "absolute", ("absolute",), "positions are learned, one by one")
    named = reader.get("architectures", None)
    return {
        "num_layers": reader.get("num_hidden_layers", 12),
        "hidden_size": reader.get("hidden_size", 768),
        "num_attention_heads": reader.get("num_attention_heads", 12),
        "vocab_size": reader.get("vocab_size", 30522),
        "max_position_embeddings": reader.get("max_position_embeddings", 512),
        "ffn_hidden_size": reader.get("intermediate_size", 3072),
        "norm_epsilon": reader.get("layer_norm_eps", 1e-12),
        "activation": _ACTIVATIONS.get(activation, activation),
        "init_std": reader.get("initializer_range", 0.02),
        "hidden_dropout": reader.get("hidden_dropout_prob", 0.1),
        "attention_dropout": reader.get("attention_probs_dropout_prob", 0.1),
        "num_token_types": reader.get("type_vocab_size", 2),
        "next_sentence": OF_TOKENS_ALONE not in (named if isinstance(named, list) else []),
    }


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    heads, hidden = reader["num_attention_heads"], reader["hidden_size"]
    only = {"tie_embeddings": True, "num_query_groups": heads, "head_dim": hidden // heads}
    for name, value in only.items():
        reader.expect(name, None, (value,), f"not what {ARCHITECTURE} computes")
    refuse_uneven_heads(reader, ARCHITECTURE)
    activation = reader.expect("activation", None, tuple(_TO_HF), f"not what {ARCHITECTURE} computes")
    if not reader["num_token_types"]:
        reader.refuse("num_token_types", 0, f"{ARCHITECTURE} has at least one", (1,))
    return {
        "architectures": [ARCHITECTURE if reader["next_sentence"] else OF_TOKENS_ALONE],
        "num_hidden_layers": reader["num_layers"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": reader["ffn_hidden_size"],
        "vocab_size": reader["vocab_size"],
        "max_position_embeddings": reader["max_position_embeddings"],
        "type_vocab_size": reader["num_token_types"],
        "hidden_act": _TO_HF.get(activation),
        "layer_norm_eps": reader["norm_epsilon"],
        "initializer_range": reader["init_std"],
        "hidden_dropout_prob": reader["hidden_dropout"],
        "attention_probs_dropout_prob": reader["attention_dropout"],
    }


_EMBEDDINGS, _HEAD = "bert.embeddings.", "cls.predictions."
TENSORS = Tensors(
    (
        rule("embedding.word.weight", f"{_EMBEDDINGS}word_embeddings.weight", tied=f"{_HEAD}decoder.weight"),
        rule("embedding.position", f"{_EMBEDDINGS}position_embeddings.weight"),
        rule("embedding.token_type", f"{_EMBEDDINGS}token_type_embeddings.weight"),
        rule("embedding.norm.{kind}", f"{_EMBEDDINGS}LayerNorm.{{kind}}"),
        *in_layers(
            "layers.{n}.",
            "bert.encoder.layer.{n}.",
            rule(
                "attention.qkv.{kind}",
                *(f"attention.self.{name}.{{kind}}" for name in ("query", "key", "value")),
                kind=QKV,
            ),
            rule("attention.out.{kind}", "attention.output.dense.{kind}"),
            rule("attention_norm.{kind}", "attention.output.LayerNorm.{kind}"),
            rule("mlp.fc1.{kind}", "intermediate.dense.{kind}"),
            rule("mlp.fc2.{kind}", "output.dense.{kind}"),
            rule("mlp_norm.{kind}", "output.LayerNorm.{kind}"),
        ),
        rule("head.pooler.{kind}", "bert.pooler.dense.{kind}"),
        rule("head.transform.{kind}", f"{_HEAD}transform.dense.{{kind}}"),
        rule("head.norm.{kind}", f"{_HEAD}transform.LayerNorm.{{kind}}"),
        rule("head.bias", f"{_HEAD}bias", tied=f"{_HEAD}decoder.bias"),
        rule("head.next_sentence.{kind}", "cls.seq_relationship.{kind}"),
    ),
    prefix="bert.",
    ignored=r"embeddings\.position_ids$",
    heads="cls.",
)


def _bert(layers: int, hidden: int, heads: int, vocab: int = 30522, **more: Any) -> Recipe:
    return partial(BertConfig, layers, hidden, heads, vocab, 512, hidden_dropout=0.1, attention_dropout=0.1, **more)


# The published configurations of bert-base-uncased and bert-large-uncased; 110,106,428 and 336,226,108 parameters as of
# BertForPreTraining.
PRESETS = {"bert-tiny": _bert(2, 128, 2), "bert-base": _bert(12, 768, 12), "bert-large": _bert(24, 1024, 16)}
# NVIDIA's BERT-345M, with the constants of transformers' MegatronBertConfig.
PRESETS |= {
    "megatron-bert-cased": _bert(24, 1024, 16, 28996, norm_position="before"),
    "megatron-bert-uncased": _bert(24, 1024, 16, norm_position="before"),
}

FAMILY = Family(
    "bert",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    module="lightning_megatron:BertModule",
    model="lightning_megatron.encoders.bert.model:BertModel",
    default_preset="bert-base",
    config_class=BertConfig,
    megatron="lightning_megatron.encoders.bert.megatron:MEGATRON",
    recipes=Path(__file__).parent / "recipes",
    data_paths={"BertDataModule": ("data_path", "val_data_path", "test_data_path", "cache_dir", "vocab_file")},
    passive=frozenset(
        {
            "classifier_dropout",
            "directionality",
            "gradient_checkpointing",
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_num_fc_layers",
            "pooler_size_per_head",
            "pooler_type",
        }
    ),
)
