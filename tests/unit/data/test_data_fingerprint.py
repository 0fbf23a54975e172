"""Fingerprints of data: equal if and only if two runs read the same samples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_megatron.data import (
    IndexedDatasetWriter,
    Tokenizer,
    build_tokenizer,
    data_fingerprint,
    fingerprint,
    fingerprint_problems,
    tokenizer_fingerprint,
)


def written(prefix: Path, *, seed: int = 0, documents: int = 5, length: int = 30) -> str:
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(documents):
            writer.add_item(random.integers(0, 99, length).astype(np.uint16))
            writer.end_document()
    return str(prefix)


def differs(saved: object, now: object) -> list[str]:
    return [problem.argument for problem in fingerprint_problems({"data": saved}, {"data": now})]


def test_data_that_moved_is_the_same_data(tmp_path):
    here = written(tmp_path / "a")
    for end in (".bin", ".idx"):
        shutil.copy(here + end, str(tmp_path / "b") + end)
    assert data_fingerprint(here, split="9,1") == data_fingerprint(str(tmp_path / "b"), split="90,10,0")


def test_every_difference_is_named(tmp_path):
    a, b = written(tmp_path / "a"), written(tmp_path / "b", seed=1)
    longer = written(tmp_path / "c", documents=6)
    whole = data_fingerprint([0.5, a, 0.5, b], split="9,1")
    assert differs(whole, data_fingerprint([0.5, a, 0.5, b], split="9,1")) == []
    assert differs(whole, data_fingerprint([0.5, b, 0.5, b], split="9,1")) == ["data.files[0].tokens"]
    assert differs(whole, data_fingerprint([0.4, a, 0.6, b], split="9,1")) == ["data.weights[0]", "data.weights[1]"]
    assert differs(whole, data_fingerprint([0.5, a], split="9,1")) == ["data.files", "data.weights"]
    assert differs(whole, data_fingerprint([0.5, a, 0.5, b], split="8,2")) == ["data.split[0][1]", "data.split[1][0]"]
    found = differs(whole, data_fingerprint([0.5, longer, 0.5, b], split="9,1"))
    assert found == [f"data.files[0].{name}" for name in ("index", "tokens", "token_bytes")]


def test_a_byte_between_the_blocks_of_a_file_of_megabytes_shows(tmp_path, monkeypatch):
    prefix = written(tmp_path / "a", documents=2, length=2**22)
    monkeypatch.setattr(fingerprint, "_WHOLE", 0)
    by_an_older_version = data_fingerprint(prefix, split="1")
    monkeypatch.undo()
    before = data_fingerprint(prefix, split="1")
    assert differs(by_an_older_version, before) == [], "as far as both have looked"
    tokens = np.memmap(f"{prefix}.bin", np.uint8, "r+")
    tokens[(len(tokens) - 2**16) * 20 // 63 - 1] ^= 1
    tokens.flush()
    now = data_fingerprint(prefix, split="1")
    assert differs(before, now) == ["data.files[0].tokens"]
    assert differs(by_an_older_version, now) == []


@pytest.mark.parametrize("place", [0, 1, 2**16 * 40, -1])
def test_long_files_are_compared_in_blocks_that_reach_both_ends(tmp_path, place, monkeypatch):
    monkeypatch.setattr(fingerprint, "_WHOLE", 0)
    prefix = written(tmp_path / "a", documents=2, length=2**22)  # 16 MiB of tokens
    before = data_fingerprint(prefix, split="1")
    tokens = np.memmap(f"{prefix}.bin", np.uint8, "r+")
    size = len(tokens)
    start = (size - 2**16) * 20 // 63 if place == 2**16 * 40 else place  # inside a block in the middle
    tokens[start] ^= 1
    tokens.flush()
    assert differs(before, data_fingerprint(prefix, split="1")) == ["data.files[0].tokens"]


def test_a_fingerprint_is_plain(tmp_path):
    found = data_fingerprint(written(tmp_path / "a"), split="9,1")
    torch.save(found, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True) == found


def bert(folder: Path, *words: str) -> dict[str, object]:
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]))
    pytest.importorskip("tokenizers")
    return tokenizer_fingerprint(build_tokenizer("BertWordPieceCase", folder), folder)


def test_tokenizers_are_told_apart_by_their_files(tmp_path):
    a, b = bert(tmp_path / "a", "one", "two"), bert(tmp_path / "b", "one", "two")
    assert a == b
    assert differs(a, bert(tmp_path / "c", "one", "too")) == ["data.files[0]"]
    null = tokenizer_fingerprint(build_tokenizer("NullTokenizer", vocab_size=6), None)
    assert differs(null, tokenizer_fingerprint(build_tokenizer("NullTokenizer", vocab_size=7), None)) == [
        "data.vocab_size",
        "data.eod",
    ]


@pytest.mark.parametrize("kind", ["case", "merges", "begin token"])
def test_settings_that_change_tokens_tell_tokenizers_apart(tmp_path, kind):
    """Beside the vocabulary's file, which is the same, and whatever older fingerprints say of them."""
    pytest.importorskip("tokenizers")
    file, first, second = FOLDERS[kind](tmp_path)
    texts = ("Abba ab", "abab")
    assert [first.encode(text) for text in texts] != [second.encode(text) for text in texts]
    saved, now = tokenizer_fingerprint(first, file), tokenizer_fingerprint(second, file)
    assert differs(saved, now) == ["data.settings"]
    assert differs({name: value for name, value in saved.items() if name != "settings"}, saved) == []


def cased(folder: Path) -> tuple[Path, Tokenizer, Tokenizer]:
    file = folder / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "abba", "Abba", "ab", "abab"]))
    return file, build_tokenizer("BertWordPieceCase", file), build_tokenizer("BertWordPieceLowerCase", file)


def merged(folder: Path) -> tuple[Path, Tokenizer, Tokenizer]:
    pieces = ["<|endoftext|>", "A", "a", "b", "\u0120", "ab", "ba"]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    for name, merge in (("one.txt", "a b"), ("two.txt", "b a")):
        (folder / name).write_text(f"#version: 0.2\n{merge}\n")
    file = folder / "vocab.json"
    made = (
        build_tokenizer("GPT2BPETokenizer", vocab_file=file, merge_file=folder / name)
        for name in ("one.txt", "two.txt")
    )
    return file, *made


def begun(folder: Path) -> tuple[Path, Tokenizer, Tokenizer]:
    sentencepiece = pytest.importorskip("sentencepiece")
    with (folder / "tokenizer.model").open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["ab Abba abab"] * 20), model_writer=stream, vocab_size=8, minloglevel=2
        )
    file = folder / "tokenizer.model"
    return file, build_tokenizer("GPTSentencePieceTokenizer", file), build_tokenizer("Llama2Tokenizer", file)


FOLDERS = {"case": cased, "merges": merged, "begin token": begun}


def test_what_only_one_side_knows_is_no_difference():
    assert fingerprint_problems({"tokenizer": None, "seed": 1}, {"tokenizer": {"kind": "x"}, "seed": 1}) == []
    assert fingerprint_problems({}, {"seed": 1}) == []
    (problem,) = fingerprint_problems({"seed": 1}, {"seed": 2})
    assert str(problem) == "seed=2: the checkpoint was trained with 1"
