"""Special tokens that only the settings beside ``tokenizer.json`` name get the ids that transformers gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.data.tokenizers import HuggingFaceTokenizer
from lightning_megatron.errors import DataError

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")


def added(content: str, **flags: bool) -> dict[str, Any]:
    usual = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **usual, **flags}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **added(content, **flags)}


OLD = {"eos_token": "</s>"}
SETTINGS: dict[str, dict[str, Any]] = {
    "a name": {"pad_token": "[PAD]"},
    "a name that takes white space": {"pad_token": typed("[PAD]", lstrip=True)},
    "all names, in an order of their own": {"image_token": "<image>", "mask_token": "[MASK]", "bos_token": "<s>"},
    "further ones": {"additional_special_tokens": ["<tool>", typed("<call>", rstrip=True)]},
    "further ones by their new name": {"extra_special_tokens": ["<tool>"], "additional_special_tokens": ["<call>"]},
    "further ones with names": {"extra_special_tokens": {"image_token": "<image>"}},
    "listed": {"added_tokens_decoder": {"9": added("<tool>"), "8": added("<call>", special=False)}},
    "listed and named": {"pad_token": "<tool>", "added_tokens_decoder": {"5": added("<tool>", special=False)}},
    "listed with other flags": {"added_tokens_decoder": {"1": added("</s>", single_word=True)}},
    "pieces of the vocabulary": {"eos_token": "blue", "added_tokens_decoder": {"2": added("red", normalized=True)}},
    "beside a begin token": {"bos_token": "<s>", "add_bos_token": True},
}
TEXTS = ["red blue", "red  [PAD] blue", "<tool> red <call>", "<image><s>[MASK]", "red </s>blue", "redblue"]


def folder_of(folder: Path, settings: dict[str, Any], last: int = 4) -> Path:
    pieces = {"<unk>": 0, "</s>": 1, "red": 2, "blue": 3, "far": last}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(pieces, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def assert_same(folder: Path) -> None:
    ours, theirs = HuggingFaceTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert [ours.encode(text) for text in TEXTS] == [theirs(text)["input_ids"] for text in TEXTS]
    assert (ours.bos, ours.eos, ours.pad) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ours.vocabulary() == theirs.get_vocab()
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    ids = sorted(ours.vocabulary().values())
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("last", [4, 9])
@pytest.mark.parametrize("name", SETTINGS)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str, last: int) -> None:
    assert_same(folder_of(tmp_path, OLD | SETTINGS[name], last))


@pytest.mark.parametrize("settings", [{"pad_token": "[PAD]"}, {"added_tokens_decoder": {"5": added("<tool>")}}])
def test_the_file_of_special_tokens_counts_where_no_tokens_are_listed(tmp_path: Path, settings: dict[str, Any]) -> None:
    named = {"eos_token": "</s>", "pad_token": added("<call>"), "additional_special_tokens": ["<tool>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    assert_same(folder_of(tmp_path, OLD | settings))


def test_a_folder_of_transformers_with_a_token_added_by_hand(tmp_path: Path) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue"]
    transformers.BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": ["<tool>"]}))
    assert_same(tmp_path)


def test_settings_that_are_none_are_named(tmp_path: Path) -> None:
    folder_of(tmp_path, {"added_tokens_decoder": {"a": 3}})
    with pytest.raises(DataError, match=r"tokenizer_config.json: not the settings of a tokenizer \(invalid literal"):
        HuggingFaceTokenizer(tmp_path)


def test_ids_that_the_library_cannot_write_are_refused(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 3_000_000_000, "<unk>": 1}, "unk_token": "<unk>"}
    content = json.loads((folder_of(tmp_path, {}) / "tokenizer.json").read_text()) | {
        "model": model,
        "added_tokens": [],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"tokenizer.json: has token id 3000000000; the largest"):
        HuggingFaceTokenizer(tmp_path)
