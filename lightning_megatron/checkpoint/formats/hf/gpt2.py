"""``GPT2LMHeadModel``, whose linear layers (``Conv1D``) store ``[in, out]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint.formats.config_reader import ConfigReader, refuse_uneven_heads
from lightning_megatron.checkpoint.formats.weight_map import (
    Rule,
    WeightMap,
    fuse_qkv,
    same,
    split_qkv,
    transposed,
)
from lightning_megatron.config.transformer import TransformerConfig

MODEL_TYPE = "gpt2"
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_TO_HF = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}


def weight_map(config: TransformerConfig) -> WeightMap:
    """The rules between ``GPT2LMHeadModel`` and our model of this configuration."""
    tied = ("lm_head.weight",) if config.tie_embeddings else ()
    rules = [
        same("embedding.word.weight", "transformer.wte.weight", *tied),
        same("embedding.position", "transformer.wpe.weight"),
    ]
    for number in range(config.num_layers):
        rules += _block_rules(f"layers.{number}.", f"transformer.h.{number}.", config.num_attention_heads)
    rules += [same(f"head.norm.{kind}", f"transformer.ln_f.{kind}") for kind in ("weight", "bias")]
    if not config.tie_embeddings:
        rules.append(same("head.weight", "lm_head.weight"))
    # Files written by old versions hold the causal mask of each layer.
    return WeightMap(tuple(rules), ignored=r"h\.\d+\.attn\.(bias|masked_bias)$", prefix="transformer.")


def _block_rules(native: str, foreign: str, heads: int) -> list[Rule]:
    def join(x: Tensor) -> Tensor:
        q, k, v = x.chunk(3)
        return fuse_qkv(q, k, v, heads)

    def join_weight(x: Tensor) -> Tensor:
        return join(x.t())

    def split_weight(x: Tensor) -> tuple[Tensor]:
        return (split(x)[0].t().contiguous(),)

    def split(x: Tensor) -> tuple[Tensor]:
        return (torch.cat(split_qkv(x, heads, heads)),)

    rules = [
        Rule(native + "attention.qkv.weight", (foreign + "attn.c_attn.weight",), join_weight, split_weight),
        Rule(native + "attention.qkv.bias", (foreign + "attn.c_attn.bias",), join, split),
    ]
    for part, foreign_part in (("attention.out", "attn.c_proj"), ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj")):
        rules.append(transposed(f"{native}{part}.weight", f"{foreign}{foreign_part}.weight"))
        rules.append(same(f"{native}{part}.bias", f"{foreign}{foreign_part}.bias"))
    for part, foreign_part in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        rules += [same(f"{native}{part}.{kind}", f"{foreign}{foreign_part}.{kind}") for kind in ("weight", "bias")]
    return rules


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` from the contents of ``config.json``.

    Raises:
        ConfigError: naming every value that our model cannot reproduce.
    """
    reader = ConfigReader(config)
    activation = reader.expect("activation_function", "gelu_new", tuple(_ACTIVATIONS), "unknown activation")
    reader.expect("scale_attn_weights", True, (True,), "attention is scaled by the root of the head dimension")
    reader.expect("scale_attn_by_inverse_layer_idx", False, (False,), "attention is scaled alike in all layers")
    reader.expect("add_cross_attention", False, (False,), "the model is a decoder alone")
    dropout = reader.get("resid_pdrop", 0.1)
    reader.expect("embd_pdrop", 0.1, (dropout,), "embeddings and sub-layers share one dropout, hidden_dropout")
    found = {
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
    reader.finish()
    return found


def config_to_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of ``config.json`` from the fields of ``TransformerConfig`` (``dataclasses.asdict``).

    Fields of training (label smoothing, vocabulary padding) have no place there.

    Raises:
        ConfigError: naming every value that ``GPT2LMHeadModel`` cannot reproduce.
    """
    reader = ConfigReader(config)
    heads = config["num_attention_heads"]
    reason = "not what GPT2LMHeadModel computes"
    reader.expect("norm", None, ("layernorm",), reason)
    reader.expect("position_embedding", None, ("learned",), reason)
    reader.expect("add_bias_linear", None, (True,), reason)
    reader.expect("num_query_groups", None, (heads,), reason)
    reader.expect("head_dim", None, (config["hidden_size"] // heads,), reason)
    refuse_uneven_heads(reader, config, "GPT2LMHeadModel")
    activation = reader.expect("activation", None, tuple(_TO_HF), reason)
    reader.finish()
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": MODEL_TYPE,
        "n_layer": config["num_layers"],
        "n_embd": config["hidden_size"],
        "n_head": heads,
        "n_inner": config["ffn_hidden_size"],
        "n_positions": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "activation_function": _TO_HF[activation],
        "layer_norm_epsilon": config["norm_epsilon"],
        "initializer_range": config["init_std"],
        "resid_pdrop": config["hidden_dropout"],
        "embd_pdrop": config["hidden_dropout"],
        "attn_pdrop": config["attention_dropout"],
        "tie_word_embeddings": config["tie_embeddings"],
        # transformers' defaults are GPT-2's own 50256, which another vocabulary need not have.
        "bos_token_id": None,
        "eos_token_id": None,
    }
