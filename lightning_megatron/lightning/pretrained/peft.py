"""Adapters in PEFT's files, ``adapter_config.json`` and ``adapter_model.safetensors``, to and from ours."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.adapters.lora import LoRA
from lightning_megatron.adapters.targets import EMBEDDING, AdaptedLayer, Part
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.directory.atomic_dir import discard, prepare, publish
from lightning_megatron.checkpoint.formats.hf.directory import ADAPTER, read_json_object
from lightning_megatron.checkpoint.formats.hf.tensors import row_rule
from lightning_megatron.checkpoint.formats.safetensors_file import read_lazily
from lightning_megatron.checkpoint.formats.weight_map import WeightMap, WeightRule, same, stacked, transposed
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.config.hugging_face.tensors import TRANSPOSED
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.files.durable import sync_file
from lightning_megatron.files.writing import writing
from lightning_megatron.lightning.pretrained.convert import refuse_existing
from lightning_megatron.lightning.pretrained.parameter_specs import weight_shapes

CONFIG, WEIGHTS = ADAPTER, "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FROZEN = r"(base_layer|embed_tokens|lm_head|wte|word_embeddings)\.weight$"
"""PEFT copies the frozen weights of embeddings that have adapters, and loads the copies over the base's."""

_NEEDED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "exclude_modules": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),  # others change the base weights, too
}
"""Entries of ``adapter_config.json``, and the values that adapters here support."""

_READ = {"r", "lora_alpha", "lora_dropout", "target_modules", "use_dora", "use_rslora"}
_PASSIVE = re.compile(
    "auto_mapping|base_model_name_or_path|(corda|eva|loftq|lora_ga|runtime)_config|fan_in_fan_out|inference_mode"
    "|layers_pattern|megatron_core|peft_version|qalora_group_size|revision|task_type"
)
"""Entries that change no number of an adapter that has been trained, or only beside another entry."""

_Shapes = Mapping[str, tuple[int, ...]]


def read_peft_settings(path: str | os.PathLike[str]) -> LoRA:
    """The settings of a directory of PEFT's.

    Raises:
        CheckpointError: if there is none.
        ConfigError: naming every setting that adapters here do not support.
    """
    file = Path(path) / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{os.fspath(path)} is no directory of PEFT's: it has no {CONFIG}")
    given = read_json_object(file)
    found = [
        Problem(name, given[name], f"{file}: adapters here do not support it", able[:1])
        for name, able in _NEEDED.items()
        if given.get(name, able[0]) not in able
    ]
    found += [
        Problem(name, value, f"{file}: nothing here reads it, and it may change what the adapter computes", (None,))
        for name, value in given.items()
        if name not in _READ | _NEEDED.keys() and not _PASSIVE.fullmatch(name) and value not in (None, False, [], {})
    ]
    targets = given.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        reason = f"{file}: a pattern; write the names of modules that it stands for as a list"
        found.append(Problem("target_modules", targets, reason))
    raise_if_any(found)
    dora = bool(given.get("use_dora"))
    return LoRA(
        rank=given.get("r", 8),
        alpha=float(given.get("lora_alpha", 8)),
        targets=targets if isinstance(targets, str) else sorted(targets or ()),
        dropout=0.0 if dora else float(given.get("lora_dropout", 0.0)),
        dora=dora,
        rslora=bool(given.get("use_rslora")),
    )


def peft_settings(lora: LoRA, plan: Sequence[AdaptedLayer], base: str) -> dict[str, Any]:
    """Contents of ``adapter_config.json`` for an adapter that changes the layers of a plan; ``base`` is a path."""
    names = sorted({part.name for layer in plan for part in layer.parts if part.is_target})
    targets = names if "all-linear" in lora.names else list(lora.names)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
        "bias": "none",
        "fan_in_fan_out": any(layer.rule.kind in (TRANSPOSED, "columns of qkv") for layer in plan),
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def adapter_map(plan: Sequence[AdaptedLayer], config: TransformerConfig, lora: LoRA, name: str) -> WeightMap:
    """The rules between an adapter's tensors in PEFT's file and ours, by names inside the model."""
    rules = [
        rule for layer in plan for part in layer.parts if part.is_target for rule in _rules(layer, part, config, name)
    ]
    kept = [rule for rule in rules if lora.dora or not rule.native.endswith("lora_magnitude")]
    return WeightMap(tuple(kept), _FROZEN, _PREFIX, "PEFT's tensors", _PREFIX)


def _rules(layer: AdaptedLayer, part: Part, config: TransformerConfig, name: str) -> Iterator[WeightRule]:
    native = f"{native_prefix(layer, part, name)}."
    modules = [_PREFIX + module for module in part.modules]
    if layer.name == EMBEDDING:
        yield transposed(native + "lora_A", f"{modules[0]}.lora_embedding_A")
        yield same(native + "lora_B", f"{modules[0]}.lora_embedding_B")
        yield same(native + "lora_magnitude", f"{modules[0]}.lora_magnitude_vector")
        return
    if layer.is_of_experts:
        for which in ("lora_A", "lora_B"):
            yield stacked(native + which, *(f"{module}.{which}.weight" for module in modules))
        return
    yield same(native + "lora_A", f"{modules[0]}.lora_A.weight")
    for which, foreign in (("lora_B", ".lora_B.weight"), ("lora_magnitude", ".lora_magnitude_vector")):
        data = replace(layer.rule, native=native + which, foreign=(modules[0] + foreign,))
        yield same(data.native, data.foreign[0]) if len(layer.parts) > 1 else row_rule(data, config)


def native_prefix(layer: AdaptedLayer, part: Part, name: str) -> str:
    """Beginning of the names of a part's parameters inside the model."""
    return f"{layer.name}.lora.{name}.{part.name}"


def adapter_shapes(
    plan: Sequence[AdaptedLayer], config: TransformerConfig, lora: LoRA, name: str
) -> dict[str, tuple[int, ...]]:
    """Shapes of an adapter's whole tensors by names inside the model."""
    shapes = weight_shapes(config)
    found: dict[str, tuple[int, ...]] = {}
    for layer in plan:
        whole = shapes[layer.rule.native]
        experts = whole[:1] if layer.is_of_experts else ()
        for part in (part for part in layer.parts if part.is_target):
            out, native = part.width * layer.groups, native_prefix(layer, part, name)
            a: tuple[int, ...] = (*experts, lora.rank, whole[-1])
            if layer.name == EMBEDDING:
                a, out = (whole[0], lora.rank), whole[1]
            found |= {f"{native}.lora_A": a, f"{native}.lora_B": (*experts, out, lora.rank)}
            if lora.dora:
                found[f"{native}.lora_magnitude"] = (out,)
    return found


def read_adapter(path: str | os.PathLike[str], rules: WeightMap, shapes: _Shapes) -> dict[str, LazyTensor]:
    """The tensors of a directory of PEFT's by our names.

    Raises:
        CheckpointError: naming tensors of another shape, or if there is no such file.
        ConfigError: naming tensors that are missing, or that the model has no place for.
    """
    file = Path(path) / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{os.fspath(path)} has no {WEIGHTS}")
    suffix = "_magnitude_vector"  # older versions of PEFT append a word
    foreign = {name.replace(f"{suffix}.weight", suffix): tensor for name, tensor in read_lazily(file).items()}
    return rules.to_native(foreign, shapes)


def refuse_other_frozen(path: str | os.PathLike[str], base: Mapping[str, LazyTensor]) -> None:
    """Refuse copies of frozen weights that are not those of the base, such as of a larger vocabulary.

    Args:
        path: directory of PEFT's.
        base: tensors of the base model's directory by their names.

    Raises:
        CheckpointError: naming every copy with other values.
    """
    file = Path(path) / WEIGHTS
    copies = {name: copy for name, copy in read_lazily(file).items() if re.search(_FROZEN, name)}
    if other := [name for name, copy in copies.items() if not any(map(partial(_same, copy), _frozen(name, base)))]:
        told = ", ".join(f"{name} {copies[name].shape}" for name in other)
        raise CheckpointError(
            f"{file}: PEFT replaces weights of the base by {told}, which differ. This package does not replace them"
        )


def _frozen(name: str, base: Mapping[str, LazyTensor]) -> list[LazyTensor]:
    """Tensors of the base that a copy may be of; an output layer without a tensor is tied to the embedding."""
    plain = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
    named = [tensor for there, tensor in base.items() if plain.endswith(there) or there.endswith(plain)]
    return named or [tensor for there, tensor in base.items() if re.search(_FROZEN, there)]


def _same(copy: LazyTensor, tensor: LazyTensor) -> bool:
    """True if two tensors are equal, or one is the other in another dtype."""
    if copy.shape != tensor.shape:
        return False
    a, b = copy.materialize(), tensor.materialize()
    return bool(torch.equal(a.to(b.dtype), b) or torch.equal(a, b.to(a.dtype)))


def write_adapter(path: str | os.PathLike[str], settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a directory of PEFT's; it gets its name once it is complete and on the disk.

    Raises:
        CheckpointError: if something has the name already.
    """
    from safetensors.torch import save_file

    path = Path(path)
    refuse_existing(path)
    directory = prepare(path)
    try:
        for file in (directory / CONFIG, directory / WEIGHTS):
            with writing(file):
                if file.name == CONFIG:
                    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
                else:
                    save_file({name: value.contiguous() for name, value in tensors.items()}, file, {"format": "pt"})
                sync_file(file)
        publish(directory, path)
    except BaseException:
        discard(directory)
        raise
