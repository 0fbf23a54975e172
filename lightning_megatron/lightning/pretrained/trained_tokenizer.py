"""Comparison of the tokenizer that a model was trained with and one that it is about to be used with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint import open_checkpoint
from lightning_megatron.checkpoint.formats.hf.directory import is_hf_directory
from lightning_megatron.checkpoint.formats.hf.settings import SETTINGS, read_settings
from lightning_megatron.data.fingerprint import Fingerprint, fingerprint_problems, tokenizer_fingerprint
from lightning_megatron.data.preprocessing.encode import TokenizerSpec
from lightning_megatron.errors import DataError, Problem
from lightning_megatron.files import PathLike
from lightning_megatron.lightning.pretrained.config_check import refuse_unfilled_checkpoint, saved_config
from lightning_megatron.lightning.pretrained.hugging_face import hf_config

_PADDING = 2048
"""A model's vocabulary has fewer padding ids than this: Megatron-LM rounds up to multiples of 128 x tp."""


@dataclass(frozen=True)
class TrainedTokenizer:
    """The tokenizer that weights were trained with, as far as their files tell.

    Attributes:
        spec: arguments that build it; ``None`` if they are not known, or its files are not here.
        fingerprint: its fingerprint; ``None`` for that of ``spec``, if there is one.
        vocab_size: size of the model's vocabulary; ``None`` if it is not known.
    """

    spec: TokenizerSpec | None = None
    fingerprint: Fingerprint | None = None
    vocab_size: int | None = None

    @classmethod
    def of_weights(cls, path: PathLike) -> TrainedTokenizer:
        """Read a Hugging Face directory, or a checkpoint: its data module's state, or the directory it started from."""
        if is_hf_directory(path):
            return cls.of_settings(read_settings(path), hf_config(path).vocab_size)
        opened = open_checkpoint(path, check="sizes")
        refuse_unfilled_checkpoint(opened)
        meta = opened.meta
        config = saved_config(meta)
        size = None if config is None else config.vocab_size
        states = (state for state in meta.values() if isinstance(state, Mapping))
        data: Mapping[str, Any] = next((state for state in states if "fingerprint" in state), {})
        if known := data.get("fingerprint", {}).get("tokenizer"):
            spec = TokenizerSpec(**data["tokenizer"]) if data.get("tokenizer") else None
            return cls(spec if spec is not None and os.path.exists(spec.file or "/") else None, known, size)
        return cls.of_settings(meta.get(SETTINGS) or {}, size)

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any], vocab_size: int | None = None) -> TrainedTokenizer:
        """Read the settings of a Hugging Face directory, which a module keeps as ``hf_settings``."""
        return cls(directory_spec(settings["source"]["path"]) if "source" in settings else None, None, vocab_size)

    def problems(self, argument: str, spec: TokenizerSpec, do: str) -> list[Problem]:
        """Evidence that the tokenizer of an argument is another one; ``do`` is advice for the error text."""
        known, now, size = self.fingerprint, tokenizer_fingerprint(spec.build(), spec.file), self.vocab_size
        if known is None and self.spec is not None:
            with suppress(DataError, ModuleNotFoundError):  # a directory may hold a kind that cannot be read here
                known = tokenizer_fingerprint(self.spec.build(), self.spec.file)
        if known is None:
            is_other = size is not None and not size - _PADDING < now["vocab_size"] <= size
            found = [Problem("vocab_size", now["vocab_size"], f"the model was trained with {size}")] * is_other
        else:  # the same tokenizer may be named by one file or by the directory around it
            theirs, mine = set(known["files"]), set(now["files"])
            is_other = not (theirs and mine and (theirs <= mine or mine <= theirs))
            found = fingerprint_problems({"tokenizer": known}, {"tokenizer": now}) * is_other
        nearest = () if self.spec is None else (self.spec.file,)
        return [*found, Problem(argument, spec.file, f"another tokenizer; {do}", nearest)] if found else []


def directory_spec(path: PathLike) -> TokenizerSpec | None:
    """The tokenizer of a Hugging Face directory; ``None`` if it has none that can be read here."""
    kinds = {"tokenizer.json": "HuggingFaceTokenizer", "tokenizer.model": "Llama2Tokenizer"}
    files = ((kind, Path(path) / name) for name, kind in kinds.items())
    return next((TokenizerSpec(kind, os.fspath(file)) for kind, file in files if file.is_file()), None)
