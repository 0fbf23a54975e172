"""``GPT2LMHeadModel``, whose linear layers (``Conv1D``) store ``[in, out]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint.formats.config_reader import Fields
from lightning_megatron.checkpoint.formats.hf.qkv import HFShape, fuse_qkv, refuse_uneven_heads, split_qkv
from lightning_megatron.checkpoint.formats.weight_map import Rule, WeightMap, same, transposed

MODEL_TYPE = "gpt2"
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_TO_HF = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}


def weight_map(shape: HFShape) -> WeightMap:
    """The rules between ``GPT2LMHeadModel`` and our model of this shape."""
    tied = ("lm_head.weight",) if shape.tie_embeddings else ()
    rules = [
        same("embedding.word.weight", "transformer.wte.weight", *tied),
        same("embedding.position", "transformer.wpe.weight"),
    ]
    for number in range(shape.num_layers):
        rules += _block_rules(f"layers.{number}.", f"transformer.h.{number}.", shape.num_attention_heads)
    rules += [same(f"head.norm.{kind}", f"transformer.ln_f.{kind}") for kind in ("weight", "bias")]
    if not shape.tie_embeddings:
        rules.append(same("head.weight", "lm_head.weight"))
    # Files written by old versions hold the causal mask of each layer.
    return WeightMap(tuple(rules), ignored=r"h\.\d+\.attn\.(bias|masked_bias)$", prefix="transformer.")


def _block_rules(ours: str, theirs: str, heads: int) -> list[Rule]:
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
        Rule(ours + "attention.qkv.weight", (theirs + "attn.c_attn.weight",), join_weight, split_weight),
        Rule(ours + "attention.qkv.bias", (theirs + "attn.c_attn.bias",), join, split),
    ]
    for mine, its in (("attention.out", "attn.c_proj"), ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj")):
        rules.append(transposed(f"{ours}{mine}.weight", f"{theirs}{its}.weight"))
        rules.append(same(f"{ours}{mine}.bias", f"{theirs}{its}.bias"))
    for mine, its in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        rules += [same(f"{ours}{mine}.{kind}", f"{theirs}{its}.{kind}") for kind in ("weight", "bias")]
    return rules


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` from the contents of ``config.json``.

    Raises:
        ConfigError: naming every value that our model cannot reproduce.
    """
    fields = Fields(config)
    activation = fields.expect("activation_function", "gelu_new", tuple(_ACTIVATIONS), "unknown activation")
    fields.expect("scale_attn_weights", True, (True,), "attention is scaled by the root of the head dimension")
    fields.expect("scale_attn_by_inverse_layer_idx", False, (False,), "attention is scaled alike in all layers")
    fields.expect("add_cross_attention", False, (False,), "the model is a decoder alone")
    dropout = fields.get("resid_pdrop", 0.1)
    fields.expect("embd_pdrop", 0.1, (dropout,), "embeddings and sub-layers share one dropout, hidden_dropout")
    found = {
        "num_layers": fields.required("n_layer"),
        "hidden_size": fields.required("n_embd"),
        "num_attention_heads": fields.required("n_head"),
        "vocab_size": fields.required("vocab_size"),
        "max_position_embeddings": fields.get("n_positions", 1024),
        "ffn_hidden_size": fields.get("n_inner", 0, null=True),
        "norm": "layernorm",
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
        "activation": _ACTIVATIONS.get(activation, activation),
        "position_embedding": "learned",
        "add_bias_linear": True,
        "tie_embeddings": fields.get("tie_word_embeddings", True),
        "init_std": fields.get("initializer_range", 0.02),
        "hidden_dropout": dropout,
        "attention_dropout": fields.get("attn_pdrop", 0.1),
    }
    fields.finish()
    return found


def config_to_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of ``config.json`` from the fields of ``TransformerConfig`` (``dataclasses.asdict``).

    What only training knows (label smoothing, vocabulary padding) has no place there.

    Raises:
        ConfigError: naming every value that ``GPT2LMHeadModel`` cannot reproduce.
    """
    fields = Fields(config)
    heads = config["num_attention_heads"]
    reason = "not what GPT2LMHeadModel computes"
    fields.expect("norm", None, ("layernorm",), reason)
    fields.expect("position_embedding", None, ("learned",), reason)
    fields.expect("add_bias_linear", None, (True,), reason)
    fields.expect("num_query_groups", None, (heads,), reason)
    fields.expect("head_dim", None, (config["hidden_size"] // heads,), reason)
    refuse_uneven_heads(fields, config, "GPT2LMHeadModel")
    activation = fields.expect("activation", None, tuple(_TO_HF), reason)
    fields.finish()
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
