"""Conversion of adapters: checkpoints to PEFT's files and back, and into the weights that they were trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.adapters.lora import LoRA
from lightning_megatron.adapters.low_rank import Matrices
from lightning_megatron.adapters.merge import merged_weight
from lightning_megatron.adapters.targets import EMBEDDING, HEAD, AdaptedLayer, adapted_layers
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.formats.hf.directory import is_hf_directory, read_tensors
from lightning_megatron.checkpoint.formats.hf.settings import SETTINGS, read_settings
from lightning_megatron.checkpoint.loading import open_checkpoint
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor, cast
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, nearest_names, raise_if_any
from lightning_megatron.families import family_for
from lightning_megatron.files import PathLike
from lightning_megatron.lightning.pretrained import peft
from lightning_megatron.lightning.pretrained.adapter_base import ADAPTER_OF, base_of, path_of_base
from lightning_megatron.lightning.pretrained.convert import inside_model, refuse_existing, save_imported
from lightning_megatron.lightning.pretrained.hugging_face import checked_hf_config, open_hf
from lightning_megatron.lightning.pretrained.parameter_specs import weight_shapes
from lightning_megatron.lightning.pretrained.tuned_chat import TunedChat
from lightning_megatron.lightning.run_state.hyper_parameters import config_of
from lightning_megatron.mesh import ParallelMesh

_DEFAULT = "default"


class _Opened:
    """An adapter of a checkpoint, by its name; ``None`` for the only one.

    Raises:
        CheckpointError: if the checkpoint has no adapter.
        ConfigError: if it has none of this name.
    """

    def __init__(self, path: PathLike, name: str | None) -> None:
        opened = open_checkpoint(path)
        self.meta, tensors = opened.meta, opened.tensors()
        arguments = self.meta.get("hyper_parameters") or {}
        config, adapters = config_of(arguments), arguments.get("lora") or {}
        if config is None or not adapters:
            raise CheckpointError(f"{path} is no checkpoint of a module with adapters (lora=)")
        if name is None and len(adapters) > 1:
            reason = f"{path} has several: name one"
            raise_if_any([Problem("adapter", None, reason, tuple(adapters))])
        self.name = next(iter(adapters)) if name is None else name
        if self.name not in adapters:
            near = nearest_names(self.name, list(adapters))
            raise_if_any([Problem("adapter", self.name, f"{path} has no such adapter", near)])
        self.config, self.lora = config, LoRA(**adapters[self.name])
        self.plan = _plan(config, self.lora, self.meta.get(SETTINGS))
        names = peft.adapter_shapes(self.plan, config, self.lora, self.name)
        self.whole = inside_model(tensors)
        self.tensors = {name: self.whole[name] for name in names}


def _plan(config: TransformerConfig, lora: LoRA, settings: Mapping[str, Any] | None) -> tuple[AdaptedLayer, ...]:
    family, _ = family_for(config, ((settings or {}).get("config") or {}).get("model_type"))
    return adapted_layers(family, config, lora, weight_shapes(config))


def checkpoint_to_peft(
    source: PathLike, target: PathLike, *, adapter: str | None = None, dtype: torch.dtype | None = None
) -> tuple[str, ...]:
    """Convert an adapter of a checkpoint, saved under any layout, to a directory that PEFT reads.

    Args:
        source: the checkpoint.
        target: the directory to make.
        adapter: name of the adapter; ``None`` for the only one.
        dtype: dtype of its tensors; ``None`` for that of the checkpoint.

    Returns:
        Notes on what PEFT cannot read.

    Raises:
        CheckpointError: if the checkpoint is damaged or has no adapter, or if ``target`` exists.
        ConfigError: if it has none of this name.
    """
    opened = _Opened(source, adapter)
    rules = peft.adapter_map(opened.plan, opened.config, opened.lora, opened.name)
    splits = rules.to_foreign(opened.tensors)
    values = (pair for split in splits for pair in zip(split.tensors, split.materialize(), strict=True))
    tensors = {name: cast(name, value, dtype or value.dtype, values) for name, value in values}
    base = (opened.meta.get(ADAPTER_OF) or {}).get("path", "")
    peft.write_adapter(target, peft.peft_settings(opened.lora, opened.plan, base), tensors)
    return _notes(opened.plan)


def _notes(plan: tuple[AdaptedLayer, ...]) -> tuple[str, ...]:
    """Notes on adapters that PEFT does not find with transformers 5, where experts are no linear layers."""
    words = {part.name for layer in plan if layer.is_of_experts for part in layer.parts if part.is_target}
    alike = (layer for layer in plan if not layer.is_of_experts)
    lost = [m for layer in alike for part in layer.parts if part.is_target and part.name in words for m in part.modules]
    if not lost:
        return ()
    shown = ", ".join(lost[:2]) + (", ..." if len(lost) > 2 else "")
    return (
        f"note: with transformers 5 PEFT takes {', '.join(sorted(words))} for layers of experts, and passes over"
        f" {shown}: load it with transformers 4, or merge it",
    )


def peft_to_checkpoint(source: PathLike, target: PathLike, *, base: PathLike, dtype: torch.dtype | None = None) -> None:
    """Convert a directory of PEFT's to a checkpoint of the adapter that begins a run.

    Args:
        source: the directory.
        target: the checkpoint to make.
        base: Hugging Face directory of the weights that the adapter was trained on.
        dtype: dtype of its tensors; ``None`` for that of the file.

    Raises:
        CheckpointError: naming files and tensors at fault, or if ``target`` exists.
        ConfigError: for settings or layers that our adapters cannot have.
    """
    refuse_existing(target)
    lora, config = peft.read_peft_settings(source), checked_hf_config(base)
    settings = read_settings(base)
    plan = _plan(config, lora, settings)
    rules = peft.adapter_map(plan, config, lora, _DEFAULT)
    tensors = peft.read_adapter(source, rules, peft.adapter_shapes(plan, config, lora, _DEFAULT))
    peft.refuse_other_frozen(source, read_tensors(base))
    arguments = {"config": asdict(config), "lora": {_DEFAULT: lora.plain}}
    of_base = {ADAPTER_OF: base_of(base, ParallelMesh.single())}
    save_imported(target, tensors, arguments, source, settings, dtype, of_base)


def merge_adapter(
    source: PathLike,
    target: PathLike,
    *,
    base: PathLike | None = None,
    adapter: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Merge an adapter into the weights that it was trained on, as a checkpoint of a whole model.

    Args:
        source: checkpoint with the adapter.
        target: the checkpoint to make, which begins a run.
        base: path of the weights, if they have moved; ``None`` for the path in the checkpoint.
        adapter: name of the adapter; ``None`` for the only one.
        dtype: dtype of its tensors; ``None`` for that of the weights.

    Raises:
        CheckpointError: if the weights are not the adapter's, if files are damaged, or if ``target`` exists.
        ConfigError: for an adapter of one of two tied matrices.
    """
    refuse_existing(target)
    opened = _Opened(source, adapter)
    tied = (
        [layer.name for layer in opened.plan if layer.name in (EMBEDDING, HEAD)] if opened.config.tie_embeddings else []
    )
    reason = "embedding and output layer are one matrix in this model, and the adapter changes one of the two"
    raise_if_any([Problem("targets", name, reason) for name in tied])
    frozen, settings = _base_tensors(opened, source, base)
    tensors = dict(frozen)
    for layer in opened.plan:
        name = layer.rule.native
        tensors[name] = LazyTensor(
            frozen[name].shape, frozen[name].dtype, partial(_merged, layer, frozen[name], opened)
        )
    chat = TunedChat.of_checkpoint(opened.meta).entry
    save_imported(target, tensors, {"config": asdict(opened.config)}, source, settings, dtype, chat)


def _base_tensors(opened: _Opened, source: PathLike, given: PathLike | None) -> tuple[dict[str, LazyTensor], Any]:
    """The frozen weights by our names, and the settings of their directory."""
    path = path_of_base(source, opened.meta, given)
    if path is None:  # the checkpoint holds them
        found = {name: value for name, value in opened.whole.items() if ".lora." not in name}
        return found, opened.meta.get(SETTINGS) or {}
    said, there = opened.meta[ADAPTER_OF], base_of(path, ParallelMesh.single())
    if said["hash"] != there["hash"]:
        raise CheckpointError(
            f"{source} holds adapters of {said['path']} (weights {said['hash'][:12]}), and {there['path']} has others"
            f" (weights {there['hash'][:12]})"
        )
    if is_hf_directory(path):
        return open_hf(path, is_base=True)[1], read_settings(path)
    base = open_checkpoint(path)
    return inside_model(base.tensors()), base.meta.get(SETTINGS) or {}


def _merged(layer: AdaptedLayer, weight: LazyTensor, opened: _Opened) -> Tensor:
    parts = {}
    for part in (part for part in layer.parts if part.is_target):
        native = peft.native_prefix(layer, part, opened.name)
        names = (f"{native}.{which}" for which in ("lora_A", "lora_B", "lora_magnitude"))
        there = (opened.tensors[name].materialize() for name in names if name in opened.tensors)
        parts[part.name] = Matrices(*there)
    return merged_weight(weight.materialize(), layer, parts, opened.lora.scale)
