"""Special tokens from the settings files beside a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_megatron.errors import DataError
from lightning_megatron.files.small import read_object

SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Settings beside ``tokenizer.json``; those of the second count where the first lists no added tokens."""

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_FIRST = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def settings_of(file: Path) -> dict[str, Any]:
    """Content of a settings file; empty if there is none.

    Raises:
        DataError: if it cannot be read.
    """
    try:
        return read_object(file) if file.is_file() else {}
    except ValueError as error:
        raise DataError.at(file, f"cannot be read: {error}") from None


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name, such as ``eos_token``."""
    found = {name: settings.get(name) for name in (*_FIRST, *settings) if name.endswith("_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def add_tokens(backend: Any, settings: Mapping[str, Any], added_token: Any) -> None:
    """Add the tokens that only a tokenizer's settings name, in transformers' order, which determines their ids."""

    def made(token: Any) -> Any:
        given = token if isinstance(token, dict) else {"content": token, "special": True}
        return added_token(**{name: value for name, value in given.items() if name != "__type"})

    there, names = backend.get_added_tokens_decoder().values(), special_tokens(settings)
    listed = sorted((int(id), token) for id, token in settings.get("added_tokens_decoder", {}).items())
    new = [made(token) for _, token in listed]
    known = {token.content for token in (*there, *new)}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    named = [*(settings[name] for name in names), *(extra.values() if isinstance(extra, dict) else extra)]
    new += [token for token in map(made, named) if token.content not in known]
    for token in new:
        token.special |= token.content in names.values() and repr(token) not in map(repr, there)
    backend.add_tokens(new)


def flags_of_added(backend: Any) -> list[list[Any]]:
    """Ids, texts and flags of all added tokens, as plain values in the order of ids."""
    tokens = sorted(backend.get_added_tokens_decoder().items())
    return [[id, token.content, *(getattr(token, flag) for flag in _FLAGS)] for id, token in tokens]
