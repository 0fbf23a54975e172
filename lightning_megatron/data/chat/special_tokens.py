"""Special tokens that the settings beside a Hugging Face ``tokenizer.json`` name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_megatron.errors import DataError
from lightning_megatron.files.small import read_object

_FIRST = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def settings_of(file: Path) -> dict[str, Any]:
    """Content of a file of settings, if there is one.

    Raises:
        DataError: if it cannot be read.
    """
    try:
        return read_object(file) if file.is_file() else {}
    except ValueError as error:
        raise DataError.at(file, f"cannot be read: {error}") from None


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name, such as ``eos_token``."""
    found = {name: _text(settings.get(name)) for name in (*_FIRST, *settings) if name.endswith("_token")}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def add_tokens(backend: Any, settings: Mapping[str, Any], added_token: Any) -> None:
    """Add tokens that only the settings of a tokenizer list or name, in transformers' order, by which they get ids."""
    there, names = backend.get_added_tokens_decoder().values(), special_tokens(settings)
    listed = [t for _, t in sorted((int(id), t) for id, t in settings.get("added_tokens_decoder", {}).items())]
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    named = [*(settings[name] for name in names), *(extra.values() if isinstance(extra, dict) else extra)]
    known = {token.content for token in there} | {token["content"] for token in listed}
    new = []
    for token in listed + [token for token in named if _text(token) not in known]:
        given = token if isinstance(token, dict) else {"content": token, "special": True}
        made = added_token(**{name: value for name, value in given.items() if name != "__type"})
        made.special |= made.content in names.values() and repr(made) not in map(repr, there)
        new.append(made)
    backend.add_tokens(new)


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token
