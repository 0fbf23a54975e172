"""Fingerprints of training data in a few plain values: two runs read the same samples if these are equal.

They contain no paths, since data may move. Files of up to 64 MiB are hashed whole, longer ones by their length and by
64 blocks spread evenly over them: hashing terabytes would take hours, and in an index a change of one length changes
everything after it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_megatron.data.build import DataPath, parse_data_path, parse_split
from lightning_megatron.data.indexed import index_path, tokens_path
from lightning_megatron.data.tokenizers import Tokenizer
from lightning_megatron.errors import Problem

Fingerprint = dict[str, Any]
"""Plain values by name, which ``torch.load(weights_only=True)`` can read; compared key by key."""

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")
_LATER = ("settings",)  # entries that fingerprints of older versions do not have
_BLOCK = 2**16
_BLOCKS = 64
_WHOLE = 2**26
_ABSENT = "nothing"
_HASHES = re.compile(r"([0-9a-f]{32})(?:\+([0-9a-f]{32}))?")


def data_fingerprint(data_path: DataPath, *, split: str) -> Fingerprint:
    """Fingerprint of the files, and of the way they are mixed and split.

    Args:
        data_path: a prefix, a list of prefixes, or ``[weight, prefix, ...]``.
        split: shares of training, validation and test, as in :func:`~lightning_megatron.data.build.parse_split`.
    """
    blend = parse_data_path(data_path)
    return {
        "files": [_pair(prefix) for prefix in blend.prefixes],
        "weights": None if blend.weights is None else list(blend.weights),
        "split": [None if span is None else list(span) for span in parse_split(split)],
    }


def tokenizer_fingerprint(tokenizer: Tokenizer, model: str | os.PathLike[str] | None) -> Fingerprint:
    """Fingerprint of a tokenizer: its kind, the sizes that data depends on, its file, and its settings in effect.

    The tokenizer itself names its settings. Files beside the vocabulary count only where they change tokens.

    Args:
        tokenizer: tokenizer to describe.
        model: file or directory that it was built from, if any; in a directory, the files of vocabularies are used.
    """
    path = None if model is None else Path(model)
    files = [] if path is None else [path] if path.is_file() else [path / name for name in _TOKENIZER_FILES]
    return {
        "kind": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "files": [_content(file) for file in files if file.is_file()],
        "settings": _hash(json.dumps(getattr(tokenizer, "settings", {}), sort_keys=True)),
    }


def fingerprint_problems(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Problem]:
    """Differences between the data of a checkpoint and the present data.

    A value that only one side has (no tokenizer was given, an older version) cannot be compared and is no difference.

    Args:
        saved: fingerprint in the checkpoint.
        now: fingerprint of the present data.
    """
    return [
        Problem(where, _shown(mine), f"the checkpoint was trained with {_shown(theirs)}")
        for name in saved
        if name in now and saved[name] is not None and now[name] is not None
        for where, mine, theirs in _differences(name, now[name], saved[name])
    ]


def _differences(where: str, mine: Any, theirs: Any) -> Iterable[tuple[str, Any, Any]]:
    """Find the places where two values differ, inside nested mappings and lists."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for key in (
            key for key in dict.fromkeys((*theirs, *mine)) if key not in _LATER or (key in mine and key in theirs)
        ):
            yield from _differences(f"{where}.{key}", mine.get(key, _ABSENT), theirs.get(key, _ABSENT))
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            yield from _differences(f"{where}[{number}]", a, b)
    elif not _same(mine, theirs):
        yield where, mine, theirs


def _same(mine: Any, theirs: Any) -> bool:
    """True if two values are equal; of hashes, only the parts that both versions have computed are compared."""
    hashes = [_HASHES.fullmatch(value) if isinstance(value, str) else None for value in (mine, theirs)]
    if hashes[0] and hashes[1]:
        return all(a == b for a, b in zip(hashes[0].groups(), hashes[1].groups(), strict=True) if a and b)
    return bool(mine == theirs)


def _shown(value: Any) -> Any:
    return f"{len(value)} entries" if isinstance(value, list) and value and isinstance(value[0], Mapping) else value


def _pair(prefix: str) -> Fingerprint:
    index, tokens = index_path(prefix), tokens_path(prefix)
    return {"index": _content(index), "tokens": _content(tokens), "token_bytes": tokens.stat().st_size}


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _content(file: Path) -> str:
    """BLAKE2b of the length and of the blocks, which include the first and the last block of a long file.

    If the file is longer than these blocks but not too long, a hash of the whole file follows: checkpoints of earlier
    versions have the first hash only.
    """
    size = file.stat().st_size
    starts: Iterable[int] = range(0, size, _BLOCK)
    if size > _BLOCK * _BLOCKS:
        starts = [(size - _BLOCK) * i // (_BLOCKS - 1) for i in range(_BLOCKS)]
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    with file.open("rb") as stream:
        for start in starts:
            stream.seek(start)
            digest.update(stream.read(_BLOCK))
        if not _BLOCK * _BLOCKS < size <= _WHOLE:
            return digest.hexdigest()
        stream.seek(0)
        whole = hashlib.blake2b(digest_size=16)  # of check sums: hashing the content is five times slower
        while block := stream.read(_BLOCK):
            whole.update(zlib.crc32(block).to_bytes(4, "big"))
    return f"{digest.hexdigest()}+{whole.hexdigest()}"
