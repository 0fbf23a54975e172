"""Chat templates from a name, a file or a text that the user gives, or from the tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_megatron.data.chat.builtin import BUILTIN_TEMPLATES
from lightning_megatron.data.chat.template import ChatTemplate, TemplateSource
from lightning_megatron.data.special_tokens import settings_of
from lightning_megatron.data.tokenizers import HuggingFaceTokenizer
from lightning_megatron.errors import ConfigError, DataError, Problem, nearest_names, raise_if_any
from lightning_megatron.files.small import read_small

_TEMPLATE_FILE = "chat_template.jinja"


def chat_template(
    given: str | None, directory: Path, tokenizer: HuggingFaceTokenizer, variables: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """The chat template of a job.

    Args:
        given: name of a built-in template, path of a ``.jinja`` file, or Jinja text; ``None`` for the tokenizer's own.
        directory: folder of the tokenizer.
        tokenizer: the tokenizer.
        variables: further variables of the template, which override special tokens.

    Raises:
        ConfigError: if there is none, it has no marks, or the tokenizer lacks its tokens.
        DataError: if a file cannot be read.
    """
    tokens = tokenizer.special_tokens
    source = _own(directory) if given is None else _named(given)
    raise_if_any(_missing(source, tokenizer, tokens))
    return ChatTemplate(source, {**tokens, **(variables or {})})


def _own(directory: Path) -> TemplateSource:
    """The template that a tokenizer carries; a file of its own wins, as in transformers."""
    file = directory / _TEMPLATE_FILE
    if file.is_file():
        return _file(file)
    config = directory / "tokenizer_config.json"
    template = settings_of(config).get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = by_name.get("default")
    if isinstance(template, str):
        return TemplateSource(template, str(config))
    reason = f"{directory} carries no chat template: name a built-in one, or a .jinja file"
    raise ConfigError([Problem("chat_template", None, reason, tuple(BUILTIN_TEMPLATES))])


def _named(given: str) -> TemplateSource:
    if given in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[given]
    if "{%" in given or "{{" in given:
        return TemplateSource(given, "given as text")
    if Path(given).is_file():
        return _file(Path(given))
    if given.endswith(".jinja") or os.sep in given:
        raise ConfigError([Problem("chat_template", given, "no such file", tuple(BUILTIN_TEMPLATES))])
    reason = "is neither a built-in template nor a file"
    raise ConfigError([Problem("chat_template", given, reason, nearest_names(given, list(BUILTIN_TEMPLATES)))])


def _file(file: Path) -> TemplateSource:
    try:
        return TemplateSource(read_small(file).decode("utf-8"), str(file))
    except (OSError, ValueError) as error:
        raise DataError.at(file, f"cannot be read: {error}") from None


def _missing(source: TemplateSource, tokenizer: HuggingFaceTokenizer, special: Mapping[str, str]) -> list[Problem]:
    """Tokens and names that a built-in template needs and the tokenizer does not have."""
    known = tokenizer.vocabulary()
    pieces = [piece for piece in source.tokens if piece not in known]
    names = [name for name in source.variables if name not in special]
    if not pieces and not names:
        return []
    lacks = ", ".join(pieces + [f"a {name}" for name in names])
    fits = tuple(
        other.name
        for other in BUILTIN_TEMPLATES.values()
        if all(piece in known for piece in other.tokens) and all(name in special for name in other.variables)
    )
    return [Problem("chat_template", source.name, f"the tokenizer lacks {lacks}, which it writes", fits)]
