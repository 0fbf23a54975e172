"""``LlamaForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning_megatron.checkpoint.formats.config_reader import ConfigReader, refuse_uneven_heads
from lightning_megatron.checkpoint.formats.weight_map import Rule, WeightMap, fuse_qkv, same, split_qkv, stacked
from lightning_megatron.config.transformer import TransformerConfig

MODEL_TYPE = "llama"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def weight_map(config: TransformerConfig) -> WeightMap:
    """The rules between ``LlamaForCausalLM`` and our model of this configuration."""
    tied = ("lm_head.weight",) if config.tie_embeddings else ()
    rules = [same("embedding.word.weight", "model.embed_tokens.weight", *tied)]
    for number in range(config.num_layers):
        rules += _block_rules(f"layers.{number}.", f"model.layers.{number}.", config)
    rules.append(same("head.norm.weight", "model.norm.weight"))
    if not config.tie_embeddings:
        rules.append(same("head.weight", "lm_head.weight"))
    return WeightMap(tuple(rules), ignored=r"rotary_emb\.inv_freq$", prefix="model.")


def _block_rules(native: str, foreign: str, config: TransformerConfig) -> list[Rule]:
    heads, groups = config.num_attention_heads, config.num_query_groups
    attention, mlp = foreign + "self_attn.", foreign + "mlp."
    rules = [same(native + "attention_norm.weight", foreign + "input_layernorm.weight")]
    kinds = ("weight", "bias") if config.add_bias_linear else ("weight",)
    for kind in kinds:
        qkv = tuple(f"{attention}{letter}_proj.{kind}" for letter in "qkv")
        join, split = partial(fuse_qkv, groups=groups), partial(split_qkv, heads=heads, groups=groups)
        rules.append(Rule(f"{native}attention.qkv.{kind}", qkv, join, split))
        rules.append(same(f"{native}attention.out.{kind}", f"{attention}o_proj.{kind}"))
        rules.append(stacked(f"{native}mlp.fc1.{kind}", f"{mlp}gate_proj.{kind}", f"{mlp}up_proj.{kind}"))
        rules.append(same(f"{native}mlp.fc2.{kind}", f"{mlp}down_proj.{kind}"))
    rules.append(same(native + "mlp_norm.weight", foreign + "post_attention_layernorm.weight"))
    return rules


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` from the contents of ``config.json``.

    Raises:
        ConfigError: naming every value that our model cannot reproduce.
    """
    reader = ConfigReader(config)
    found = decoder_fields(reader)
    reader.finish()
    return found


def decoder_fields(reader: ConfigReader) -> dict[str, Any]:
    """Fields of all models with LLaMA's attention; faults are noted in ``reader``."""
    heads = reader.required("num_attention_heads")
    reader.expect("hidden_act", "silu", ("silu", "swish"), "the gated activation is SwiGLU")
    attention_bias, mlp_bias = reader.get("attention_bias", False), reader.get("mlp_bias", False)
    if attention_bias != mlp_bias:
        reason = f"biases go into all linear layers or none, and mlp_bias={mlp_bias}"
        reader.refuse("attention_bias", attention_bias, reason, (mlp_bias,))
    theta, scaling = _rope_from_hf(reader)
    return {
        "num_layers": reader.required("num_hidden_layers"),
        "hidden_size": reader.required("hidden_size"),
        "num_attention_heads": heads,
        "vocab_size": reader.required("vocab_size"),
        "max_position_embeddings": reader.get("max_position_embeddings", 2048),
        "ffn_hidden_size": reader.required("intermediate_size"),
        "num_query_groups": reader.get("num_key_value_heads", heads, null=True),
        "head_dim": reader.get("head_dim", 0, null=True),
        "norm": "rmsnorm",
        "norm_epsilon": reader.get("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "position_embedding": "rope",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "add_bias_linear": attention_bias,
        "tie_embeddings": reader.get("tie_word_embeddings", False),
        "init_std": reader.get("initializer_range", 0.02),
        "attention_dropout": reader.get("attention_dropout", 0.0, null=True),
    }


def _rope_from_hf(reader: ConfigReader) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of the rotary angles.

    Up to transformers 4 they are ``rope_theta`` and ``rope_scaling``; from 5 on both are in ``rope_parameters``. If a
    file has all of them (the context was lengthened by hand, say), ``rope_scaling`` replaces ``rope_parameters`` as a
    whole, base included, as in transformers.
    """
    name = "rope_scaling" if reader.get("rope_scaling", {}, null=True) else "rope_parameters"
    given = reader.get(name, {}, null=True)
    rope = ConfigReader(given)
    theta = rope.get("rope_theta", reader.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        rope.refuse("rope_type", kind, "of the ways to stretch positions we know one", ("default", "llama3"))
    for source in (reader, rope):
        source.expect("partial_rotary_factor", 1.0, (1.0,), "all features of a head are turned", null=True)
    if kind == "llama3":
        for key in _LLAMA3:
            if key not in given:
                rope.refuse(key, None, "missing in the Hugging Face configuration")
            rope.get(key, 0.0)
        length = given.get("original_max_position_embeddings")
        reason = f"{name} has {length!r} of it, and only some versions of transformers read this one"
        reader.expect("original_max_position_embeddings", length, (length,), reason)
    reader.take_over(rope, name)
    return float(theta), {key: given.get(key) for key in _LLAMA3} if kind == "llama3" else None


def config_to_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of ``config.json`` from the fields of ``TransformerConfig`` (``dataclasses.asdict``).

    Fields of training (dropout of the residual stream, label smoothing, vocabulary padding) have no place there.

    Raises:
        ConfigError: naming every value that ``LlamaForCausalLM`` cannot reproduce.
    """
    reader = ConfigReader(config)
    reader.expect("num_experts", 0, (0,), "LlamaForCausalLM has no experts")
    for name, only in (("norm", "rmsnorm"), ("activation", "swiglu"), ("position_embedding", "rope")):
        reader.expect(name, None, (only,), "not what LlamaForCausalLM computes")
    refuse_uneven_heads(reader, config, "LlamaForCausalLM")
    reader.finish()
    scaling = config["rope_scaling"]
    bias = bool(config["add_bias_linear"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": MODEL_TYPE,
        "num_hidden_layers": config["num_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_query_groups"],
        "head_dim": config["head_dim"],
        "intermediate_size": config["ffn_hidden_size"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "hidden_act": "silu",
        "rms_norm_eps": config["norm_epsilon"],
        # The old spelling: all versions of transformers read it.
        "rope_theta": config["rope_theta"],
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **scaling},
        "attention_bias": bias,
        "mlp_bias": bias,
        "attention_dropout": config["attention_dropout"],
        "initializer_range": config["init_std"],
        "tie_word_embeddings": config["tie_embeddings"],
        # transformers' defaults are LLaMA 2's own 1 and 2, which another vocabulary need not have.
        "bos_token_id": None,
        "eos_token_id": None,
    }
