"""Tokenizers, token files, text and configurations, spoiled."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
import lzma
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hostile_payloads as payloads
from hostile_case import SPECIAL, Case, Spoil, becomes, sparse, writes


def tokenizers(mark: Path) -> Iterator[Case]:
    for trick, content in {
        "empty": b"",
        "zeros": bytes(4096),
        "text": b"this is no model\n" * 100,
        "pickle": payloads.running(mark)["reduce"] + b".",
        "lengths": b"\x0a\xff\xff\xff\xff\x0f" * 100,
        "deep": b"\x0a\x7f" * 4000,
        "a piece alone": b"\x0a\x05\x0a\x03abc",
        "half a model": b"",
    }.items():
        spoil = writes(content) if trick != "half a model" else lambda file: os.truncate(file, 2000)
        yield Case("sentencepiece", trick, "sp", "tok.model", spoil)
    for trick, spoil in {**SPECIAL, "sparse": sparse}.items():
        yield Case("sentencepiece", trick, "sp", "tok.model", spoil)
        yield Case("tokenizer.json", trick, "hf-tok", "tokenizer.json", spoil)
        yield Case("vocab.txt", trick, "bert", "vocab.txt", spoil)
        yield Case("vocab.json", trick, "gpt2", "vocab.json", spoil)
        yield Case("merges.txt", trick, "gpt2", "merges.txt", spoil, errs_with="merges.txt|vocab.json")
    for trick, content in payloads.json_bombs().items():
        yield Case("tokenizer.json", trick, "hf-tok", "tokenizer.json", writes(content))
        yield Case("vocab.json", trick, "gpt2", "vocab.json", writes(content))
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            yield Case(name, trick, "hf-tok", name, writes(content))

    def part(name: str, value: Any) -> Spoil:
        return becomes(lambda content: {**content, name: value})

    odd: dict[str, Any] = {
        "precompiled normalizer": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "precompiled long": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "////" * 100}),
        "regex that never ends": (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "(a|a)*(c|a|t)*(.*)*$x"}, "behavior": "Isolated", "invert": False},
        ),
        "truncation": (
            "truncation",
            {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9},
        ),
        "padding": (
            "padding",
            {
                "strategy": {"Fixed": 1 << 40},
                "direction": "Right",
                "pad_to_multiple_of": 0,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "x",
            },
        ),
        "model": ("model", {"type": "WordLevel", "vocab": {"a": 4_000_000_000}, "unk_token": "<unk>"}),
        "no unknown": ("model", {"type": "WordLevel", "vocab": {"zzz": 0}, "unk_token": "<none>"}),
        "ids far": ("model", {"type": "WordLevel", "vocab": {"cats": 3_000_000_000, "<unk>": 1}, "unk_token": "<unk>"}),
        "added": (
            "added_tokens",
            [
                {
                    "id": 1 << 31,
                    "content": "cats",
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
        ),
        "post-processor": (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            },
        ),
    }
    for trick, (name, value) in odd.items():
        yield Case(
            "tokenizer.json", trick, "hf-tok", "tokenizer.json", part(name, value), harmless=True, errs_with="hf-tok"
        )
    for trick, content in {
        "not UTF-8": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n\xff\xfe",
        "empty": b"",
        "zeros": bytes(4096),
        "a long line": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n" + b"x" * 50_000_000,
    }.items():
        harmless = trick == "a long line"
        yield Case("vocab.txt", trick, "bert", "vocab.txt", writes(content), harmless=harmless)
        yield Case(
            "merges.txt", trick, "gpt2", "merges.txt", writes(content), harmless=True, errs_with="merges.txt|vocab.json"
        )
    for trick, change in {
        "ids negative": {"a": -1},
        "ids text": {"a": "x"},
        "ids far": {"c": 4_000_000_000},
        "ids twice": {"a": 3, "b": 3},
    }.items():
        spoil = becomes(lambda content, change=change: {**content, **change})
        yield Case("vocab.json", trick, "gpt2", "vocab.json", spoil, harmless=trick in ("ids twice", "ids far"))


def tokens(mark: Path) -> Iterator[Case]:
    header = struct.Struct("<9sQBQQ")

    def index(**changes: Any) -> Spoil:
        given = {"magic": b"MMIDIDX\0\0", "version": 1, "code": 8, "sequences": 1, "documents": 2, **changes}
        return writes(header.pack(*given.values()) + bytes(64))

    for trick, spoil in {
        "empty": writes(b""),
        "zeros": writes(bytes(4096)),
        "magic": index(magic=b"XXXXXXX\0\0"),
        "version": index(version=7),
        "code": index(code=99),
        "2^63 sequences": index(sequences=1 << 63),
        "2^60 documents": index(documents=1 << 60),
        "2^64-1 of both": index(sequences=(1 << 64) - 1, documents=(1 << 64) - 1),
        "sparse": sparse,
        "pickle": writes(payloads.running(mark)["reduce"]),
        **SPECIAL,
    }.items():
        yield Case(".idx", trick, "data", "corpus.idx", spoil)
    for trick, spoil in {"empty": writes(b""), "short": lambda file: os.truncate(file, 30), **SPECIAL}.items():
        yield Case(".bin", trick, "data", "corpus.bin", spoil)
    cache = "cache/GPTDataset_indices"

    def cached(change: Callable[[Path], object], name: str) -> Spoil:
        """Spoil a file of the cache, and let the description say that it is as it was written."""

        def edit(file: Path) -> None:
            import zlib

            target = next((file.parent / cache).glob(f"*-{name}*"))
            change(target)
            marker = next((file.parent / cache).glob("*train-description.txt"))
            if target != marker and target.is_file():
                content = json.loads(marker.read_text())
                raw = target.read_bytes()
                content["files"][target.name] = [len(raw), zlib.crc32(raw)]
                marker.write_text(json.dumps(content))

        return edit

    import numpy as np

    def array(value: Any, **options: Any) -> Spoil:
        buffer = io.BytesIO()
        np.save(buffer, value, **options)
        return writes(buffer.getvalue())

    for trick, spoil in {
        "pickle": array(np.array([payloads._Calls(os.system, f"touch {mark}")], dtype=object), allow_pickle=True),
        "bare pickle": writes(payloads.running(mark)["reduce"] + b"."),
        "negative": array(np.full((40, 2), -5, np.int32)),
        "float": array(np.ones((40, 2))),
        "far": array(np.full((40, 2), 2**31 - 1, np.int32)),
        "one dimension": array(np.arange(40, dtype=np.int32)),
        "short": array(np.zeros((1, 2), np.int32)),
        "text": array(np.array([["a", "b"]] * 40)),
        "shape lies": lambda file: file.write_bytes(file.read_bytes().replace(b"(", b"(9", 1)),
        "npz": lambda file: np.savez(file.open("wb"), a=np.ones(3)),
        **SPECIAL,
    }.items():
        yield Case("index cache", trick, "data", "corpus.bin", cached(spoil, "GPTDataset-train-sample_index"),
                   harmless=True, errs_with="corpus|cache")  # fmt: skip
    for trick, spoil in {**{name: writes(x) for name, x in payloads.json_bombs().items()}, **SPECIAL}.items():
        yield Case("index cache", f"description: {trick}", "data", "corpus.bin",
                   cached(spoil, "GPTDataset-train-description"), harmless=True, errs_with="corpus|cache")  # fmt: skip


def text(mark: Path) -> Iterator[Case]:
    def lines(trick: str, content: bytes, name: str = "corpus.jsonl", **more: Any) -> Case:
        def replace(file: Path) -> None:
            file.unlink()
            (file.parent / name).write_bytes(content)

        return Case("JSON lines", trick, "text", "corpus.jsonl", replace, errs_with=name, **more)

    for trick, content in payloads.json_bombs().items():
        yield lines(trick, content)
    good = b'{"text": "3 cats"}\n'
    for trick, content in {
        "surrogate": b'{"text": "\\ud800 3 cats"}',
        "NUL in text": b'{"text": "3 \\u0000 cats"}',
        "text deep": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "text a number": b'{"text": 3}',
        "no text": b'{"body": "3"}',
        "BOM": b"\xef\xbb\xbf" + good,
        "one of many": good * 200 + b"[" * 200_000 + b"\n" + good,
        "sign of infinity": b'{"text": Infinity}',
    }.items():
        yield lines(trick, content, harmless=trick in ("surrogate", "NUL in text", "BOM"))
    yield lines("gz cut", gzip.compress(good * 1000)[:-20], "corpus.jsonl.gz")
    yield lines("gz none", good, "corpus.jsonl.gz")
    yield lines("bz2 cut", bz2.compress(good * 1000)[:-20], "corpus.jsonl.bz2")
    yield lines("bz2 none", good, "corpus.jsonl.bz2")
    yield lines("xz cut", lzma.compress(good * 1000)[:-20], "corpus.jsonl.xz")
    yield lines("xz none", good, "corpus.jsonl.xz")
    yield lines("zst none", good, "corpus.jsonl.zst")
    yield lines("zst window of 2 GiB", b"\x28\xb5\x2f\xfd\x04\xb0\x01\x00\x00" + bytes(50), "corpus.jsonl.zst")
    for how, name in _BOMBS.items():

        def bomb(file: Path, how: str = how, name: str = name) -> None:
            file.unlink()
            (file.parent / name).write_bytes(_line_bomb(how))

        yield Case("JSON lines", f"bomb in {how}", "text", "corpus.jsonl", bomb, errs_with=name)
    for trick, spoil in {**SPECIAL, "sparse": sparse}.items():
        yield Case("JSON lines", trick, "text", "corpus.jsonl", spoil)


_BOMBS = {"gz": "corpus.jsonl.gz", "bz2": "corpus.jsonl.bz2", "xz": "corpus.jsonl.xz", "zst": "corpus.jsonl.zst"}


@functools.cache
def _line_bomb(how: str) -> bytes:
    """One line of 1.5 GiB, compressed."""
    import zstandard

    openers: Mapping[str, Callable[..., Any]] = {
        "gz": functools.partial(gzip.open, compresslevel=1),
        "bz2": functools.partial(bz2.open, compresslevel=1),
        "xz": functools.partial(lzma.open, preset=0),
        "zst": functools.partial(zstandard.open, closefd=False),
    }
    buffer, block = io.BytesIO(), b"a" * (1 << 24)
    with openers[how](buffer, mode="wb") as stream:
        stream.write(b'{"text": "')
        for _ in range(96):
            stream.write(block)
        stream.write(b'"}\n')
    return buffer.getvalue()


def configurations(mark: Path) -> Iterator[Case]:
    for trick, content in payloads.json_bombs().items():
        yield Case("--config of convert", trick, "config", "model.json", writes(content))
    for trick, change in {
        "layers": {"num_layers": 10**9},
        "text": {"hidden_size": "x"},
        "unknown": {"evil": 1},
        "huge": {"hidden_size": 10**400},
    }.items():
        spoil = becomes(lambda content, change=change: {**content, **change})
        yield Case("--config of convert", trick, "config", "model.json", spoil, errs_with="|")
    tag = f"!!python/object/apply:os.system ['touch {mark}']"
    for trick, content in {
        "YAML call": f"x: {tag}\n",
        "YAML name": "config: !!python/name:os.system\n",
        "YAML module": "config: !!python/module:evil_import\n",
        "YAML new": f"config: !!python/object/new:os.system ['touch {mark}']\n",
    }.items():
        spoil = writes(content.encode())
        yield Case("hparams.yaml", trick, "config", "model.json", spoil, harmless=True, errs_with="|")
        yield Case("recipe", trick, "config", "model.json", spoil, errs_with="|")
