"""Resolve an adapter's targets: from Hugging Face module names to our layers and the parts of their fused matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lightning_megatron.adapters.lora import ALL_LINEAR, LoRA
from lightning_megatron.checkpoint.formats.hf.tensors import whole_rules
from lightning_megatron.config.hugging_face.family import Family
from lightning_megatron.config.hugging_face.tensors import QKV, STACKED, TensorRule
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, nearest_names, raise_if_any

EMBEDDING, HEAD = "embedding.word", "head"
_EXPERTS = ".experts"
_WEIGHT = ".weight"


@dataclass(frozen=True)
class Part:
    """A linear layer of the Hugging Face model: the whole of one of our matrices, or some of its rows.

    Attributes:
        name: last component of its name, used in the names of parameters.
        modules: its full name; for experts, one name per expert.
        width: number of its rows in each group of the matrix.
        is_target: True if it gets an adapter.
    """

    name: str
    modules: tuple[str, ...]
    width: int
    is_target: bool = False


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer of our model that can have adapters.

    Attributes:
        name: global name of the layer.
        weight: name of its matrix inside the layer.
        rule: rule that maps the matrix to Hugging Face's tensors.
        parts: Hugging Face's linear layers in the matrix, in the order of its rows.
        groups: number of groups of rows; each has rows of every part.
    """

    name: str
    weight: str
    rule: TensorRule
    parts: tuple[Part, ...]
    groups: int = 1

    @property
    def is_of_experts(self) -> bool:
        """True for a matrix of the routed experts."""
        return self.name.endswith(_EXPERTS)


def adapted_layers(
    family: Family, config: TransformerConfig, lora: LoRA, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[AdaptedLayer, ...]:
    """The layers of a whole model that an adapter changes, in the model's order.

    The shapes are those of all weights of the model, by global name.

    Raises:
        ConfigError: naming every target that the model does not have, and settings that experts do not support.
    """
    layers = list(_layers(family, config, shapes))
    found = _unknown(family, layers, lora)
    chosen = []
    for layer in layers:
        parts = tuple(replace(part, is_target=_is_target(layer, part, lora)) for part in layer.parts)
        if any(part.is_target for part in parts):
            chosen.append(replace(layer, parts=parts))
    if any(layer.is_of_experts for layer in chosen):
        found += _of_experts(lora)
    raise_if_any(found)
    return tuple(chosen)


def _layers(family: Family, config: TransformerConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[AdaptedLayer]:
    """Every matrix that is a linear layer, or the token embedding, in the Hugging Face model."""
    for rule in whole_rules(family, config, shapes.keys()):
        name, _, weight = rule.native.rpartition(".")
        is_matrix = weight == "weight" or name.endswith(_EXPERTS)
        has_modules = rule.foreign[0].endswith(_WEIGHT) and not name.startswith("mtp")
        if is_matrix and has_modules and len(shapes[rule.native]) > 1 and not name.endswith(".router"):
            yield _layer(name, weight, rule, config, shapes[rule.native])
    tied = next((rule for rule in family.tensors.rules if rule.native == f"{EMBEDDING}.weight" and rule.tied), None)
    if config.tie_embeddings and tied is not None and tied.tied is not None:
        head = Part(_last(tied.tied), (tied.tied.removesuffix(_WEIGHT),), config.vocab_size)
        yield AdaptedLayer(HEAD, "weight", tied, (head,))


def _layer(name: str, weight: str, rule: TensorRule, config: TransformerConfig, shape: tuple[int, ...]) -> AdaptedLayer:
    modules = tuple(each.removesuffix(_WEIGHT) for each in rule.foreign)
    if rule.kind == QKV and len(modules) == 3:
        groups, head = config.num_query_groups, config.head_dim
        widths = (config.num_attention_heads // groups * head, head, head)
        parts = tuple(Part(_last(each), (each,), width) for each, width in zip(modules, widths, strict=True))
        return AdaptedLayer(name, weight, rule, parts, groups)
    if rule.groups is not None and len(modules) > 1:
        count, rows = rule.groups(config)
        parts = tuple(Part(_last(each), (each,), width) for each, width in zip(modules, rows, strict=True))
        return AdaptedLayer(name, weight, rule, parts, count)
    if rule.kind == STACKED:
        count = len(modules) // config.num_experts if name.endswith(_EXPERTS) else len(modules)
        parts = tuple(Part(_last(modules[i]), modules[i::count], shape[-2]) for i in range(count))
        return AdaptedLayer(name, weight, rule, parts)
    assert len(modules) == 1, f"{rule.native} is made of {modules}"
    return AdaptedLayer(name, weight, rule, (Part(_last(modules[0]), modules, shape[-2]),))


def _last(name: str) -> str:
    return name.removesuffix(_WEIGHT).rpartition(".")[2]


def _is_target(layer: AdaptedLayer, part: Part, lora: LoRA) -> bool:
    if ALL_LINEAR in lora.names and layer.name not in (EMBEDDING, HEAD):
        return True
    return any(_matches(module, target) for module in part.modules for target in lora.names)


def _matches(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _unknown(family: Family, layers: list[AdaptedLayer], lora: LoRA) -> list[Problem]:
    modules = [module for layer in layers for part in layer.parts for module in part.modules]
    words = list(dict.fromkeys(_last(module) for module in modules))
    found = []
    for target in lora.names:
        if target != ALL_LINEAR and not any(_matches(module, target) for module in modules):
            near = nearest_names(_last(target), words)[:3]
            reason = f"{family.architecture} has no linear layer of this name, but {', '.join(words)}"
            found.append(Problem("targets", target, reason, near))
    return found


def _of_experts(lora: LoRA) -> list[Problem]:
    found = []
    if lora.dora:
        reason = "experts do not support DoRA, as in PEFT: leave their layers out of targets"
        found.append(Problem("dora", True, reason, (False,)))
    if lora.dropout:
        reason = "adapters of experts do not support dropout, as in PEFT: leave their layers out of targets"
        found.append(Problem("dropout", lora.dropout, reason, (0.0,)))
    return found
