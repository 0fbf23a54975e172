"""Settings of a Hugging Face directory that are no part of the model: special tokens, generation, the tokenizer.

No weight depends on them, but without them generation does not know where to stop. So an import reads them, checkpoints
keep them, and an export writes them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.formats.hf.directory import CONFIG, read_config, read_json_object
from lightning_megatron.errors import CheckpointError

SETTINGS = "hugging_face"
"""Key of a checkpoint that holds the result of :func:`read_settings`."""

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "*.model",  # tokenizer.model, spiece.model, sentencepiece.bpe.model, ...
    "*.spm",
    "*.tiktoken",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenization_*.py",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""Files of the tokenizers of transformers, by names and patterns of names."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Entries that a family writes in another spelling, or that describe the files that were read.
_NOT_CARRIED = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "partial_rotary_factor",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
    "transformers_version",
}

Settings = Mapping[str, Mapping[str, Any]]
"""Contents of ``config.json`` and ``generation_config.json`` by their names, and under ``source`` their path."""


def read_settings(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The settings of a directory; empty if it has none.

    Raises:
        CheckpointError: if a file cannot be read.
    """
    found = {}
    if (Path(path) / CONFIG).is_file():
        found["config"] = read_config(path)
    if (Path(path) / GENERATION).is_file():
        found["generation_config"] = read_json_object(Path(path) / GENERATION)
    return {**found, "source": {"path": os.path.abspath(path)}} if found else found


def with_settings(written: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Contents of ``config.json`` for a model, with the settings of its source.

    Args:
        written: the family's entries, which win where both have one, except for the ids of special tokens.
        settings: settings of the source. If the source is of another family, only its ids of special tokens are used.
            Ids outside the vocabulary never are.
    """
    source = settings.get("config", {})
    ids = {name: source[name] for name in TOKEN_IDS if name in source and _are_in(source[name], written["vocab_size"])}
    if source.get("model_type") != written["model_type"]:
        return {**written, **ids}
    carried = {name: value for name, value in source.items() if name not in _NOT_CARRIED | set(TOKEN_IDS)}
    return {**carried, **written, **ids}


def _are_in(ids: Any, vocab_size: int) -> bool:
    """True if an id, or each of a list, is in the vocabulary, or is ``None``."""
    some = ids if isinstance(ids, list) else [ids]
    return all(one is None or (isinstance(one, int) and 0 <= one < vocab_size) for one in some)


def tokenizer_files(path: str | os.PathLike[str]) -> dict[str, Path]:
    """The files of a directory's tokenizer and chat templates, by their names inside of it.

    Raises:
        CheckpointError: if there are none.
    """
    folder = Path(path)
    files = [file for name in TOKENIZER_FILES for file in sorted(folder.glob(name)) if file.is_file()]
    if files:
        return {file.relative_to(folder).as_posix(): file for file in files}
    raise CheckpointError(f"{path} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
