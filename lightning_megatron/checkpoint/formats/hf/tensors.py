"""Rules between the tensors of a Hugging Face model and ours, from a family's data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from itertools import groupby

from torch import Tensor

from lightning_megatron.checkpoint.formats.weight_map import (
    WeightMap,
    WeightRule,
    fused_groups,
    fused_kv,
    fused_qkv,
    interleaved_experts,
    paired,
    same,
    stacked,
    transposed,
    uncut,
)
from lightning_megatron.config.counts import GATED
from lightning_megatron.config.hugging_face.family import Family
from lightning_megatron.config.hugging_face.tensors import (
    COLUMNS_OF_QKV,
    GROUPED,
    INTERLEAVED,
    INTERLEAVED_COLUMNS,
    KV,
    PAIRED_END,
    PAIRED_HEADS,
    QKV,
    STACKED,
    TRANSPOSED,
    TensorRule,
)
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, raise_if_any


def weight_map(family: Family, config: TransformerConfig, shapes: Mapping[str, tuple[int, ...]]) -> WeightMap:
    """Rules that convert weights between a Hugging Face model of the family and ours.

    ``shapes`` are those of all its weights, by global name.

    Raises:
        ConfigError: naming parameters for which the family has no tensors.
    """
    rules = tuple(_rule(data, config, shapes[data.native]) for data in whole_rules(family, config, shapes.keys()))
    without = shapes.keys() - {rule.native for rule in rules}
    raise_if_any([Problem("parameter", name, f"{family.architecture} has no such tensor") for name in sorted(without)])
    return WeightMap(rules, family.tensors.ignored, family.tensors.prefix, heads=family.tensors.heads)


def row_rule(data: TensorRule, config: TransformerConfig) -> WeightRule:
    """Rule for a tensor that has one row per row of a matrix (LoRA's ``B``), ``[out, ...]`` in both programs.

    Args:
        data: rule of a matrix that one foreign tensor holds, or one per expert.
    """
    if data.kind in (QKV, COLUMNS_OF_QKV) and len(data.foreign) == 1:
        return fused_qkv(data.native, data.foreign, config.num_attention_heads, config.num_query_groups)
    if data.kind in (GROUPED, PAIRED_HEADS, PAIRED_END):
        return _rule(data, config, ())
    return same(data.native, data.foreign[0])


def whole_rules(family: Family, config: TransformerConfig, names: Set[str]) -> Iterator[TensorRule]:
    """The rules of a family, with full names, for the weights that the model has, by their global ``names``.

    Adjacent rules with a layer number are expanded layer by layer.
    """
    has_gates = config.activation in GATED
    fitting = (template for template in family.tensors.rules if template.gated in (None, has_gates))
    for (prefix, stack), neighbours in groupby(fitting, lambda each: (_before_the_number(each), each.stack)):
        some, layers = list(neighbours), config.stacks.get(stack, range(0))
        for number in range(1) if prefix is None else layers:
            for template in some:
                for kind in ("weight", "bias") if "{kind}" in template.native else ("",):
                    native = template.native.format(n=number, kind=kind)
                    if native in names:
                        foreign = tuple(_foreign(template, number - layers.start, kind, config))
                        yield replace(template, native=native, foreign=foreign)


def _before_the_number(template: TensorRule) -> str | None:
    return template.native.partition("{n}")[0] if "{n}" in template.native else None


def _foreign(template: TensorRule, number: int, kind: str, config: TransformerConfig) -> Iterator[str]:
    with_experts = any("{e}" in name for name in template.foreign)
    for expert in range(config.num_experts) if with_experts else [0]:
        for name in template.foreign:
            yield name.format(n=number, e=expert, kind=kind, after=config.num_layers + number)


def _rule(data: TensorRule, config: TransformerConfig, shape: tuple[int, ...]) -> WeightRule:
    if data.kind == KV:
        return fused_kv(data.native, data.foreign, config.num_query_groups)
    if data.kind == TRANSPOSED:
        return transposed(data.native, *data.foreign)
    if data.kind == STACKED:
        lead = 1 if shape[0] == len(data.foreign) else 2  # parts, or experts; or both
        return stacked(data.native, *data.foreign, lead=shape[:lead])
    if data.kind in (QKV, COLUMNS_OF_QKV):
        rule = fused_qkv(data.native, data.foreign, config.num_attention_heads, config.num_query_groups)
        return _of_columns(rule) if data.kind == COLUMNS_OF_QKV else rule
    if data.groups is not None:
        return fused_groups(data.native, data.foreign, *data.groups(config))
    if data.kind in (INTERLEAVED, INTERLEAVED_COLUMNS):
        rule = interleaved_experts(data.native, *data.foreign)
        return _of_columns(rule) if data.kind == INTERLEAVED_COLUMNS else rule
    if data.kind in (PAIRED_HEADS, PAIRED_END):
        heads = config.num_attention_heads if data.kind == PAIRED_HEADS else 1
        return paired(data.native, *data.foreign, heads=heads, turned=config.rotary_dim)
    repeats = _repeats(data, config)
    return replace(same(data.native, *data.foreign, *repeats, *data.repeats), otherwise=data.otherwise)


def _repeats(data: TensorRule, config: TransformerConfig) -> list[str]:
    """Further names of a tensor that this model has twice."""
    found = [data.tied] if data.tied and config.tie_embeddings else []
    if data.copied:
        found += [data.copied.format(after=config.num_layers + depth) for depth in range(config.mtp_num_layers)]
    return found


def _of_columns(rule: WeightRule) -> WeightRule:
    """The same rule for a foreign matrix, or one per expert, that is stored as ``[in, out]``."""

    def split(x: Tensor) -> tuple[Tensor]:
        (rows,) = rule.split(x)
        return (rows.mT.contiguous(),)

    return replace(rule, join=lambda x: rule.join(x.mT), split=split, cut=uncut)
