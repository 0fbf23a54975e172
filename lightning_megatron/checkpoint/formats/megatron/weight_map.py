"""Rules that convert Megatron's whole tensors, under the names of ``names.py``, to ours.

Most tensors differ in name only: both sides fuse queries, keys and values by query group. Megatron stores the padding
of the vocabulary, and gates and ups in one matrix.
"""

from __future__ import annotations

from collections.abc import Set
from functools import partial

import torch
from torch import Tensor

from lightning_megatron.checkpoint.formats.megatron.before_core import QKVOrder
from lightning_megatron.checkpoint.formats.megatron.families import family_of_config
from lightning_megatron.checkpoint.formats.megatron.names import LAYERS
from lightning_megatron.checkpoint.formats.weight_map import WeightMap, WeightRule, same
from lightning_megatron.config.counts import GATED
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, raise_if_any


def megatron_weight_map(config: TransformerConfig, names: Set[str], order: QKVOrder = "head") -> WeightMap:
    """Rules that convert a model of Megatron's to our model of this configuration.

    ``names`` are the global names of all its parameters.

    Raises:
        ConfigError: naming parameters that Megatron does not have.
    """
    tied = ("output_layer.weight",) if config.tie_embeddings else ()
    rules = [of_vocabulary("embedding.word.weight", "embedding.word_embeddings.weight", config, tied)]
    if config.position_embedding == "learned":
        rules.append(same("embedding.position", "embedding.position_embeddings.weight"))
    for number in range(config.num_layers):
        rules += _block_rules(number, config, order)
    family = family_of_config(config)
    rules += family.rules(config) if family else norm_rules("head.norm", "decoder.final_layernorm", config)
    if not config.tie_embeddings:
        rules.append(of_vocabulary("head.weight", "output_layer.weight", config))
    found = WeightMap(tuple(rules), ignored=r"rotary_pos_emb\.inv_freq$", prefix="", label="Megatron tensors")
    without = names - found.native_names
    raise_if_any([Problem("parameter", name, "Megatron has no such tensor") for name in sorted(without)])
    return found


def _block_rules(number: int, config: TransformerConfig, order: QKVOrder) -> list[WeightRule]:
    native, foreign = f"layers.{number}.", f"{LAYERS}{number}."
    rules = norm_rules(f"{native}attention_norm", f"{foreign}input_layernorm", config)
    own, theirs = f"{native}attention.", f"{foreign}self_attention."
    by_head = partial(_by_head, order, config.num_attention_heads)
    rules += [_into(f"{own}qkv.{kind}", f"{theirs}linear_qkv.{kind}", by_head) for kind in kinds(config.has_qkv_bias)]
    rules += [same(f"{own}out.{kind}", f"{theirs}linear_proj.{kind}") for kind in kinds(config.has_attention_out_bias)]
    if config.qk_norm:
        rules += norm_rules(f"{own}q_norm", f"{theirs}q_layernorm", config)
        rules += norm_rules(f"{own}k_norm", f"{theirs}k_layernorm", config)
    rules += norm_rules(f"{native}mlp_norm", f"{foreign}pre_mlp_layernorm", config)
    gates = 2 if config.activation in GATED else 1
    if config.has_experts(number):
        experts = [f"{foreign}mlp.experts.{e}." for e in range(config.num_experts)]
        rules.append(same(f"{native}mlp.router.weight", f"{foreign}mlp.router.weight"))
        for fc, parts in (("fc1", gates), ("fc2", 1)):
            matrices = tuple(f"{expert}linear_{fc}.weight" for expert in experts)
            rules.append(WeightRule(f"{native}mlp.experts.{fc}", matrices, partial(_stack, parts), _one_way))
        return rules
    for kind in kinds(config.add_bias_linear):
        rules.append(_into(f"{native}mlp.fc1.{kind}", f"{foreign}mlp.linear_fc1.{kind}", partial(_stack_rows, gates)))
        rules.append(same(f"{native}mlp.fc2.{kind}", f"{foreign}mlp.linear_fc2.{kind}"))
    return rules


def of_vocabulary(native: str, foreign: str, config: TransformerConfig, repeats: tuple[str, ...] = ()) -> WeightRule:
    """Rule for a tensor with a row for each word, which Megatron stores with the padding of the vocabulary."""
    return _into(native, foreign, partial(_first_rows, config.vocab_size), repeats)


def norm_rules(native: str, foreign: str, config: TransformerConfig) -> list[WeightRule]:
    """Rules for the weight of a norm, and its bias if it has one."""
    return [same(f"{native}.{kind}", f"{foreign}.{kind}") for kind in kinds(config.norm != "rmsnorm")]


def kinds(bias: bool) -> tuple[str, ...]:
    """Names of a layer's parameters, with or without a bias."""
    return ("weight", "bias") if bias else ("weight",)


def _into(native: str, foreign: str, join: object, repeats: tuple[str, ...] = ()) -> WeightRule:
    return WeightRule(native, (foreign,), join, _one_way, repeats)  # type: ignore[arg-type]


def _one_way(x: Tensor) -> tuple[Tensor, ...]:
    raise NotImplementedError("checkpoints of Megatron are read, and not written")


def _by_head(order: QKVOrder, heads: int, x: Tensor) -> Tensor:
    """Rows ``[3, N, D]`` or ``[N, D, 3]`` of older models to ``[N, 3, D]``."""
    if order == "kind":
        return x.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    if order == "feature":
        return x.unflatten(0, (heads, -1, 3)).transpose(1, 2).flatten(0, 2)
    return x


def _first_rows(count: int, x: Tensor) -> Tensor:
    """The vocabulary without its padding."""
    return x[:count]


def _stack_rows(parts: int, x: Tensor) -> Tensor:
    """``[2 F, ...]`` to ``[2, F, ...]``."""
    return x if parts == 1 else x.unflatten(0, (parts, -1))


def _stack(parts: int, *experts: Tensor) -> Tensor:
    """``[F, H]`` of each expert to ``[E, F, H]``, or ``[2 F, H]`` to ``[E, 2, F, H]``."""
    stacked = torch.stack(experts)
    return stacked if parts == 1 else stacked.unflatten(1, (parts, -1))
