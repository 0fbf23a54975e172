"""Tokens of remembered words against the tokenizer's own for whole texts, for each rule by which texts are cut."""

from __future__ import annotations

import json
import pydoc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_megatron.data import Tokenizer, build_tokenizer
from lightning_megatron.data.preprocessing import word_cuts
from lightning_megatron.data.preprocessing.token_bytes import TokenBytes
from lightning_megatron.data.preprocessing.word_cuts import WordCuts
from lightning_megatron.data.tokenizers import FastTokenizer

tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PROSE = [pydoc.plain(pydoc.render_doc(name)) for name in ("str", "list", "json", "argparse", "pathlib", "re", "bz2")]
RULES = {"gpt2": word_cuts._GPT2, "llama3": word_cuts._LLAMA3, "qwen2": word_cuts._QWEN2}
KINDS = ("byte level", "gpt2", "llama3", "qwen2", "bert")


def backend_of(kind: str) -> Any:
    pre, models, trainers = tokenizers.pre_tokenizers, tokenizers.models, tokenizers.trainers
    if kind == "bert":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer, made.pre_tokenizer = tokenizers.normalizers.BertNormalizer(), pre.BertPreTokenizer()
        special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
        made.train_from_iterator(PROSE, trainers.WordPieceTrainer(vocab_size=900, special_tokens=special))
        return made
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    if kind == "byte level":
        made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    else:
        split = pre.Split(tokenizers.Regex(RULES[kind]), behavior="isolated")
        made.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    if kind == "qwen2":
        made.normalizer = tokenizers.normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<|end|>", "<|begin|>"], initial_alphabet=pre.ByteLevel.alphabet()
    )
    made.train_from_iterator(PROSE, trainer)
    if kind == "llama3":
        template = tokenizers.processors.TemplateProcessing(
            single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 1), ("<|end|>", 0)]
        )
        made.post_processor = tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), template])
    return made


@cache
def pair(kind: str) -> tuple[Tokenizer, TokenBytes]:
    """A tokenizer, and the maker of bytes that remembers its words."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        backend_of(kind).save(f"{folder}/tokenizer.json")
        tokenizer = build_tokenizer("HuggingFaceTokenizer", folder)
    assert isinstance(tokenizer, FastTokenizer)
    cuts = WordCuts.of(tokenizer.description())
    return tokenizer, TokenBytes(tokenizer, np.dtype("<u2"), kind, cuts)


def same(kind: str, text: str) -> None:
    tokenizer, remembering = pair(kind)
    assert remembering._cuts is not None
    assert np.frombuffer(remembering.of(text), "<u2").tolist() == tokenizer.encode(text)


# What rules treat differently: kinds of space, quotes with and without a contraction, digits, marks, other scripts.
HARD = st.text(st.sampled_from(" \n\t\r'\x0b\x0c\x1c\x85\xa0\u2028\u3000aZs1\u00b2.-_<|>e\u0301\u4e2d\u0130\u017f\x00"))
WORDS = st.lists(
    st.sampled_from(
        [
            "it's",
            "WE'LL",
            "12345",
            "3.14",
            "a.b",
            "x",
            "",
            " ",
            "\n",
            "\n\n",
            "<|end|>",
            "<|end",
            "na\u00efve",
            "!?\n",
            "''s",
        ]
    )
).map(" ".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=HARD | WORDS | st.text() | st.text(st.characters(max_codepoint=127)))
def test_remembered_words_give_the_tokens_of_the_text(kind: str, text: str) -> None:
    same(kind, text)


@cache
def trained(kind: str) -> str:
    return str(backend_of(kind).to_str())


NORMALIZERS: dict[str, tuple[str, Any]] = {
    "uncased": ("bert", lambda of: of.BertNormalizer()),
    "cased": ("bert", lambda of: of.BertNormalizer(lowercase=False, strip_accents=True)),
    "BERT without one": ("bert", lambda of: None),
    "NFC": ("qwen2", lambda of: of.NFC()),
    "NFD": ("qwen2", lambda of: of.NFD()),
    "bytes without one": ("llama3", lambda of: None),
}
ADDED = ("c++", "Well-Known", "F#", "caf\u00e9", "cafe", "e\u0301t\u00e9", "\u212a", "\u037e", "\u4e2d", "a\u0300\x01b")
AROUND = st.lists(
    st.sampled_from(
        [*ADDED, "C++", "well-known", "xF#y", "cafe\u0301", "CAFE", "\u00e9te\u0301", "k", "K", ";", "\u4e2d\u6587"]
    )
    | st.sampled_from([*" ,.", "like", "\n", "\u200b", "\u0301", "\u00a0", "\x01", "a\u0300b", "\u00e0b"])
)


@cache
def with_added(name: str, token: str, normalized: bool) -> tuple[Tokenizer, TokenBytes]:
    """A tokenizer with one token that was added to the trained ones, and the maker of bytes."""
    import tempfile

    kind, normalizer = NORMALIZERS[name]
    made = tokenizers.Tokenizer.from_str(trained(kind))
    made.normalizer = normalizer(tokenizers.normalizers)
    made.add_tokens([tokenizers.AddedToken(token, normalized=normalized)])
    with tempfile.TemporaryDirectory() as folder:
        made.save(f"{folder}/tokenizer.json")
        tokenizer = build_tokenizer("HuggingFaceTokenizer", folder)
    assert isinstance(tokenizer, FastTokenizer)
    return tokenizer, TokenBytes(tokenizer, np.dtype("<u2"), name, WordCuts.of(tokenizer.description()))


@pytest.mark.parametrize("name", NORMALIZERS)
@given(token=st.sampled_from(ADDED), normalized=st.booleans(), inside=AROUND)
@example(token="c++", normalized=True, inside=["C++"])
@example(token="Well-Known", normalized=True, inside=["well-known"])
@example(token="caf\u00e9", normalized=True, inside=["CAFE"])
@example(token="\u037e", normalized=True, inside=[";"])
@example(token="\u212a", normalized=True, inside=["K"])
@settings(max_examples=30)
def test_added_tokens_are_found_in_normalized_text(name: str, token: str, normalized: bool, inside: list[str]) -> None:
    """Where the tokenizer itself finds them: its normalizer undoes case, accents or composition of the text."""
    tokenizer, remembering = with_added(name, token, normalized)
    for text in ("".join(inside), f"I like {' '.join(inside)}", f"{''.join(inside)} {PLAIN * 3}{token.upper()} x"):
        assert np.frombuffer(remembering.of(text), "<u2").tolist() == tokenizer.encode(text)


@pytest.mark.parametrize(("token", "is_cut"), [("c++", True), ("well-known", True), ("caf\u00e9", False)])
def test_a_text_is_cut_though_tokens_of_ascii_characters_were_added(token: str, is_cut: bool) -> None:
    for name in ("uncased", "cased", "NFC", "NFD"):
        assert (with_added(name, token, True)[1]._cuts is not None) == is_cut, name
        assert with_added(name, token, False)[1]._cuts is not None, name


PLAIN = "In 2026 it's plain: f(x) = {a[0]}, isn't it?\n\n    Well\tso  "


@cache
def short(kind: str) -> tuple[Tokenizer, TokenBytes, WordCuts]:
    """The same, but texts of 100 characters are long."""
    tokenizer, _ = pair(kind)
    assert isinstance(tokenizer, FastTokenizer)
    cuts = WordCuts.of(tokenizer.description())
    assert cuts is not None
    cuts = replace(cuts, longest=100)
    return tokenizer, TokenBytes(tokenizer, np.dtype("<u2"), kind, cuts), cuts


@pytest.mark.parametrize("kind", KINDS)
@given(inside=st.lists(HARD | WORDS | st.text(max_size=5) | st.sampled_from(PROSE).map(lambda text: text[:300])))
def test_long_texts_of_plain_words_with_a_few_others(kind: str, inside: list[str]) -> None:
    tokenizer, remembering, cuts = short(kind)
    assert remembering._cuts is not None
    text = "".join(f"{PLAIN * (3 + 4 * (number % 2))}{part}" for number, part in enumerate(inside)) + PLAIN
    assert "".join(cuts.parts(text)) == text
    assert np.frombuffer(remembering.of(text), "<u2").tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_are_cut_into_short_parts_of_plain_words(kind: str) -> None:
    _, _, cuts = short(kind)
    parts = cuts.parts(f"{PLAIN * 20}na\u00efve {PLAIN * 20}<|end|> {PLAIN * 20}")
    assert max(map(len, parts)) < 150
    strange = [part for part in parts if cuts.pieces_of(part) is None and len(part) <= 100]
    assert len(strange) == (1 if kind == "bert" else 2)
    assert max(map(len, strange)) < 30
    assert all(cuts.pieces_of("x" * count) for count in (1, 100))
    assert cuts.pieces_of("x" * 101) is None


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.characters(max_codepoint=127)))
def test_plain_pieces_are_all_of_the_text(kind: str, text: str) -> None:
    _, _, cuts = short(kind)
    pieces = cuts.pieces_of(text)
    if pieces is not None:
        assert "".join(pieces) == ("".join(text.split()) if kind == "bert" else text)


@pytest.mark.parametrize("kind", KINDS)
def test_prose(kind: str) -> None:
    for text in PROSE:
        same(kind, text)
        same(kind, text.replace(" ", "\n", 50).replace("e", "\u00e9", 9))


def content(**changes: Any) -> dict[str, Any]:
    return {**json.loads(backend_of("byte level").to_str()), **changes}


def test_unknown_rules_have_no_cuts() -> None:
    found = content()
    assert WordCuts.of(found) is not None
    bytes_only = {**found["pre_tokenizer"], "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": word_cuts._GPT2}, "behavior": "Isolated", "invert": False}
    in_order = WordCuts.of({**found, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_only]}})
    characters = WordCuts.of({**found, "pre_tokenizer": split})
    assert in_order is not None
    assert in_order.byte_level
    assert characters is not None
    assert not characters.byte_level
    token = {"id": 0, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False}
    for changes in (
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}},
        {"pre_tokenizer": {**found["pre_tokenizer"], "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [found["pre_tokenizer"]] * 2}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [bytes_only, split]}},
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
        {"normalizer": {"type": "NFKC"}},
        {"model": {**found["model"], "dropout": 0.1}},
        {"model": {**found["model"], "type": "Unigram"}},
        {"added_tokens": [{**token, "rstrip": True}]},
        {"added_tokens": [{**token, "content": "two words"}]},
    ):
        assert WordCuts.of({**found, **changes}) is None, changes


def test_a_tokenizer_that_is_not_what_it_says_is_asked_for_each_text() -> None:
    tokenizer, _ = pair("byte level")

    class Odd:
        vocab_size, eod, bos, eos, pad = tokenizer.vocab_size, None, None, None, None

        def encode(self, text: str) -> list[int]:
            return tokenizer.encode(text.strip())

        def decode(self, ids: Any) -> str:
            return ""

    cuts = WordCuts.of(content())
    made = TokenBytes(Odd(), np.dtype("<u2"), "it", cuts)
    assert made._cuts is None
    assert np.frombuffer(made.of(" a b "), "<u2").tolist() == tokenizer.encode("a b")


def test_memory_of_words_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_megatron.data.preprocessing import token_bytes

    monkeypatch.setattr(token_bytes, "_MOST_WORDS", 10)
    monkeypatch.setattr(token_bytes, "_MOST_PIECES", 20)
    tokenizer, _ = pair("byte level")
    assert isinstance(tokenizer, FastTokenizer)
    made = TokenBytes(tokenizer, np.dtype("<u2"), "it", WordCuts.of(tokenizer.description()))
    for text in (" ".join(f"w{letter}{i}" for i in range(50)) for letter in ("", "\u00e9", "\u0416") * 2):
        assert np.frombuffer(made.of(text), "<u2").tolist() == tokenizer.encode(text)
    for remembered, most in ((made._words, 10), (made._pieces, 20)):
        assert 0 < len(remembered) <= most // 2
        assert len(remembered._older) == most // 2
