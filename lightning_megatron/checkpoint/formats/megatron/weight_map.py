"""Rules between Megatron's whole tensors, under the names of ``names.py``, and ours.

Most tensors differ in name only: both sides fuse queries, keys and values by query group. Megatron stores the padding
of the vocabulary, and gates and ups in one matrix.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lightning_megatron.checkpoint.formats.megatron.names import LAYERS
from lightning_megatron.checkpoint.formats.weight_map import Rule, WeightMap, same
from lightning_megatron.config.transformer import TransformerConfig


def weight_map(config: TransformerConfig) -> WeightMap:
    """The rules between a decoder of megatron-core and our model of this configuration."""
    rows = partial(_first_rows, config.vocab_size)
    tied = ("output_layer.weight",) if config.tie_embeddings else ()
    rules = [_into("embedding.word.weight", "embedding.word_embeddings.weight", rows, tied)]
    if config.position_embedding == "learned":
        rules.append(same("embedding.position", "embedding.position_embeddings.weight"))
    for number in range(config.num_layers):
        rules += _block_rules(number, config)
    rules += _norm_rules("head.norm", "decoder.final_layernorm", config)
    if not config.tie_embeddings:
        rules.append(_into("head.weight", "output_layer.weight", rows))
    return WeightMap(tuple(rules), ignored=r"rotary_pos_emb\.inv_freq$", prefix="", label="Megatron tensors")


def _block_rules(number: int, config: TransformerConfig) -> list[Rule]:
    native, foreign = f"layers.{number}.", f"{LAYERS}{number}."
    kinds = ("weight", "bias") if config.add_bias_linear else ("weight",)
    rules = _norm_rules(f"{native}attention_norm", f"{foreign}input_layernorm", config)
    for kind in kinds:
        rules.append(same(f"{native}attention.qkv.{kind}", f"{foreign}self_attention.linear_qkv.{kind}"))
        rules.append(same(f"{native}attention.out.{kind}", f"{foreign}self_attention.linear_proj.{kind}"))
    rules += _norm_rules(f"{native}mlp_norm", f"{foreign}pre_mlp_layernorm", config)
    gates = 2 if config.activation == "swiglu" else 1
    if config.has_experts(number):
        experts = [f"{foreign}mlp.experts.{e}." for e in range(config.num_experts)]
        rules.append(same(f"{native}mlp.router.weight", f"{foreign}mlp.router.weight"))
        for fc, parts in (("fc1", gates), ("fc2", 1)):
            matrices = tuple(f"{expert}linear_{fc}.weight" for expert in experts)
            rules.append(Rule(f"{native}mlp.experts.{fc}", matrices, partial(_stack, parts), _one_way))
        return rules
    for kind in kinds:
        rules.append(_into(f"{native}mlp.fc1.{kind}", f"{foreign}mlp.linear_fc1.{kind}", partial(_stack_rows, gates)))
        rules.append(same(f"{native}mlp.fc2.{kind}", f"{foreign}mlp.linear_fc2.{kind}"))
    return rules


def _norm_rules(native: str, foreign: str, config: TransformerConfig) -> list[Rule]:
    kinds = ("weight",) if config.norm == "rmsnorm" else ("weight", "bias")
    return [same(f"{native}.{kind}", f"{foreign}.{kind}") for kind in kinds]


def _into(native: str, foreign: str, join: object, repeats: tuple[str, ...] = ()) -> Rule:
    return Rule(native, (foreign,), join, _one_way, repeats)  # type: ignore[arg-type]


def _one_way(x: Tensor) -> tuple[Tensor, ...]:
    raise NotImplementedError("checkpoints of Megatron are read, and not written")


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
