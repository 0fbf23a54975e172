"""Between Megatron's tensors, whole and in one spelling, and ours: mostly another name.

Both fuse queries, keys and values by query group, so attention carries over as it is. Of a vocabulary Megatron stores
the padding, and of gates and ups one matrix.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.checkpoint.formats.megatron.names import LAYERS
from lightning_megatron.checkpoint.formats.weight_map import Rule, WeightMap, same


class MegatronShape(Protocol):
    """What the rules must know of a model; ``TransformerConfig`` is one."""

    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def norm(self) -> str: ...  # noqa: D102
    @property
    def activation(self) -> str: ...  # noqa: D102
    @property
    def position_embedding(self) -> str: ...  # noqa: D102
    @property
    def add_bias_linear(self) -> bool: ...  # noqa: D102
    @property
    def tie_embeddings(self) -> bool: ...  # noqa: D102
    @property
    def num_experts(self) -> int: ...  # noqa: D102
    def has_experts(self, layer: int) -> bool: ...  # noqa: D102


def weight_map(shape: MegatronShape) -> WeightMap:
    """The rules between a decoder of megatron-core and our model of this shape."""
    rows = partial(_first_rows, shape.vocab_size)
    tied = ("output_layer.weight",) if shape.tie_embeddings else ()
    rules = [_into("embedding.word.weight", "embedding.word_embeddings.weight", rows, tied)]
    if shape.position_embedding == "learned":
        rules.append(same("embedding.position", "embedding.position_embeddings.weight"))
    for number in range(shape.num_layers):
        rules += _block_rules(number, shape)
    rules += _norm_rules("head.norm", "decoder.final_layernorm", shape)
    if not shape.tie_embeddings:
        rules.append(_into("head.weight", "output_layer.weight", rows))
    return WeightMap(tuple(rules), ignored=r"rotary_pos_emb\.inv_freq$", prefix="", theirs="Megatron tensors")


def _block_rules(number: int, shape: MegatronShape) -> list[Rule]:
    ours, theirs = f"layers.{number}.", f"{LAYERS}{number}."
    kinds = ("weight", "bias") if shape.add_bias_linear else ("weight",)
    rules = _norm_rules(f"{ours}attention_norm", f"{theirs}input_layernorm", shape)
    for kind in kinds:
        rules.append(same(f"{ours}attention.qkv.{kind}", f"{theirs}self_attention.linear_qkv.{kind}"))
        rules.append(same(f"{ours}attention.out.{kind}", f"{theirs}self_attention.linear_proj.{kind}"))
    rules += _norm_rules(f"{ours}mlp_norm", f"{theirs}pre_mlp_layernorm", shape)
    gates = 2 if shape.activation == "swiglu" else 1
    if shape.has_experts(number):
        experts = [f"{theirs}mlp.experts.{e}." for e in range(shape.num_experts)]
        rules.append(same(f"{ours}mlp.router.weight", f"{theirs}mlp.router.weight"))
        for fc, parts in (("fc1", gates), ("fc2", 1)):
            matrices = tuple(f"{expert}linear_{fc}.weight" for expert in experts)
            rules.append(Rule(f"{ours}mlp.experts.{fc}", matrices, partial(_stack, parts), _one_way))
        return rules
    for kind in kinds:
        rules.append(_into(f"{ours}mlp.fc1.{kind}", f"{theirs}mlp.linear_fc1.{kind}", partial(_stack_rows, gates)))
        rules.append(same(f"{ours}mlp.fc2.{kind}", f"{theirs}mlp.linear_fc2.{kind}"))
    return rules


def _norm_rules(ours: str, theirs: str, shape: MegatronShape) -> list[Rule]:
    kinds = ("weight",) if shape.norm == "rmsnorm" else ("weight", "bias")
    return [same(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in kinds]


def _into(ours: str, theirs: str, join: object, repeats: tuple[str, ...] = ()) -> Rule:
    return Rule(ours, (theirs,), join, _one_way, repeats)  # type: ignore[arg-type]


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
