"""``MixtralForCausalLM``: LLaMA's attention, and experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint.formats.config_reader import ConfigReader
from lightning_megatron.checkpoint.formats.hf.llama import config_to_hf as llama_to_hf
from lightning_megatron.checkpoint.formats.hf.llama import decoder_fields
from lightning_megatron.checkpoint.formats.hf.llama import weight_map as llama_weight_map
from lightning_megatron.checkpoint.formats.weight_map import Rule, WeightMap, same
from lightning_megatron.config.transformer import TransformerConfig

MODEL_TYPE = "mixtral"
_LEFT_OUT = ("hidden_act", "attention_bias", "mlp_bias")
_DEFAULTS = {
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
}
"""Defaults of Mixtral's configuration that differ from those of LLaMA's."""


def weight_map(config: TransformerConfig) -> WeightMap:
    """The rules between ``MixtralForCausalLM`` and our model of this configuration.

    Mixtral's files hold three matrices of each expert: ``w1`` (gate), ``w3`` (up) and ``w2`` (down).
    """
    dense = llama_weight_map(config)
    rules = [rule for rule in dense.rules if ".mlp." not in rule.native]
    for number in range(config.num_layers):
        native, foreign = f"layers.{number}.mlp.", f"model.layers.{number}.block_sparse_moe."
        experts = [f"{foreign}experts.{e}." for e in range(config.num_experts)]
        gates_and_ups = tuple(f"{expert}{name}.weight" for expert in experts for name in ("w1", "w3"))
        downs = tuple(f"{expert}w2.weight" for expert in experts)
        rules.append(same(f"{native}router.weight", f"{foreign}gate.weight"))
        rules.append(Rule(f"{native}experts.fc1", gates_and_ups, partial(_stack, 2), _unstack_pairs))
        rules.append(Rule(f"{native}experts.fc2", downs, partial(_stack, 1), _unstack))
    return WeightMap(tuple(rules), dense.ignored, dense.prefix)


def _stack(together: int, *matrices: Tensor) -> Tensor:
    """``[F, H]`` each to ``[E, F, H]``, or with several matrices of each expert to ``[E, together, F, H]``."""
    stacked = torch.stack(matrices)
    return stacked if together == 1 else stacked.unflatten(0, (-1, together))


def _unstack(stacked: Tensor) -> tuple[Tensor, ...]:
    return tuple(matrix.contiguous() for matrix in stacked.unbind())


def _unstack_pairs(stacked: Tensor) -> tuple[Tensor, ...]:
    return _unstack(stacked.flatten(0, 1))


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` from the contents of ``config.json``.

    Mixtral's load-balancing loss pools all layers and is ``k`` times that of a layer; ours is a sum over layers. The
    coefficient is converted so that both are equal if the load of all layers is the same.

    Raises:
        ConfigError: naming every value that our model cannot reproduce.
    """
    reader = ConfigReader({**_DEFAULTS, **config})
    reader.get("num_key_value_heads", 8)  # LLaMA may have null here, and Mixtral not
    experts, topk = reader.required("num_local_experts"), reader.get("num_experts_per_tok", 2)
    reader.expect("sliding_window", None, (None,), "attention sees all that precedes")
    found = decoder_fields(reader)
    coefficient, jitter = reader.get("router_aux_loss_coef", 0.001), reader.get("router_jitter_noise", 0.0)
    reader.finish()
    return found | {
        "num_experts": experts,
        "moe_router_topk": topk,
        "moe_aux_loss_coeff": coefficient * topk / found["num_layers"],
        "moe_input_jitter_eps": jitter,
    }


def config_to_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of ``config.json`` from the fields of ``TransformerConfig`` (``dataclasses.asdict``).

    Raises:
        ConfigError: naming every value that ``MixtralForCausalLM`` cannot reproduce.
    """
    reader = ConfigReader(config)
    no_other = "not what MixtralForCausalLM computes"
    reader.expect("moe_router_score", "softmax", ("softmax",), no_other)
    reader.expect("moe_router_pre_softmax", False, (False,), "MixtralForCausalLM makes weights of the chosen sum to 1")
    reader.expect("moe_router_scaling_factor", 1.0, (1.0,), no_other)
    reader.expect("moe_shared_expert_ffn_hidden_size", 0, (0,), no_other)
    everywhere = tuple(range(config["num_layers"]))
    reader.expect("moe_layers", (), ((), everywhere), "MixtralForCausalLM has experts in every layer")
    reader.expect("add_bias_linear", False, (False,), no_other)
    reader.finish()
    found = llama_to_hf({**config, "num_experts": 0})
    return {name: value for name, value in found.items() if name not in _LEFT_OUT} | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": MODEL_TYPE,
        "hidden_act": "silu",
        "intermediate_size": config["moe_ffn_hidden_size"] or config["ffn_hidden_size"],
        "num_local_experts": config["num_experts"],
        "num_experts_per_tok": config["moe_router_topk"],
        "router_aux_loss_coef": config["moe_aux_loss_coeff"] * config["num_layers"] / config["moe_router_topk"],
        "router_jitter_noise": config["moe_input_jitter_eps"],
        "sliding_window": None,
    }
