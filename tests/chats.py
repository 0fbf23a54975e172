"""Tokenizers and conversations that tests of chats share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
]
TEXT = ["hello world, how are you today? I am fine, thank you, and you", "the quick brown fox jumps over the lazy dog"]


def make_tokenizer(directory: Path, kind: str = "bytes", special: Sequence[str] = SPECIAL, **names: str | None) -> Path:
    """Train a tokenizer and write it as transformers does.

    Args:
        directory: folder to write.
        kind: ``"bytes"`` (as GPT-2, LLaMA 3), ``"metaspace"`` (as LLaMA 2, Gemma) or ``"words"``, which drops white
            space.
        special: special tokens.
        **names: special tokens by name, besides the usual ones; ``None`` leaves one out.
    """
    if kind == "words":
        words = [*special, *"abcdefghijklmnopqrstuvwxyz", *range(10), *(w for t in TEXT for w in t.split())]
        backend = Tokenizer(models.WordLevel({str(w): i for i, w in enumerate(dict.fromkeys(words))}, "<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.add_special_tokens(SPECIAL)
    else:
        backend = Tokenizer(models.BPE(byte_fallback=kind == "metaspace", unk_token="<unk>"))
        if kind == "bytes":
            backend.pre_tokenizer, backend.decoder = (
                pre_tokenizers.ByteLevel(add_prefix_space=False),
                decoders.ByteLevel(),
            )
            first = pre_tokenizers.ByteLevel.alphabet()
        else:
            backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
            first = list("abcdefghijklmnopqrstuvwxyz\n.,?!")
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=list(special), initial_alphabet=first, show_progress=False
        )
        backend.train_from_iterator(TEXT, trainer)
    usual: dict[str, str | None] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    given = {name: token for name, token in {**usual, **names}.items() if token is not None}
    PreTrainedTokenizerFast(tokenizer_object=backend, **given).save_pretrained(directory)
    return directory


def write_lines(file: Path, records: Iterable[Mapping[str, Any] | str]) -> Path:
    """Write JSON lines; text as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def chat(*turns: str, system: str | None = None) -> dict[str, Any]:
    """A conversation of turns, of the user and the assistant by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": [{"role": "system", "content": system}] * (system is not None) + messages}


CHATS = [
    chat("Hello, how are you?", "I am fine, thank you."),
    chat("Hi", "Ho", "and the fox?", "It jumps over\nthe lazy dog.  ", "Why?", "Ürsprünglich 😀 <b>&amp;</b>"),
    chat("one two", " leading and trailing ", system="Be brief."),
]
