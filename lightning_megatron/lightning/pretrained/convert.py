"""Conversion of other programs' directories to checkpoints and back, tensor by tensor, without building a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from lightning_megatron.checkpoint import CheckpointError, save
from lightning_megatron.checkpoint.formats.hf.settings import (
    GENERATION,
    SETTINGS,
    TOKEN_IDS,
    Settings,
    read_settings,
    tokenizer_files,
    with_settings,
)
from lightning_megatron.checkpoint.formats.hf.tensors import weight_map
from lightning_megatron.checkpoint.formats.hf.write import write_hf
from lightning_megatron.checkpoint.formats.megatron import open_megatron
from lightning_megatron.checkpoint.loading import OpenCheckpoint, open_checkpoint
from lightning_megatron.checkpoint.tensors.keys import model_key
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor, in_dtype
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import DataError, raise_if_any
from lightning_megatron.families import family_for
from lightning_megatron.files import PathLike
from lightning_megatron.lightning.pretrained.config_check import refuse_unfilled_checkpoint
from lightning_megatron.lightning.pretrained.hugging_face import open_hf
from lightning_megatron.lightning.pretrained.imported_run import IMPORTED_FROM, fresh_run
from lightning_megatron.lightning.pretrained.megatron import megatron_config, megatron_tensors
from lightning_megatron.lightning.pretrained.parameter_specs import weight_shapes
from lightning_megatron.lightning.pretrained.trained_tokenizer import TrainedTokenizer, directory_spec
from lightning_megatron.lightning.pretrained.tuned_chat import TunedChat
from lightning_megatron.lightning.run_state.hyper_parameters import config_of
from lightning_megatron.mesh import ParallelMesh

T = TypeVar("T")

_PREFIX = model_key("model.")  # the checkpoint's model, and the attribute of GPTModule that holds it


def hf_to_checkpoint(source: PathLike, target: PathLike, *, dtype: torch.dtype | None = None) -> None:
    """Convert a Hugging Face directory to a checkpoint that begins a run, without optimizer state.

    Args:
        source: the directory.
        target: the checkpoint to make.
        dtype: dtype of its tensors; ``None`` for that of the files. Loading converts to the module's in any case.

    Raises:
        CheckpointError: naming files and tensors at fault, or if ``target`` exists.
        ConfigError: for a model that ours cannot reproduce.
    """
    refuse_existing(target)
    config, tensors = open_hf(source)
    save_imported(target, tensors, {"config": asdict(config)}, source, read_settings(source), dtype)


def megatron_to_checkpoint(
    source: PathLike,
    target: PathLike,
    *,
    config: TransformerConfig | None = None,
    allow_pickle: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Convert a checkpoint of Megatron's to one that begins a run, without optimizer state.

    Args:
        source: the folder that Megatron saved to, or that of one iteration; formats ``torch_dist`` and ``torch``.
        target: the checkpoint to make.
        config: the model's configuration; ``None`` reads it from Megatron's command line, which needs ``allow_pickle``.
        allow_pickle: True to read files that hold objects, as all of the format ``torch`` do; nothing in them is run.
        dtype: dtype of its tensors; ``None`` for that of the files.

    Raises:
        CheckpointError: naming files and tensors at fault, or if ``target`` exists.
        ConfigError: for a model that ours cannot reproduce, or that is not known.
    """
    refuse_existing(target)
    checkpoint = open_megatron(source, allow_pickle=allow_pickle)
    config = config or megatron_config(checkpoint, source)
    tensors = megatron_tensors(checkpoint, config)
    save_imported(target, tensors, {"config": asdict(config)}, source, read_settings(source), dtype)


def refuse_existing(target: PathLike) -> None:
    """Raise a ``CheckpointError`` if something has the name already."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already: remove it or give another name")


def save_imported(
    target: PathLike,
    tensors: Mapping[str, LazyTensor],
    hyper_parameters: Mapping[str, Any],
    source: PathLike,
    settings: Settings,
    dtype: torch.dtype | None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Save a checkpoint that begins a run, with tensors of ``source`` by their names inside the model.

    The settings are those of the Hugging Face directory of the weights; ``more`` are entries of Lightning's dictionary.
    """
    state = {_PREFIX + name: tensor for name, tensor in in_dtype(tensors, dtype).items()}
    meta = fresh_run(hyper_parameters) | {IMPORTED_FROM: os.fspath(source), SETTINGS: settings} | dict(more or {})
    save(target, state, meta, ParallelMesh.single())


def inside_model(tensors: Mapping[str, T]) -> dict[str, T]:
    """Tensors of a checkpoint's model, by their names inside of it."""
    return {key.removeprefix(_PREFIX): value for key, value in tensors.items() if key.startswith(_PREFIX)}


@dataclass(frozen=True)
class Exported:
    """The contents of an exported directory beside the weights.

    Attributes:
        token_ids: ``bos_token_id``, ``eos_token_id``, ``pad_token_id``, as far as they are known.
        generation: True if there is a ``generation_config.json``.
        tokenizer: names of the tokenizer's files.
    """

    token_ids: Mapping[str, Any]
    generation: bool
    tokenizer: tuple[str, ...]

    def __str__(self) -> str:
        ids = ", ".join(f"{name}={value}" for name, value in self.token_ids.items())
        there = ["weights", f"config.json ({ids or 'no ids of special tokens: none are known'})"]
        parts = ((self.generation, GENERATION), (bool(self.tokenizer), "tokenizer"))
        there += [name for is_there, name in parts if is_there]
        missing = [name for is_there, name in parts if not is_there]
        if not missing:
            return ", ".join(there)
        advice = "" if self.tokenizer else " (--tokenizer HF_DIR copies one)"
        return f"{', '.join(there)}; no {', no '.join(missing)}{advice}"


def checkpoint_to_hf(
    source: PathLike,
    target: PathLike,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
    tokenizer: PathLike | None = None,
    allow_other_tokenizer: bool = False,
) -> Exported:
    """Convert a checkpoint, saved under any layout, to a directory that transformers reads.

    Special tokens and generation settings are those of the Hugging Face directory that the run began with, or, if there
    was none, those of ``tokenizer``. A model that was tuned on chats keeps the template that it was tuned on, and the
    token that ended its answers ends generation.

    Args:
        source: the checkpoint of a :class:`GPTModule`.
        target: the directory to make.
        dtype: dtype of its tensors; ``None`` for that of the checkpoint.
        max_shard_size: bytes of one file at most.
        tokenizer: directory whose tokenizer is copied, with its chat templates; ``None`` for none.
        allow_other_tokenizer: True to copy one that seems to differ from that which the model was trained with.

    Returns:
        The contents of the directory beside the weights.

    Raises:
        CheckpointError: if the checkpoint is damaged or is not of such a module, if ``tokenizer`` holds none, or if
            ``target`` exists.
        ConfigError: naming what transformers cannot compute, or another tokenizer than the model was trained with.
    """
    opened = open_checkpoint(source)
    tensors = opened.tensors()
    config = _config_of(opened)
    if tokenizer is not None and not allow_other_tokenizer:
        _refuse_other_tokenizer(tokenizer, opened)
    settings: Settings = opened.meta.get(SETTINGS) or ({} if tokenizer is None else read_settings(tokenizer))
    family, written = family_for(config, settings.get("config", {}).get("model_type"))
    chat = TunedChat.of_checkpoint(opened.meta)
    contents = chat.with_end(with_settings(written, settings))
    copied = {} if tokenizer is None else chat.files(tokenizer_files(tokenizer))
    generated = settings.get("generation_config")
    generation = {} if generated is None else {GENERATION: chat.with_end(generated)}
    native = inside_model(tensors)
    rules = weight_map(family, config, weight_shapes(config))
    known = rules.native_names  # counters of a module (bins of capacities) have no counterpart in another program
    kept = {name: tensor for name, tensor in native.items() if name in known or tensor.dtype.is_floating_point}
    splits = rules.to_foreign(kept)
    write_hf(target, contents, splits, dtype=dtype, max_shard_size=max_shard_size, beside=copied | generation)
    ids = {name: contents[name] for name in TOKEN_IDS if contents.get(name) is not None}
    return Exported(ids, bool(generation), tuple(copied))


def _refuse_other_tokenizer(tokenizer: PathLike, source: OpenCheckpoint) -> None:
    """Raise if a directory's tokenizer differs from a checkpoint's; kinds that cannot be read here are not compared."""
    if (spec := directory_spec(tokenizer)) is not None:
        do = "or add --allow-other-tokenizer"
        with suppress(DataError, ModuleNotFoundError):
            raise_if_any(TrainedTokenizer.of_weights(source).problems("tokenizer", spec, do))


def _config_of(opened: OpenCheckpoint) -> TransformerConfig:
    arguments = opened.meta.get("hyper_parameters") or {}
    config = config_of(arguments)
    if config is None:
        raise CheckpointError(f"{opened} is no checkpoint of a GPTModule: it holds no configuration of a transformer")
    if arguments.get("lora"):
        raise CheckpointError(
            f"{opened} holds adapters: `lightning-megatron convert merge` puts one into its weights, ckpt-to-peft"
            " writes it for PEFT"
        )
    refuse_unfilled_checkpoint(opened)
    return config
